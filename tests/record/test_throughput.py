from rollmill.record import aggregates as module
from rollmill.record.aggregates import Throughput


def test_what_arrives_at_once_at_the_end_is_no_speed(monkeypatch):
    clock = iter([0.0, 0.5, 1.0, 1.5, 2.0, 2.001])
    monkeypatch.setattr(module.time, "perf_counter", clock.__next__)
    pace = Throughput()
    assert [pace.after(50) for _ in range(4)] == [100] * 4
    assert 100 < pace.after(50) < 200
