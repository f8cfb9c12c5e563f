"""`--track video`: episodes of checkpoints as pictures that TensorBoard plays."""

import io
import struct

import numpy as np
import pytest

import rollmill
from rollmill.core.errors import CheckpointError
from rollmill.hooks import tracking
from rollmill.hooks.events import CheckpointSaved, TrainingStarted
from rollmill.policies.rendering import Frame
from rollmill.training import video_log
from rollmill.training.video_log import MAX_PICTURES, gif_of

Image = pytest.importorskip("PIL.Image", reason="Pillow writes videos")
pytest.importorskip("tensorboardX", reason="its messages read the events")
TINY = {"total_timesteps": 128, "num_envs": 4, "num_steps": 16, "num_minibatches": 2}


def pictures_in(folder):
    """The pictures of event files, by their step."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in sorted(folder.glob("events*")):
        data = path.read_bytes()
        while data:
            size = struct.unpack("<Q", data[:8])[0]
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            for value in event.summary.value:
                found[event.step] = value
    return found


@pytest.mark.slow
def test_the_last_checkpoint_has_a_video(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "MAX_SECONDS", 600.0)  # a busy machine may take more than 30 s to draw it
    algorithm = rollmill.ppo("CartPole-v1", **TINY)
    rollmill.train(algorithm, run_dir=tmp_path / "run", quiet=True, track=["video"])
    last = pictures_in(tmp_path / "run/tensorboard/video")[128]
    assert last.tag == "checkpoint/video" and last.image.width == 240
    with Image.open(io.BytesIO(last.image.encoded_image_string)) as film:
        assert film.format == "GIF" and film.size == (240, last.image.height) and film.n_frames > 5


def test_long_episodes_are_thinned_and_keep_their_last_state():
    pictures = [np.full((8, 8, 3), step, np.uint8) for step in range(251)]
    shades = [Frame(picture, 0, step, 0.0, 50.0, "", ()) for step, picture in enumerate(pictures)]
    with Image.open(io.BytesIO(gif_of(shades))) as film:
        assert film.n_frames <= MAX_PICTURES
        film.seek(film.n_frames - 1)
        assert film.convert("RGB").getpixel((0, 0)) == (250, 250, 250)


@pytest.mark.slow
def test_an_environment_that_cannot_be_drawn_is_named_once(tmp_path, capsys):
    algorithm = rollmill.ppo("Probe-ConstantReward-v0", **TINY)
    rollmill.train(algorithm, run_dir=tmp_path / "run", quiet=True, track=["video"])
    assert "the tracker video receives no more lines, because" in capsys.readouterr().err


def test_a_checkpoint_that_is_displaced_while_it_is_read_ends_no_tracker(tmp_path, monkeypatch):
    def load(directory, *, checkpoint, algorithm):
        (tmp_path / str(checkpoint)).rmdir()
        raise CheckpointError("gone")

    monkeypatch.setattr(video_log, "load_weights", load)
    hook = video_log.video_log()
    hook(TrainingStarted(iteration=0, env_steps=0, directory=tmp_path, config={}, total_env_steps=8, seeds=(0,)))
    for iteration in (1, 2):
        (tmp_path / str(iteration)).mkdir()
        hook(CheckpointSaved(iteration=iteration, env_steps=4, path=tmp_path / str(iteration), score=None))
        assert not (tmp_path / str(iteration)).exists()  # the next one is read again
    monkeypatch.setattr(video_log, "load_weights", lambda *_, **__: load(tmp_path, checkpoint=4, algorithm=None))
    (tmp_path / "3").mkdir()
    (tmp_path / "4").mkdir()
    with pytest.raises(CheckpointError):
        hook(CheckpointSaved(iteration=3, env_steps=4, path=tmp_path / "3", score=None))
