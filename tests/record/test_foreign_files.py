"""A run directory from a stranger: links lead nowhere, announced sizes take no memory, odd names harm nothing."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.core.errors import CheckpointError
from rollmill.core.folder import Folder
from rollmill.record import checkpoint_files
from rollmill.record.checkpoints import Checkpoints, CheckpointWarning
from rollmill.record.metrics import MetricsLog, MetricsWarning, read_metrics
from rollmill.record.run_directory import RunDirectory
from wordings import raises

PRECIOUS = b"the only copy\n" * 100


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", config={"a": 1}, versions={})


@pytest.fixture
def precious(tmp_path) -> Path:
    """A file of the user's, outside of the run."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "thesis.tex").write_bytes(PRECIOUS)
    (folder / "30").write_bytes(PRECIOUS)
    (folder / ".deleted-1").write_bytes(PRECIOUS)
    return folder


def state(value: float = 1) -> dict:
    return {"w": jnp.full((8, 8), float(value)), "step": jnp.int32(value)}


def untouched(folder: Path) -> bool:
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()} == dict.fromkeys(
        ("thesis.tex", "30", ".deleted-1"), PRECIOUS
    )


def write_everything(run: RunDirectory) -> None:
    with run.lock(), Checkpoints(run.checkpoints) as checkpoints:
        with MetricsLog(run, resume_from=1) as log:
            log.write(2, 2, {"loss": 1.0})
        checkpoints.save(2, state(2), metadata={})
        run.write_summary({"status": "finished"})
        run.write_config({"a": 2})


REPLACED_LINKS = [".metrics.jsonl.tmp", ".summary.json.tmp", ".config.json.tmp", "summary.json"]
REFUSED_LINKS = [".lock", "metrics.jsonl", "checkpoints", "tensorboard", "checkpoints/2"]


@pytest.mark.parametrize("name", REPLACED_LINKS)
def test_a_link_where_a_new_file_goes_is_replaced(run, precious, name):
    (run.root / "metrics.jsonl").write_text('{"iteration": 1, "env_steps": 1}\n')
    (run.root / name).symlink_to(precious / "thesis.tex")
    write_everything(run)
    assert untouched(precious)
    assert not any(entry.is_symlink() for entry in run.root.iterdir())
    assert [line["iteration"] for line in read_metrics(run.metrics_file)] == [1, 2]


@pytest.mark.parametrize("name", REFUSED_LINKS)
def test_a_link_where_something_is_read_or_written_is_refused(run, precious, name):
    is_folder = name not in (".lock", "metrics.jsonl")
    (run.root / name).parent.mkdir(exist_ok=True)
    (run.root / name).symlink_to(precious if is_folder else precious / "thesis.tex")
    with pytest.raises(CheckpointError, match=f"{name} is (a link, and links|not a folder, but checkpoint)"):
        write_everything(run)
    assert untouched(precious)


def test_a_lock_file_that_is_a_hard_link_is_refused(run, precious):
    os.link(precious / "thesis.tex", run.root / ".lock")
    with raises("has-another-hard-link-whose", ".lock"), run.lock():
        pass
    assert untouched(precious)


def test_links_in_a_folder_that_is_deleted_are_not_followed(run, precious):
    with Checkpoints(run.checkpoints, keep_last=1, keep_best=0) as checkpoints:
        checkpoints.save(1, state(), metadata={})
        checkpoints.wait()
        (run.checkpoints.path / "1" / "more").symlink_to(precious)
        (run.checkpoints.path / ".deleted-7").symlink_to(precious)
        checkpoints.save(2, state(), metadata={})
        checkpoints.wait()
        assert sorted(entry.name for entry in run.checkpoints.path.iterdir()) == ["2"]
    assert untouched(precious)


