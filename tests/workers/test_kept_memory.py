"""What a replica does with memory that is freed: returned while programs are compiled, kept afterwards."""

from types import SimpleNamespace

import jax
import pytest

from rollmill.workers.replica import loop


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="memory of programs on CPUs")
def test_later_iterations_allocate_from_memory_that_earlier_ones_freed(monkeypatch):
    calls = []
    monkeypatch.setattr(loop, "keep_freed_memory", lambda: calls.append("keep"))
    monkeypatch.setattr(loop, "return_freed_memory", lambda: calls.append("return"))
    replica = object.__new__(loop._Replica)
    replica._compiled, replica._reports = False, False
    replica._start_report = SimpleNamespace(send=lambda: None)
    replica._stages = [SimpleNamespace(run=lambda work: calls.append(work.iteration) or work)] * 2
    for iteration in range(3):
        replica._iterate(iteration)
    assert calls == [0, "return", 0, "return", "keep", 1, 1, 2, 2]
