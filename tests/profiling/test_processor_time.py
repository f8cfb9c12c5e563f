"""How much cores are at work: for a process and its descendants, and for nobody."""

import os
import subprocess
import sys
import time

import pytest

from rollmill.profiling import processor_time
from rollmill.profiling.processor_time import CoreUse, ProcessorTime, core_use, read_processor_time

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
TICK = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A system of four cores, of which this process may use two, with the processes that a test writes."""
    lines = [f"cpu{core} 5 0 5 {(10 + core) * TICK} {TICK} 0 0 0 0 0" for core in range(4)]
    (tmp_path / "stat").write_text("\n".join(["cpu 1 2 3 4 5", *lines, "intr 1 2", ""]))
    monkeypatch.setattr(processor_time, "PROC", tmp_path)
    monkeypatch.setattr(processor_time, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 3})
    return tmp_path


def add_process(folder, number, parent, *, user, system):
    (folder / str(number)).mkdir()
    rest = ["S", parent, *[0] * 9, user * TICK, system * TICK, *[0] * 8]
    (folder / str(number) / "stat").write_text(f"{number} (a name) with ) signs) {' '.join(map(str, rest))}")


def test_descendants_count_and_others_do_not(system):
    add_process(system, 7, os.getpid(), user=3, system=1)
    add_process(system, 8, 7, user=10, system=0)
    add_process(system, 9, 1, user=100, system=0)
    (system / "11").mkdir()  # one that ended while it was read
    found = read_processor_time()
    assert found is not None
    assert found.computed - time.process_time() == pytest.approx(14.0, abs=0.5)
    assert found.idle == pytest.approx((11 + 1) + (13 + 1)), "of cores 1 and 3, with their waiting for disks"


def test_a_system_that_hides_its_cores_tells_nothing(system):
    (system / "stat").write_text("cpu 0 0 0 0 0\ncpu0 0 0 0 0 0\n")
    assert read_processor_time() is None
    (system / "stat").unlink()
    assert read_processor_time() is None


def test_use_is_a_mean_over_intervals(system):
    """3 + 1 seconds in 4 of 2 cores; the cores were idle for 2 + 1.5 seconds."""
    readings = [
        (ProcessorTime(10.0, 5.0, 50.0), ProcessorTime(13.0, 8.0, 52.0)),
        (ProcessorTime(20.0, 9.0, 60.0), ProcessorTime(21.0, 10.0, 61.5)),
    ]
    assert core_use(readings) == CoreUse(busy=1.0, idle=0.875)
    (system / "cpu.max").write_text("150000 100000\n")
    assert core_use(readings) == CoreUse(busy=1.0, idle=0.5), "a container that may keep 1.5 cores busy"
    (system / "cpu.max").write_text("max 100000\n")
    assert core_use(readings) == CoreUse(busy=1.0, idle=0.875)
    assert core_use([]) is None
    assert core_use([*readings, (ProcessorTime(30.0, 9.0, 70.0), None)]) is None
    ended = (ProcessorTime(30.0, 9.0, 70.0), ProcessorTime(31.0, 4.0, 70.0))
    assert core_use([*readings, ended]) is None, "a descendant has ended, and what it computed is unknown"


def test_a_child_that_computes_is_seen():
    script = (
        "import sys, time\nwhile time.process_time() < 0.2: pass\nprint(); sys.stdout.flush(); sys.stdin.read()"
    )
    before = read_processor_time()
    with subprocess.Popen([sys.executable, "-S", "-c", script], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        after = read_processor_time()
        child.communicate()
    assert before is not None and after is not None and after.computed - before.computed > 0.15
