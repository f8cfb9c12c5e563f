"""The command `rollmill render RUN`, which shows a policy at play, as a file or in the terminal."""

import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from rollmill.cli.output import control_terminal
from rollmill.cli.parsing import parse
from rollmill.cli.shared_options import PolicyOptions
from rollmill.core.local_paths import local_path
from rollmill.core.options import Arg
from rollmill.core.text import format_count
from rollmill.pictures import FASTEST_GIF, check_destination, check_fps, coloured_lines, plain_lines, write_frames
from rollmill.policies.rendering import Frame, render_run, with_caption

TERMINAL = "terminal"
HOME, CLEAR, CLEAR_REST, HIDE, SHOW = "\x1b[H", "\x1b[2J", "\x1b[J", "\x1b[?25l", "\x1b[?25h"


@dataclass(frozen=True)
class Render(PolicyOptions):
    """Show the policy of a run at play: as a GIF, an MP4, a folder of PNG files, or in the terminal."""

    output: str | None = None
    """File that ends in .gif or .mp4, a name without an ending for a folder of PNG files, or terminal. Default:
    the name of the run with .gif, in the working directory."""
    episodes: int = 1
    """Number of episodes, played one after another."""
    max_steps: int = 1000
    """Maximum number of steps to show of an episode."""
    fps: float | None = None
    """Frames per second. Default: depends on the environment."""
    size: int | None = None
    """Length of the longer side in pixels. Default: 480, or the size of the pictures that an environment draws
    itself."""
    no_captions: Annotated[bool, Arg(only_on=True)] = False
    """Leave out the strip below each picture, which shows episode, step, return, action and the meaning of
    colours."""
    force: Annotated[bool, Arg(only_on=True)] = False
    """Replace an existing file or folder of frames."""


def run(arguments: list[str]) -> int:
    """Plays episodes with the policy of a run, and writes or shows their pictures. Returns the exit code."""
    options = parse(Render, arguments, prog="rollmill render")
    output = options.output or f"{os.path.basename(os.path.realpath(options.run))}.gif"
    path = local_path("output", output)
    check_fps(options.fps)
    if output != TERMINAL:
        check_destination(path, fps=options.fps, force=options.force)
    frames = _frames(options)
    first = next(frames)
    fps = options.fps or first.fps
    frames = itertools.chain([first], frames)
    if output == TERMINAL:
        show_frames(frames, fps=fps)
        return 0
    fps = options.fps or (min(fps, FASTEST_GIF) if output.endswith(".gif") else fps)
    tally = Tally()
    shown = tally.counting(frames)
    pictures = (frame.picture for frame in shown) if options.no_captions else map(with_caption, shown)
    write_frames(path, pictures, fps=fps)
    print(tally.sentence(output, fps))
    return 0


def _frames(options: Render) -> Iterator[Frame]:
    return render_run(
        options.load(),
        episodes=options.episodes,
        max_steps=options.max_steps,
        size=options.size,
        imports=options.imports,
        **options.play,
    )


class Tally:
    """Counts frames as they pass, and keeps the last frame of each episode."""

    def __init__(self) -> None:
        self._count, self._last = 0, {}

    def counting(self, frames: Iterator[Frame]) -> Iterator[Frame]:
        """Yields the given frames, and counts them."""
        for frame in frames:
            self._count, self._last[frame.episode] = self._count + 1, frame
            yield frame

    def sentence(self, output: str, fps: float) -> str:
        """Returns a sentence about the written file and the outcomes of the episodes."""
        height, width = self._last[0].picture.shape[:2]
        returns = ", ".join(
            f"{frame.episode_return:.5g} in {format_count(frame.step, 'step')}" for frame in self._last.values()
        )
        frames = f"{format_count(self._count, 'frame')} of {width} x {height} pixels at {fps:g} frames per second"
        return f"{output}: {frames}; return {returns}"


def show_frames(frames: Iterator[Frame], *, fps: float) -> None:
    """Plays frames in the terminal, `fps` of them per second.

    If the output is not a terminal, prints the frames one below another as plain text.
    """
    if not sys.stdout.isatty():
        for frame in frames:
            print("\n".join([_caption(frame), *plain_lines(frame.picture, 80, 24), ""]))
        return
    draw = plain_lines if "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb" else coloured_lines
    control_terminal(HIDE + CLEAR)
    due = time.monotonic()
    try:
        for frame in frames:
            columns, rows = shutil.get_terminal_size()
            lines = draw(frame.picture, columns, max(1, rows - 2))
            ends = "\x1b[K\n"  # clears the rest of each line, in which an earlier picture may have been longer
            control_terminal(HOME + ends.join([_caption(frame), *lines]) + CLEAR_REST)
            due = max(due + 1 / fps, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
    finally:
        control_terminal(f"{SHOW}\n")


def _caption(frame: Frame) -> str:
    return ", ".join(filter(None, frame.texts))
