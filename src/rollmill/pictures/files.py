"""Writes frames as a GIF, an MP4 or a folder of PNGs, under a temporary name until they are complete."""

import importlib
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from rollmill.core.errors import StorageError, UsageError
from rollmill.core.installation import install_command
from rollmill.pictures.raster import Picture

MAX_BYTES = 2**31
"""Maximum size in bytes of the pictures held in memory at once."""

GIF_TICKS = 100
"""Time units per second of a GIF."""
FASTEST_GIF = 50
"""Maximum frames per second of a GIF. Viewers slow down faster ones."""
SLOWEST = 0.05
"""Minimum frames per second. A GIF can show a frame for up to 655 seconds."""
FASTEST = 240
COLOURS, EXACT_COLOURS = 256, 64
"""Colours of a GIF's palette, and of these the ones that are taken as they are."""
MIN_APART = 8
"""Minimum difference between two colours of a palette, in the channel in which they differ most."""
SUFFIXES = (".gif", ".mp4")


def check_destination(path: Path, *, fps: float | None, force: bool) -> None:
    """Checks the destination of frames before any episode is played.

    Raises a `UsageError` if the name is not a GIF, an MP4 or a folder, if the frame rate does not fit, or if
    something already exists there.
    """
    is_folder = not path.suffix
    if not is_folder and path.suffix not in SUFFIXES:
        raise UsageError(
            f"{path} is not a picture file. hint: use a name that ends in .gif or .mp4, or a name without an "
            "ending for a folder of PNG files."
        )
    if fps is not None and path.suffix == ".gif" and fps > FASTEST_GIF:
        raise UsageError(
            f"fps={fps} is more than the limit of {FASTEST_GIF} for GIF, beyond which viewers slow down. hint: "
            "write an .mp4 file."
        )
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written: the folder {path.parent} does not exist.")
    taken = (any(path.iterdir()) if path.is_dir() else path.exists()) if is_folder else path.exists()
    if path.is_dir() and not is_folder:
        raise UsageError(f"{path} is a folder. hint: give the name of a file in it.")
    if taken and not force:
        raise UsageError(
            f"{path} already exists. hint: --force (force=True) replaces it, --output (output=) names another."
        )
    if is_folder and taken and not (path.is_dir() and all(_is_frame(entry) for entry in path.iterdir())):
        raise UsageError(
            f"{path} contains other files than frames, which are not deleted. hint: name a new folder."
        )
    _WRITERS[path.suffix].check()


def check_fps(fps: float | None) -> None:
    """Raises a `UsageError` if a frame rate is out of range."""
    if fps is not None and not SLOWEST <= fps <= FASTEST:
        raise UsageError(f"fps={fps} must be between {SLOWEST} and {FASTEST}.")


def collect_frames(frames: Iterable[Picture]) -> list[Picture]:
    """Returns the frames as a list. Raises a `UsageError` if there are too many to hold in memory."""
    kept, size = [], 0
    for frame in frames:
        kept.append(frame)
        size += frame.nbytes
        if size > MAX_BYTES:
            raise UsageError(
                f"the first {len(kept):,} frames exceed the limit of {MAX_BYTES:,} bytes in memory. hint: use a "
                "smaller size, fewer steps or episodes, or an .mp4 file, which is written frame by frame."
            )
    return kept


def _is_frame(path: Path) -> bool:
    return path.suffix == ".png" and path.stem.isdecimal() and path.is_file()


def write_frames(path: Path, frames: Iterable[Picture], *, fps: float) -> None:
    """Writes frames as a GIF, an MP4, or PNG files `00000.png` ... in a folder, as the name's ending says.

    Existing files are replaced. There must be at least one frame, and all must have the same size. An MP4 and PNGs
    are written frame by frame. Raises a `UsageError` if the required library is not installed or a GIF has too
    many frames, and a `StorageError` if the files cannot be written.
    """
    beside: Path | None = None
    try:
        beside = Path(tempfile.mkdtemp(prefix=".", dir=path.parent))
        partial = beside / f"frames{path.suffix}"
        _WRITERS[path.suffix].write(partial, iter(frames), fps)
        if path.is_dir():
            shutil.rmtree(path)
        partial.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)


