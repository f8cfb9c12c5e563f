# ruff: noqa: TID251 - placement and donation are what some of these tests are about
import contextlib
import errno
import json
import logging
import math
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.core.errors import CheckpointError
from rollmill.core.folder import Folder
from rollmill.record import checkpoint_files, checkpoints as checkpoints_module
from rollmill.record.checkpoints import Checkpoints, CheckpointWarning
from rollmill.record.leaves import tree_digest
from wordings import raises


class Carry(NamedTuple):
    count: jax.Array
    done: jax.Array


class Nested(eqx.Module):
    weights: dict[str, jax.Array]
    carry: Carry
    key: jax.Array
    keys: tuple[jax.Array, ...]
    host: np.ndarray
    name: str = eqx.field(static=True, default="net")


def nested() -> Nested:
    return Nested(
        weights={
            "w": jnp.arange(6.0).reshape(2, 3),
            "half": jnp.asarray([1.5, math.nan], jnp.bfloat16),
            "a/b['x'] y": jnp.asarray(-0.0),
            "empty": jnp.zeros((0, 3)),
        },
        carry=Carry(jnp.asarray(7, jnp.int32), jnp.asarray([True, False])),
        key=jax.random.key(5),
        keys=(jax.random.split(jax.random.key(1, impl="rbg"), 3), jax.random.split(jax.random.key(2), 2)[:0]),
        host=np.arange(4, dtype=np.int32),
    )


def simple(value: float) -> dict[str, jax.Array]:
    return {"w": jnp.full((64, 64), float(value)), "step": jnp.asarray(int(value), jnp.int32)}


def save_all(directory: Path, iterations: range | list[int], **options) -> None:
    with Checkpoints(directory, **options) as checkpoints:
        for iteration in iterations:
            checkpoints.save(iteration, simple(iteration), metadata={"algorithm": "ppo"})


@pytest.mark.parametrize("abstract", [lambda tree: tree, lambda tree: eqx.filter_eval_shape(lambda: tree)])
def test_round_trip(tmp_path, abstract):
    state = nested()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, metadata={"env_steps": 30, "loss": math.nan}, score=1.5)
        iteration, restored, metadata = checkpoints.restore(abstract(state))
    assert iteration == 3
    assert tree_digest(restored) == tree_digest(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert restored.weights["half"].dtype == jnp.bfloat16
    assert jax.random.key_impl(restored.keys[0]) == "rbg" and restored.keys[1].shape == (0,)
    assert isinstance(restored.weights["w"], jax.Array)
    jax.random.uniform(restored.key)
    expected = {"env_steps": 30, "loss": None, "iteration": 3, "score": 1.5, "sha256": tree_digest(state)}
    assert metadata == expected


@pytest.mark.parametrize("state", [{}, {"empty": jnp.zeros((0, 3))}])
def test_a_state_without_elements(tmp_path, state):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, metadata={})
        assert tree_digest(checkpoints.restore(state).state) == tree_digest(state)


def test_restored_arrays_go_where_the_abstract_ones_say(tmp_path):
    devices = jax.devices()
    sharding = jax.sharding.SingleDeviceSharding(devices[-1])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(4), "k": jax.random.key(0)}, metadata={})
        abstract = {
            "w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding),
            "k": jax.device_put(jax.random.key(1), sharding),
        }
        state = checkpoints.restore(abstract).state
    assert state["w"].devices() == state["k"].devices() == {devices[-1]}


def test_the_state_may_be_donated_while_it_is_written(tmp_path):
    state = simple(1)
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        for iteration in (1, 2, 3):
            checkpoints.save(iteration, state, metadata={})
            state = advance(state)
        for iteration in (1, 2, 3):
            restored = checkpoints.restore(state, iteration=iteration).state
            assert tree_digest(restored) == tree_digest(simple(iteration))


def test_without_checkpoints_the_run_starts_over(tmp_path):
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.restore(simple(0)) is None
        assert checkpoints.best() is None and checkpoints.iterations() == ()


def test_the_last_and_the_best_are_kept(tmp_path):
    scores = {1: 0.5, 2: 9.0, 3: None, 4: math.nan, 5: 8.0, 6: 1.0, 7: 1.0, 8: -1.0}
    with Checkpoints(tmp_path, keep_last=2, keep_best=2) as checkpoints:
        for iteration, score in scores.items():
            checkpoints.save(iteration, simple(iteration), metadata={}, score=score)
        checkpoints.wait()
        assert checkpoints.iterations() == (2, 5, 7, 8)
        assert checkpoints.best() == 2
    with Checkpoints(tmp_path, keep_last=2, keep_best=1) as reopened:  # the scores come from the files
        reopened.save(9, simple(9), metadata={}, score=0.0)
        reopened.wait()
        assert reopened.iterations() == (2, 8, 9)
        assert reopened.restore(simple(0), iteration=reopened.best()).iteration == 2


