"""A program that several processes need at the same time is compiled by one of them."""

import subprocess
import sys
import threading
import time

import pytest

from rollmill.programs import compile_lock as locks
from rollmill.programs.compile_lock import compiling_once

NAME = "0123456789abcdef"
OTHER = "fedcba9876543210"
HOLD = f"""
import sys
from rollmill.programs.compile_lock import compiling_once
with compiling_once("{NAME}") as lock:
    print("held", flush=True)
    if sys.stdin.readline() == "release\\n":
        lock.release()
        print("released", flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path, monkeypatch):
    """A process that compiles the program, until it is told something."""
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD], text=True, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def tell(holder, word):
    holder.stdin.write(word + "\n")
    holder.stdin.flush()


def waits_until(end, name=NAME):
    """Returns whether this process waited for the lock until `end` ended it, and whether it has the lock."""
    ended = []
    thread = threading.Timer(0.3, lambda: (ended.append(1), end()))
    thread.start()
    with compiling_once(name) as lock:
        waited = bool(ended)
    thread.join()
    return waited, lock.file is not None


def test_a_process_waits_for_the_one_that_compiles_the_same_program(holder):
    assert waits_until(lambda: tell(holder, "end")) == (True, False)
    assert waits_until(lambda: None) == (False, True)


def test_a_process_that_is_killed_keeps_nobody_waiting(holder):
    assert waits_until(holder.kill) == (True, False)


def test_other_programs_are_compiled_meanwhile(holder):
    assert waits_until(lambda: None, OTHER) == (False, True)
    assert waits_until(lambda: None, None) == (False, False)


def test_a_program_that_will_not_be_stored_is_not_waited_for(holder):
    tell(holder, "release")
    assert holder.stdout.readline() == "released\n"
    assert waits_until(lambda: None) == (False, True)


def test_a_process_that_was_stopped_is_not_waited_for_forever(holder, monkeypatch):
    monkeypatch.setattr(locks, "MAX_SECONDS", 0.2)
    began = time.monotonic()
    with compiling_once(NAME) as lock:
        assert lock.file is None and time.monotonic() - began >= 0.2


def test_nothing_is_locked_without_a_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "file"))
    assert waits_until(lambda: None) == (False, False)