@pytest.mark.parametrize("name", ["config.json", "summary.json", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_read_is_a_plain_file(run, precious, name, kind):
    path = run.root / name
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(precious / "thesis.tex")
    elif kind == "pipe":
        os.mkfifo(path)  # opening it would wait for ever
    else:
        path.mkdir()
    read = {
        "config.json": run.read_config,
        "summary.json": run.read_summary,
        "metrics.jsonl": lambda: read_metrics(path),
    }
    named = {"link": "a link", "pipe": "a pipe, a socket or a device", "folder": "a folder"}[kind]
    with pytest.raises(CheckpointError, match=f"{name} is {named}"):
        read[name]()


@pytest.mark.parametrize("name", ["record.json", "state.safetensors"])
def test_a_checkpoint_of_links_is_passed_over(run, precious, name):
    with Checkpoints(run.checkpoints) as checkpoints:
        for iteration in (1, 2):
            checkpoints.save(iteration, state(iteration), metadata={})
    file = run.checkpoints.path / "2" / name
    moved = precious.parent / name
    file.rename(moved)
    file.symlink_to(moved)
    warned = pytest.warns(CheckpointWarning, match=f"checkpoint 2 .*{name} is a link")
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints, warned:
        assert checkpoints.restore(state()).iteration == 1


ODD_NAMES = ["007", "٣", "²", "1e3", "-4", "30.bak", "99999999999999999999999", " 5", "+5", "5_0"]


def test_odd_names_among_the_checkpoints_are_left_alone(run):
    with Checkpoints(run.checkpoints, keep_last=1, keep_best=0) as checkpoints:
        for name in ODD_NAMES:
            (run.checkpoints.path / name).mkdir()
        for iteration in (1, 2):
            checkpoints.save(iteration, state(iteration), metadata={}, score=1.0)
        checkpoints.wait()
        assert checkpoints.iterations() == (2,)
        assert checkpoints.restore(state()).iteration == 2 and checkpoints.best() == 2
    assert {entry.name for entry in run.checkpoints.path.iterdir()} == {*ODD_NAMES, "2"}


def test_a_file_where_a_checkpoint_will_be_is_named_before_anything_is_done(run):
    run.checkpoints.make()
    (run.checkpoints.path / "30").write_bytes(PRECIOUS)
    with raises("is-not-folder-and-is", "checkpoints/30"):
        Checkpoints(run.checkpoints)
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        assert checkpoints.restore(state()) is None
    assert (run.checkpoints.path / "30").read_bytes() == PRECIOUS


@pytest.mark.parametrize(("renamed", "named"), [("25", 25), ("999", 999), ("0", 0)])
def test_a_renamed_checkpoint_is_an_error(run, renamed, named):
    with Checkpoints(run.checkpoints) as checkpoints:
        for iteration in (15, 20):
            checkpoints.save(iteration, state(iteration), metadata={}, score=float(iteration))
    (run.checkpoints.path / "20").rename(run.checkpoints.path / renamed)
    (run.checkpoints.path / "15").rename(run.checkpoints.path / "15x")
    with (
        Checkpoints(run.checkpoints) as checkpoints,
        raises("checkpoint-in-holds-iteration-folder", f"checkpoint {named}", 20),
    ):
        checkpoints.restore(state())
    assert (run.checkpoints.path / renamed).is_dir()


def test_a_checkpoint_copied_over_another_is_an_error(run):
    with Checkpoints(run.checkpoints) as checkpoints:
        for iteration in (15, 20):
            checkpoints.save(iteration, state(iteration), metadata={})
    for file in ("record.json", "state.safetensors"):
        (run.checkpoints.path / "20" / file).write_bytes((run.checkpoints.path / "15" / file).read_bytes())
    with Checkpoints(run.checkpoints) as checkpoints, raises("checkpoint-in-holds-iteration-folder", "15"):
        checkpoints.restore(state())


READ_WITH_LITTLE_MEMORY = """
import resource, sys, warnings
import jax.numpy as jnp
from rollmill.record.checkpoints import Checkpoints
from rollmill.record.metrics import read_metrics
from pathlib import Path
Checkpoints(Path(sys.argv[1])/"warm").restore({"w": jnp.zeros((8, 8)), "step": jnp.int32(0)})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    Checkpoints(Path(sys.argv[1])/"checkpoints").restore({"w": jnp.zeros((8, 8)), "step": jnp.int32(0)})
except Exception as error:
    print(type(error).__name__, error)
try:
    read_metrics(Path(sys.argv[1])/"metrics.jsonl")
except Exception as error:
    print(type(error).__name__, error)
print("grew", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def announce(folder: Path, header: dict, *, size: int, length: int | None = None) -> None:
    text = json.dumps(header).encode()
    with (folder / checkpoint_files.ARRAYS).open("wb") as file:
        file.write(struct.pack("<Q", len(text) if length is None else length) + text)
        file.truncate(size)


def test_announced_sizes_take_no_memory(run, tmp_path):
    """A file of a few bytes announces 8 GiB; one of 8 GiB, most of it a hole, holds another array; so a line."""
    with Checkpoints(run.checkpoints) as checkpoints:
        for iteration in (1, 2, 3):
            checkpoints.save(iteration, state(iteration), metadata={})
    with Checkpoints(tmp_path / "run/warm") as checkpoints:
        checkpoints.save(1, state(), metadata={})
    huge = {"['w']": {"dtype": "F32", "shape": [2**31], "data_offsets": [0, 2**33]}}
    announce(run.checkpoints.path / "3", huge, size=1000)
    announce(run.checkpoints.path / "2", huge, size=2**33 + 1000)
    announce(run.checkpoints.path / "1", {}, size=2**33, length=2**32)
    with run.metrics_file.open("wb") as file:
        file.truncate(2**30)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ_WITH_LITTLE_MEMORY, str(run.root)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("some arrays of the checkpoint are missing") == 2
    assert "announces a header of 4,294,967,296 bytes" in done.stdout
    assert "metrics.jsonl: line 1 exceeds the limit of 1,048,576 bytes" in done.stdout
    grown = int(done.stdout.rpartition("grew")[2])
    assert grown < 100, done.stdout


def test_a_damaged_line_in_the_middle_is_named_and_left_out(run):
    lines = ['{"iteration": 1, "env_steps": 1}', '{"iteration": "2", "env_steps": 2}', "[" * 10**5]
    lines += ['{"iteration": 99999999999999999999, "env_steps": 3}', '{"iteration": 3, "env_steps": 3}']
    run.metrics_file.write_text("\n".join(lines) + "\n")
    with pytest.raises(CheckpointError, match='metrics.jsonl: line 2: iteration="2" must be an integer'):
        read_metrics(run.metrics_file)
    with pytest.warns(MetricsWarning, match='line 2: iteration="2" must.* skipped. 2 more lines'):
        MetricsLog(run, resume_from=3, tensorboard=False).close()
    assert [line["iteration"] for line in read_metrics(run.metrics_file)] == [1, 3]


def test_the_format_is_that_of_other_readers(tmp_path):
    """Offsets, names and order as the format's own description has them."""
    folder = Folder(tmp_path)
    arrays = {"b": np.arange(3, dtype=np.int32), "a": np.ones((2, 2), np.float32), "e": np.zeros((0, 3), bool)}
    checkpoint_files.write(folder, arrays, {})
    content = (tmp_path / checkpoint_files.ARRAYS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert json.loads(content[8 : 8 + length]) == {
        "b": {"dtype": "I32", "shape": [3], "data_offsets": [0, 12]},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [12, 28]},
        "e": {"dtype": "BOOL", "shape": [0, 3], "data_offsets": [28, 28]},
    }
    assert content[8 + length :] == arrays["b"].tobytes() + arrays["a"].tobytes() and length % 8 == 0