def test_going_back_gives_up_the_later_ones(tmp_path):
    save_all(tmp_path, range(1, 6), keep_last=5)
    with Checkpoints(tmp_path, keep_last=5) as checkpoints:
        assert checkpoints.restore(simple(0), iteration=3).iteration == 3
        checkpoints.save(4, simple(40), metadata={})
        iteration, state, _ = checkpoints.restore(simple(0))
        assert iteration == 4 and int(state["step"]) == 40
        assert checkpoints.iterations() == (1, 2, 3, 4)


def test_saving_the_same_again_changes_nothing(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, simple(1), metadata={"a": 1})
        checkpoints.wait()
        inode = (tmp_path / "1").stat().st_ino
        checkpoints.save(1, simple(1), metadata={"a": 1})
        checkpoints.wait()
        assert (tmp_path / "1").stat().st_ino == inode
        checkpoints.save(1, simple(1), metadata={"a": 2})
        assert checkpoints.restore(simple(0)).metadata["a"] == 2


def largest_file(checkpoint: Path) -> Path:
    return max((f for f in checkpoint.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def truncate(checkpoint: Path) -> None:
    file = largest_file(checkpoint)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_bytes(checkpoint: Path) -> None:
    file = largest_file(checkpoint)
    content = bytearray(file.read_bytes())
    for place in range(0, len(content), max(1, len(content) // 16)):
        content[place] ^= 0xFF
    file.write_bytes(content)


def delete_data(checkpoint: Path) -> None:
    largest_file(checkpoint).unlink()


def delete_state(checkpoint: Path) -> None:
    (checkpoint / checkpoint_files.ARRAYS).unlink()


def empty_record(checkpoint: Path) -> None:
    (checkpoint / checkpoint_files.RECORD).write_bytes(b"")


def edit_record(checkpoint: Path) -> None:
    file = checkpoint / checkpoint_files.RECORD
    file.write_text(file.read_text().replace("64", "65"))


def delete_everything(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


DAMAGES = [truncate, flip_bytes, delete_data, delete_state, empty_record, edit_record, delete_everything]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path, damage):
    save_all(tmp_path, [1, 2])
    damage(tmp_path / "2")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(CheckpointWarning, match="checkpoint 2 in .* is damaged"):
            iteration, state, _ = checkpoints.restore(simple(0))
        assert iteration == 1 and tree_digest(state) == tree_digest(simple(1))
        with raises("no-checkpoint-to-resume-from", "checkpoint 2 in", "is damaged"):
            checkpoints.restore(simple(0), iteration=2)
        checkpoints.save(2, simple(2), metadata={})
        assert checkpoints.restore(simple(0)).iteration == 2


def test_content_of_the_right_shape_is_still_verified(tmp_path):
    save_all(tmp_path, [1, 2])
    folder = Folder(tmp_path).inner("2")
    record = checkpoint_files.read_record(folder)
    arrays = checkpoint_files.read_arrays(folder, record.types)
    arrays["w"][3, 3] += np.float32(1)
    checkpoint_files.write(folder, arrays, json.loads((tmp_path / "2" / checkpoint_files.RECORD).read_text()))
    with Checkpoints(tmp_path) as checkpoints, pytest.warns(CheckpointWarning, match="match their digest"):
        assert checkpoints.restore(simple(0)).iteration == 1


def test_when_none_is_whole_the_way_out_is_named(tmp_path):
    save_all(tmp_path, [1, 2])
    truncate(tmp_path / "1")
    delete_data(tmp_path / "2")
    message = "there is no intact checkpoint to resume from(.|\n)*--run-dir"
    with Checkpoints(tmp_path, read_only=True) as checkpoints, pytest.warns(CheckpointWarning):
        pytest.raises(CheckpointError, checkpoints.restore, simple(0)).match(message)


def test_the_state_of_another_network_is_no_damage(tmp_path):
    save_all(tmp_path, [1])
    other = {"w": jnp.zeros((8, 64)), "step": jnp.asarray(0, jnp.int32), "extra": jnp.zeros(2)}
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore(other)
    message = str(caught.value)
    assert "another algorithm or network (algorithm=ppo)" in message
    assert "w: stored float32[64,64], expected float32[8,64]" in message
    assert "extra: stored nothing, expected float32[2]" in message


def test_an_iteration_that_is_not_there(tmp_path):
    save_all(tmp_path, [1, 2])
    with (
        Checkpoints(tmp_path) as checkpoints,
        raises("has-no-checkpoint-there", "7", "1, 2"),
    ):
        checkpoints.restore(simple(0), iteration=7)


def test_leftovers_are_tidied_when_opened_for_writing_only(tmp_path):
    save_all(tmp_path, [1, 2])
    for name in (".writing-3", ".deleted-0", ".replaced-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "2").rename(tmp_path / ".replaced-2")
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.restore(simple(0)).iteration == 1
        with raises("checkpoints-in-were-opened-read"):
            checkpoints.save(3, simple(3), metadata={})
    assert len(list(tmp_path.iterdir())) == 5
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(simple(0)).iteration == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2"]


def test_a_full_disk_is_told_before_writing(tmp_path, monkeypatch):
    save_all(tmp_path, [1])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1024))
    with Checkpoints(tmp_path) as checkpoints:
        with raises("disk-is-full-checkpoint-needs", "272.0 KiB", "1.0 KiB", "resume from iteration 1"):
            checkpoints.save(2, simple(2), metadata={})
        assert checkpoints.iterations() == (1,)


FAILURES = [
    (
        OSError(errno.ENOSPC, "No space left on device"),
        ("disk-is-full-checkpoint-needs", "2", "resume from iteration 1"),
    ),
    (
        ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device"),
        ("disk-is-full-checkpoint-needs", "2"),
    ),
    (
        PermissionError(errno.EACCES, "Permission denied"),
        ("checkpoint-cannot-be-written-to", "Permission denied", "iteration 1"),
    ),
]


@pytest.mark.parametrize("error, message", FAILURES)
def test_a_failed_save_surfaces_at_the_next_call(tmp_path, monkeypatch, error, message):
    save_all(tmp_path, [1])

    def fail(folder, arrays, record):
        assert folder.path.name == ".writing-2" and folder.is_folder()
        raise error

    with Checkpoints(tmp_path) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints_module, "write", fail)
            checkpoints.save(2, simple(2), metadata={})
            with raises(*message):
                checkpoints.save(3, simple(3), metadata={})
        assert [entry.name for entry in tmp_path.iterdir()] == ["1"]
        checkpoints.save(3, simple(3), metadata={})
        assert checkpoints.restore(simple(0)).iteration == 3


def test_a_failed_save_does_not_hide_the_error_that_ends_the_run(tmp_path, monkeypatch):
    def fail(path, arrays, record):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints_module, "write", fail)
    with (
        pytest.warns(CheckpointWarning, match="there is no earlier checkpoint"),
        pytest.raises(ZeroDivisionError),
        Checkpoints(tmp_path) as checkpoints,
    ):
        checkpoints.save(1, simple(1), metadata={})
        _ = 1 // 0


@contextlib.contextmanager
def small_disk(directory: Path, size: str):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted")
    try:
        yield
    finally:
        subprocess.run(["umount", directory], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount command")
@pytest.mark.parametrize("checked_before", [True, False])
def test_a_disk_that_is_really_full(tmp_path, monkeypatch, checked_before):
    noise = {"w": np.random.default_rng(0).normal(size=150_000).astype(np.float32)}
    usage = shutil.disk_usage(tmp_path)
    with small_disk(tmp_path, "1m"):
        if not checked_before:
            monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(1, noise, metadata={})
        checkpoints.wait()
        with raises("disk-is-full-checkpoint-needs", "2", "resume from iteration 1"):
            checkpoints.save(2, noise, metadata={})
            checkpoints.wait()
        assert [entry.name for entry in tmp_path.iterdir()] == ["1"]
        assert checkpoints.restore(noise).iteration == 1
        checkpoints.close()


def test_nothing_is_printed(tmp_path, capfd, caplog):
    with caplog.at_level(logging.INFO):
        save_all(tmp_path, [1, 2])
    captured = capfd.readouterr()
    assert captured.out == captured.err == "" and caplog.text == ""


SAVE_IN_A_LOOP = """
import sys, jax.numpy as jnp
from rollmill.record.checkpoints import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep_last=2)
state = {"w": jnp.zeros((64, 64)), "step": jnp.asarray(0, jnp.int32)}
found = checkpoints.restore(state)
iteration = found.iteration if found else 0
while True:
    iteration += 1
    state = {"w": jnp.full((64, 64), float(iteration)), "step": jnp.asarray(iteration, jnp.int32)}
    checkpoints.save(iteration, state, metadata={}, score=-abs(iteration - 3.0))
    checkpoints.wait()
    print(iteration, flush=True)
"""


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_9_leaves_a_whole_checkpoint(tmp_path, kills):
    delays = random.Random(0)
    for _ in range(kills):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVE_IN_A_LOOP, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline(), "the child saved nothing"
        time.sleep(delays.uniform(0, 0.15))
        child.send_signal(signal.SIGKILL)
        reported, _ = child.communicate()
        with Checkpoints(tmp_path) as checkpoints:
            iteration, state, _ = checkpoints.restore(simple(0))
        assert tree_digest(state) == tree_digest(simple(iteration))
        assert iteration >= max([int(line) for line in reported.split()], default=1)
        assert all(entry.name.isdecimal() for entry in tmp_path.iterdir())
