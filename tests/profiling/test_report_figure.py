"""The figure of a profile."""

from pathlib import Path
from typing import Any

import pytest

from profiling.by_hand import process, profile
from rollmill.profiler.report import figure as figure_module
from rollmill.profiler.report.figure import write_figure
from rollmill.profiling.results import Profile

pytest.importorskip("matplotlib", reason="it draws PNGs")


def drawn(path: Path, found: Profile, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of the figure that is written."""
    made: list[Any] = []
    inner = figure_module.new_figure
    monkeypatch.setattr(figure_module, "new_figure", lambda *size: made.append(inner(*size)) or made[0])
    with path.open("wb") as file:
        write_figure(file, found)
    assert path.read_bytes().startswith(b"\x89PNG")
    return made[0].axes


def test_operations_have_bars_of_their_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upper, _ = drawn(tmp_path / "a.png", profile(processes=[process()]), monkeypatch)
    names = [label.get_text() for label in upper.get_yticklabels()]
    place = names.index("learn / gradients")
    widths = [bars[place].get_width() for bars in upper.containers]
    assert widths == pytest.approx([18.6 - 1.2, 1.2, 2.1], abs=0.05)  # device, estimated, host


def test_each_process_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [process("learner/0"), process("actor/0"), process("actor/1")]
    _, lower = drawn(tmp_path / "a.png", profile(processes=processes), monkeypatch)
    assert [label.get_text() for label in lower.get_yticklabels()] == ["learner/0", "actor/0", "actor/1"]
    for place in range(3):
        assert sum(bars[place].get_width() for bars in lower.containers) == pytest.approx(100.0)


def test_a_profile_without_operations_has_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn(tmp_path / "a.png", profile(operations=()), monkeypatch)
