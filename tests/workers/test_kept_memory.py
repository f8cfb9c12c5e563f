"""What a replica does with memory that is freed, and with a compiler's code, once its programs are compiled."""

import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from rollmill.core.machine import leave_code_of
from rollmill.workers.replica import loop


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="memory of programs on CPUs")
def test_later_iterations_allocate_from_memory_that_earlier_ones_freed(monkeypatch):
    calls = []
    monkeypatch.setattr(loop, "keep_freed_memory", lambda: calls.append("keep"))
    monkeypatch.setattr(loop, "leave_compilers", lambda: calls.append("leave"))
    replica = object.__new__(loop._Replica)
    replica._compiled, replica._reports = False, False
    replica._start_report = SimpleNamespace(send=lambda: None)
    replica._stages = [SimpleNamespace(run=lambda work: calls.append(work.iteration) or work)] * 2
    for iteration in range(3):
        replica._iterate(iteration)
    assert calls == [0, "leave", 0, "leave", "keep", 1, 1, 2, 2]


def resident_file_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/maps")
def test_code_that_was_left_is_no_longer_resident_and_can_be_run_again():
    binding = pytest.importorskip("llvmlite.binding")
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    compiled = lambda: str(binding.parse_assembly("define i32 @one() { ret i32 1 }"))
    text = compiled()
    before = resident_file_bytes()
    leave_code_of("libllvmlite")
    assert resident_file_bytes() <= before - 2**20
    assert compiled() == text