def _write_gif(path: Path, frames: Iterator[Picture], fps: float) -> None:
    image, pictures = pillow(), collect_frames(frames)
    palette = _palette(image, pictures)
    shown = (image.fromarray(one).quantize(palette=palette, dither=image.Dither.NONE) for one in pictures)
    next(shown).save(path, save_all=True, append_images=shown, duration=_durations(len(pictures), fps), loop=0)


def _palette(image: ModuleType, frames: list[Picture]) -> Any:
    """Returns one palette for all frames, so that colours do not flicker. The commonest colours are exact."""
    sample = [frames[index] for index in np.unique(np.linspace(0, len(frames) - 1, 16).round().astype(int))]
    whole = np.concatenate(sample)
    colours, counts = np.unique(whole.reshape(-1, 3), axis=0, return_counts=True)
    mixed = image.fromarray(whole).quantize(COLOURS, method=image.Quantize.MAXCOVERAGE).getpalette()
    common = colours[np.argsort(-counts)[:EXACT_COLOURS]]
    chosen = _apart(np.concatenate([common, np.reshape(mixed, (-1, 3))]).astype(int))
    palette = image.new("P", (1, 1))
    palette.putpalette(chosen[:COLOURS].flatten().tolist())
    return palette


def _apart(colours: Int[np.ndarray, "n 3"]) -> Int[np.ndarray, "m 3"]:
    """Drops colours close to a previous colour, since Pillow may confuse them."""
    kept = [colours[0]]
    for colour in colours[1:]:
        if np.abs(np.stack(kept) - colour).max(axis=1).min() >= MIN_APART:
            kept.append(colour)
    return np.stack(kept)


def _durations(count: int, fps: float) -> list[int]:
    """Returns the milliseconds of each frame in whole ticks. Their sum is exact up to a tick."""
    ends = np.round(np.arange(count + 1) * GIF_TICKS / fps).astype(int)
    return [int(ticks) * 1000 // GIF_TICKS for ticks in np.diff(ends)]


def _write_mp4(path: Path, frames: Iterator[Picture], fps: float) -> None:
    writing = _imageio_ffmpeg()
    first = next(frames)
    height, width = first.shape[:2]
    even = (height + height % 2, width + width % 2)
    writer = writing.write_frames(
        str(path), (even[1], even[0]), fps=fps, codec="libx264", macro_block_size=2, ffmpeg_log_level="error"
    )
    margins = ((0, even[0] - height), (0, even[1] - width), (0, 0))
    try:
        # the forked process only executes ffmpeg
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            writer.send(None)
            writer.send(np.pad(first, margins, mode="edge"))
        for frame in frames:
            writer.send(np.pad(frame, margins, mode="edge"))
    finally:
        writer.close()


def _write_pngs(path: Path, frames: Iterator[Picture], fps: float) -> None:
    image = pillow()
    path.mkdir()
    for index, frame in enumerate(frames):
        image.fromarray(frame).save(path / f"{index:05}.png")


def pillow() -> ModuleType:
    """Returns Pillow's module `Image`. Raises a `UsageError` if Pillow is not installed."""
    return _library("PIL.Image", "Pillow")


def _imageio_ffmpeg() -> ModuleType:
    return _library("imageio_ffmpeg", "imageio-ffmpeg")


def _library(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(
            f"writing pictures needs {name}, which is not installed. hint: {install_command('render')}. A "
            "terminal needs no package: --output terminal."
        ) from None


class _Writer(NamedTuple):
    """A kind of file: the check that its library is there, and the function that writes it."""

    check: Callable[[], object]
    write: Callable[[Path, Iterator[Picture], float], None]


_WRITERS = {
    ".gif": _Writer(pillow, _write_gif),
    ".mp4": _Writer(_imageio_ffmpeg, _write_mp4),
    "": _Writer(pillow, _write_pngs),
}
