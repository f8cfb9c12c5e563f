"""Frames as GIF, MP4 and PNG files."""

import numpy as np
import pytest

from rollmill.pictures import check_destination, collect_frames, files as written, write_frames
from wordings import raises


def frames(count=5, height=24, width=32):
    made = np.full((count, height, width, 3), 255, np.uint8)
    for index in range(count):
        made[index, :, 4 * index : 4 * index + 4] = (0, 114, 178)
    return made


def test_a_gif_has_all_frames_with_their_colours_and_their_time(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow writes GIFs")
    write_frames(tmp_path / "a.gif", frames(), fps=30.0)
    with image.open(tmp_path / "a.gif") as read:
        assert read.n_frames == 5
        durations, pixels = [], []
        for index in range(5):
            read.seek(index)
            durations.append(read.info["duration"])
            pixels.append(np.asarray(read.convert("RGB")))
    assert sum(durations) == 170  # 5 / 30 s in hundredths
    assert (np.stack(pixels) == frames()).all()


def test_the_paper_of_a_gif_keeps_its_colour_beside_many_others(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow writes GIFs")
    pictures = np.full((3, 64, 64, 3), 255, np.uint8)
    pictures[:, :20] = np.random.default_rng(0).integers(0, 256, (3, 20, 64, 3))
    write_frames(tmp_path / "a.gif", pictures, fps=10.0)
    with image.open(tmp_path / "a.gif") as read:
        assert (np.asarray(read.convert("RGB"))[20:] == 255).all()


def test_a_folder_has_a_png_for_each_frame_and_replaces_frames_alone(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow writes PNGs")
    folder = tmp_path / "frames"
    write_frames(folder, frames(), fps=30.0)
    assert sorted(file.name for file in folder.iterdir()) == [f"{index:05}.png" for index in range(5)]
    assert (np.asarray(image.open(folder / "00003.png")) == frames()[3]).all()
    with raises("exists-already-hint-force-force"):
        check_destination(folder, fps=None, force=False)
    check_destination(folder, fps=None, force=True)
    (folder / "notes.txt").touch()
    with raises("holds-other-things-than-frames"):
        check_destination(folder, fps=None, force=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the reader leaves pipes open
def test_an_mp4_has_even_sides_and_all_frames(tmp_path):
    reading = pytest.importorskip("imageio_ffmpeg", reason="imageio-ffmpeg writes MP4s")
    write_frames(tmp_path / "a.mp4", iter(frames(height=65, width=67)), fps=25.0)
    reader = reading.read_frames(str(tmp_path / "a.mp4"))
    assert next(reader)["size"] == (68, 66)
    assert len(list(reader)) == 5


@pytest.mark.parametrize(
    ("name", "fps", "message"),
    [
        ("a.png", None, ("is-no-picture-can-be",)),
        ("nowhere/a.gif", None, ("cannot-be-written-there-is",)),
        ("a.gif", 60.0, ("fps-is-more-than-above",)),
        ("there.gif", None, ("exists-already-hint-force-force",)),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path, name, fps, message):
    (tmp_path / "there.gif").touch()
    with raises(*message):
        check_destination(tmp_path / name, fps=fps, force=False)


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "imageio_ffmpeg", None)
    with raises("pictures-are-written-by-is", "imageio-ffmpeg", "[render]"):
        check_destination(tmp_path / "a.mp4", fps=None, force=False)


def test_more_frames_than_memory_should_hold_are_refused(monkeypatch):
    monkeypatch.setattr(written, "MAX_BYTES", 3 * frames()[0].nbytes)
    assert len(collect_frames(frames(3))) == 3
    with raises("first-frames-have-more-than", "4"):
        collect_frames(frames(5))
