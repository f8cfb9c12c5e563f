"""Sessions under a clock of the test's own."""

from rollmill.serving.limits import ServerLimits
from rollmill.serving.sessions import Sessions
from wordings import raises


def sessions():
    return Sessions(ServerLimits(1, sessions=2, session_seconds=10.0))


def test_slots_are_distinct_and_free_again_when_a_session_ends():
    known = sessions()
    one, other = known.open(0.0), known.open(0.0)
    assert {one.slot, other.slot} == {0, 1} and one.name != other.name and len(known) == 2
    known.end(one.name, 1.0)
    assert known.open(2.0).slot == one.slot
    with raises("there-is-no-session-was"):
        known.find(one.name, 3.0)


def test_one_that_is_unused_is_given_up_for_a_new_one_and_no_other():
    known = sessions()
    old, new = known.open(0.0), known.open(0.0)
    known.find(new.name, 8.0)
    with raises("sessions-are-open-and-at", "2", "2") as refused:
        known.open(9.0)
    assert refused.value.status == 503 and refused.value.retry_after == 1
    assert known.open(10.5).slot == old.slot
    assert known.find(new.name, 11.0) is new


def test_one_with_requests_in_flight_is_kept():
    known = sessions()
    busy, idle = known.open(0.0), known.open(0.0)
    busy.in_flight = 1
    with raises("session-has-requests-in-flight", "1") as refused:
        known.end(busy.name, 0.0)
    assert refused.value.status == 409
    assert known.open(100.0).slot == idle.slot
    with raises("sessions-are-open-and-at", "2"):
        known.open(100.0)


def test_after_a_loss_of_the_memories_all_are_ended():
    known = sessions()
    name = known.open(0.0).name
    known.clear()
    assert len(known) == 0
    with raises("there-is-no-session-was"):
        known.find(name, 0.0)
