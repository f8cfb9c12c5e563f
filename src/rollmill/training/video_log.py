"""A tracker that adds videos of the policy to TensorBoard: `--track video`."""

import math
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from rollmill.core.errors import CheckpointError
from rollmill.core.folder import Folder
from rollmill.dataflow import Graph
from rollmill.hooks.events import (
    CheckpointSaved,
    Hook,
    TrainingEvent,
    TrainingFinished,
    TrainingStarted,
    name_hook,
)
from rollmill.pictures import FASTEST_GIF, pillow, write_frames
from rollmill.policies.loading import load_weights
from rollmill.policies.rendering import Frame, render_run, with_caption
from rollmill.record.event_log import EventLog

TAG, FOLDER = "checkpoint/video", "video"
SECONDS_BETWEEN = 60.0
"""Shortest time between two videos. Checkpoints in between get no video, except the last checkpoint."""
MAX_STEPS, MAX_PICTURES, SIZE = 500, 100, 240
"""Maximum numbers of steps in the episode and of pictures in the video, and pixels of the longer side."""


def video_log(algorithm: Graph | None = None) -> Hook:
    """Returns a hook that renders an episode of new checkpoints, at most one a minute, and of the last checkpoint.

    The videos are written to `tensorboard/video` in the run directory, and TensorBoard shows them among its
    images.

    Args:
        algorithm: the trained graph. If it is None, the graph is rebuilt from the names in the run.

    Raises:
        UsageError: Pillow is not installed. At the first checkpoint: the environment cannot be rendered.
    """
    pillow()
    videos: list[_Videos] = []

    def hook(event: TrainingEvent) -> None:
        match event:
            case TrainingStarted():
                videos[:] = [_Videos(event, algorithm)]
            case CheckpointSaved():
                videos[0].follow(event)
            case TrainingFinished():
                videos[0].finish(event)

    return name_hook("video_log", hook)


class _Videos:
    def __init__(self, started: TrainingStarted, algorithm: Graph | None) -> None:
        self._directory, self._algorithm = started.directory, algorithm
        purge_step = started.env_steps if started.iteration else None
        self._log = EventLog(Folder(started.directory, ("tensorboard", FOLDER)), purge_step=purge_step)
        self._last, self._due = started.iteration, -math.inf

    def follow(self, event: CheckpointSaved) -> None:
        """Adds a video of a checkpoint, unless the last video is recent or the checkpoint is displaced."""
        if time.monotonic() < self._due or not event.path.exists():
            return
        try:
            self._add(event.iteration, event.env_steps)
        except CheckpointError:
            if event.path.exists():
                raise
            return  # another checkpoint replaced it while it was being read
        self._due = time.monotonic() + SECONDS_BETWEEN

    def finish(self, event: TrainingFinished) -> None:
        """Adds a video of the last checkpoint, and closes the file."""
        if event.iteration > self._last:
            self._add(event.iteration, event.env_steps)
        self._log.close()

    def _add(self, iteration: int, env_steps: int) -> None:
        loaded = load_weights(self._directory, checkpoint=iteration, algorithm=self._algorithm)
        frames = list(render_run(loaded, max_steps=MAX_STEPS, size=SIZE))
        height, width = with_caption(frames[0]).shape[:2]
        self._log.add_picture(env_steps, TAG, gif_of(frames), height, width)
        self._last = iteration


def gif_of(frames: Sequence[Frame]) -> bytes:
    """Encodes frames of one episode as a GIF with at most `MAX_PICTURES` pictures, always including the last
    frame.
    """
    every = math.ceil(len(frames) / MAX_PICTURES)
    shown = [*islice(frames, 0, len(frames) - 1, every), frames[-1]] if every > 1 else frames
    fps = min(FASTEST_GIF, max(1.0, frames[0].fps / every))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.gif"
        write_frames(path, map(with_caption, shown), fps=fps)
        return path.read_bytes()
