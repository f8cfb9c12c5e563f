"""The line about a temperature that grows without end."""

from rollmill.training.known_failures import TemperatureWatch


def notes(temperatures, initial=1.0):
    watch = TemperatureWatch(initial)
    return [watch.seen({"losses/temperature": temperature}) for temperature in temperatures]


def test_it_is_said_once_when_it_has_grown_a_thousandfold():
    said = notes([1.0, 900.0, 1001.0, 1e9])
    assert said[:2] == [None, None] and said[3] is None
    assert said[2].startswith("note: the temperature has grown to 1e+03") and "target_entropy" in said[2]


def test_what_is_high_but_does_not_grow_is_not_noticed():
    assert notes([600.0, 500.0], initial=0.1)[1] is None
    assert notes([50.0, 99.0], initial=0.1) == [None, None]
    assert TemperatureWatch(1.0).seen({"losses/policy": 1e9}) is None
