"""The dashboard of a terminal: its lines by value, and what a terminal gets."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest

from rollmill.record.dashboard import Sampled, fits_terminal, lines, progress_bar, sparkline
from rollmill.record.status import Status

ROW = {"losses/policy": -0.02, "losses/value": 12.5, "losses/entropy": None, "evaluation/return": 480.0}
STATUS = Status(250_000, 1_000_000, 25_000.0, 312.0, 200.0, seconds=10.0, row={**ROW, "gpu/utilisation": 0.92})


def test_lines_show_progress_returns_losses_and_gpus():
    shown = list(lines(STATUS, [1.0, 2.0, 3.0], 100))
    assert shown[0].startswith("250 k of 1 M steps  ━") and shown[0].endswith(" 25%  0:10 so far, 0:30 left")
    assert shown[1] == "steps/s 25 k   return 312 ▁▅█   length 200"
    assert shown[2:5] == ["losses policy -0.0200   value 12.5", "evaluation 480", "GPU utilisation 92%"]
    assert shown[5].startswith("peak memory of this process: ")
    assert len(shown[0]) == 100


def test_a_training_without_episodes_says_so():
    status = Status(0, 100, 0.0, None, None)
    assert list(lines(status, [], 80))[1] == "steps/s 0   no episode has ended yet"


def test_bars_and_pictures_fill_their_width():
    assert progress_bar(0.5, 4) == "━━╌╌" and progress_bar(1.0, 2) == "━━"
    assert sparkline([1.0, 1.0], 5) == "▁▁" and sparkline([0.0] * 9 + [7.0], 2) == "▁█"
    assert sparkline([1.0], 5) == ""


def test_samples_span_the_whole_past():
    sampled = Sampled(4)
    for value in range(100):
        sampled.add(float(value))
    assert sampled.values[0] == 0.0 and sampled.values[-1] >= 64.0 and len(sampled.values) <= 4


PROGRAM = """
from rollmill.record.display import choose_display
from rollmill.record.status import Status
display = choose_display(quiet=False, dashboard={dashboard})
display.note("compiling ...")
for steps in (1, 50, 100):
    display.update(Status(steps, 100, 9.0, 3.5, 2.0, row={{"losses/policy": 0.25}}))
display.note("a \\x1b note")
print("of a hook")
display.close()
"""


@pytest.mark.parametrize(("dashboard", "rows"), [(True, 30), (True, 10), (False, 30)])
def test_a_terminal_gets_a_dashboard_if_it_is_large_enough(dashboard, rows):
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 100, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": str(rows)}
    words = [sys.executable, "-c", PROGRAM.format(dashboard=dashboard)]
    with subprocess.Popen(words, stdout=terminal, stderr=terminal, stdin=terminal, env=environment) as process:
        os.close(terminal)
        shown = read_all(master).decode()
    assert process.returncode == 0, shown
    assert ("losses policy 0.250" in shown) is (dashboard and rows == 30)
    assert "compiling ..." in shown and r"a \x1b note" in shown and "of a hook" in shown and "100%" in shown
    assert shown.rfind("\x1b[?25h") >= shown.rfind("\x1b[?25l")  # the cursor is there again


@pytest.mark.parametrize("dashboard", [True, False])
def test_output_that_goes_to_a_file_stays_out_of_the_terminal(dashboard):
    master, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    words = [sys.executable, "-c", PROGRAM.format(dashboard=dashboard)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=terminal, env=environment) as process:
        os.close(terminal)
        shown = read_all(master).decode()
        assert process.stdout is not None and process.stdout.read() == b"of a hook\n"
    assert "100%" in shown and "of a hook" not in shown


@pytest.mark.parametrize(("encoding", "fits"), [("utf-8", True), ("iso-8859-1", False), ("ascii", False)])
def test_a_terminal_without_the_bars_gets_no_dashboard(monkeypatch, encoding, fits):
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True, encoding=encoding))
    assert fits_terminal() is fits


def read_all(descriptor):
    data = b""
    while True:
        try:
            piece = os.read(descriptor, 2**16)
        except OSError:  # the terminal's other end is closed
            piece = b""
        if not piece:
            os.close(descriptor)
            return data
        data += piece
