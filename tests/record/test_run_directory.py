import errno
import json
import math
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from rollmill.core import machine
from rollmill.core.errors import CheckpointError
from rollmill.core.folder import Folder
from rollmill.core.git import commit_of
from rollmill.record.json_files import read_json, write_failure, write_json
from rollmill.record.run_directory import RunDirectory, name_run
from wordings import raises


def create(root: Path, **config) -> RunDirectory:
    return RunDirectory.create(root, config=config, versions={"jax": "1"})


def test_a_new_run_is_whole_and_opens_again(tmp_path):
    root = tmp_path / "runs" / "first"
    config = {"lr": 3e-4, "sizes": (64, 64), "limit": math.inf, "where": Path("x"), "seed": np.int64(3)}
    run = create(root, **config)
    assert sorted(entry.name for entry in root.iterdir()) == ["config.json", "versions.json"]
    assert [entry.name for entry in root.parent.iterdir()] == ["first"]
    assert RunDirectory.open(root) == run
    assert run.read_config() == {"lr": 3e-4, "sizes": [64, 64], "limit": None, "where": "x", "seed": 3}
    assert read_json(run.folder, "versions.json") == {"jax": "1"}


def test_an_empty_directory_becomes_a_run(tmp_path):
    create(tmp_path)
    assert RunDirectory.open(tmp_path).root == tmp_path


@pytest.mark.parametrize("relative", [True, False])
def test_a_link_to_an_empty_directory_becomes_a_run_there(tmp_path, relative):
    (tmp_path / "disk" / "big").mkdir(parents=True)
    link = tmp_path / "run"
    link.symlink_to("disk/big" if relative else tmp_path / "disk/big")
    RunDirectory.check_parent(link)
    run = RunDirectory.create(link, config={"a": 1}, versions={})
    assert run.root == link and link.is_symlink()
    assert RunDirectory.open(link).read_config() == {"a": 1}
    assert (tmp_path / "disk/big/config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "run"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["big"]
    with raises("already-holds-run-or-choose"):
        RunDirectory.create(link, config={}, versions={})


def test_links_that_lead_nowhere_or_to_a_file_are_refused(tmp_path):
    link = tmp_path / "run"
    link.symlink_to("missing")
    with raises("is-link-to-where-nothing", "run", "missing"):
        RunDirectory.create(link, config={}, versions={})
    assert not (tmp_path / "missing").exists()
    (tmp_path / "missing").write_text("a file")
    with raises("is-file-choose-another-run", "run"):
        RunDirectory.create(link, config={}, versions={})


def test_a_second_run_in_the_same_place_is_refused(tmp_path):
    create(tmp_path / "run", a=1)
    with raises("already-holds-run-or-choose", "rollmill resume"):
        create(tmp_path / "run", a=2)
    assert RunDirectory.open(tmp_path / "run").read_config() == {"a": 1}


def test_a_directory_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with raises("is-not-empty-and-holds"):
        create(tmp_path)


def test_places_where_nothing_can_be_made_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with raises("is-file-choose-another-run"):
        create(tmp_path / "file")
    with raises("cannot-be-created-choose-another"):
        create(tmp_path / "file" / "run")
    with raises("cannot-be-created-choose-another"):
        create(Path("/proc/rollmill/run"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_parent_that_is_not_writable_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with raises("cannot-be-created-hint-choose"):
        create(tmp_path / "run")


def test_a_run_that_cannot_be_completed_leaves_nothing(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with raises("cannot-be-written-disk-is"):
        create(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_that_json_cannot_hold_leaves_nothing(tmp_path):
    with pytest.raises(TypeError, match="cannot be represented in JSON"):
        create(tmp_path / "run", function=print)
    assert list(tmp_path.iterdir()) == []


def test_opening_offers_the_runs_beside(tmp_path):
    for name in ("ppo-CartPole-v1-seed0", "ppo-CartPole-v1-seed1", "dqn-Acrobot-v1-seed0"):
        create(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"does not exist\. Did you mean .*ppo-CartPole-v1-seed0.*\?"):
        RunDirectory.open(tmp_path / "ppo-CartPole-v1-seed")
    with pytest.raises(CheckpointError, match=r"The newest runs in .*: .*seed"):
        RunDirectory.open(tmp_path / "zzz")
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match="is not the directory of a run") as caught:
        RunDirectory.open(tmp_path / "other")
    assert caught.value.exit_code == 2


def test_the_directory_of_a_sweep_is_no_run(tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/sweep.json").write_text("{}")
    with raises("is-directory-sweep-not-run", f"{tmp_path}/sweep/trials", "rollmill sweep --resume"):
        RunDirectory.open(tmp_path / "sweep")


@pytest.mark.parametrize("content", [b"", b'{"a": ', b"[1]", b"\xff\xfe"])
def test_a_damaged_configuration_is_named(tmp_path, content):
    run = create(tmp_path / "run")
    run.config_file.write_bytes(content)
    with raises("cannot-be-read", "config.json"):
        RunDirectory.open(run.root)


def test_json_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path, folder = tmp_path / "summary.json", Folder(tmp_path)
    write_json(folder, path.name, {"return": np.float32(1.5), "nan": math.nan, "list": [np.inf, np.arange(2)]})
    assert json.loads(path.read_text()) == {"return": 1.5, "nan": None, "list": [None, [0, 1]]}

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with raises("cannot-be-written-disk-is", "summary.json"):
        write_json(folder, path.name, {"return": 2.0})
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
    assert read_json(folder, path.name)["return"] == 1.5


HOLD = """
import sys
from pathlib import Path
from rollmill.record.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


LOOK = """
import sys
from pathlib import Path
from rollmill.record.run_directory import RunDirectory
print(RunDirectory(Path(sys.argv[1])).is_locked())
"""


def test_two_processes_cannot_write_one_run(tmp_path):
    run = create(tmp_path / "run")
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "held\n"
    with raises("hint-wait-for-process-or", f"process {child.pid} is writing to"), run.lock():
        pass
    child.kill()
    child.communicate()
    with run.lock():  # freed with the process that held it
        assert (run.root / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_process_that_writes_a_run_keeps_its_lock_when_it_is_asked_for_another_in_its_place(tmp_path):
    run = create(tmp_path / "run")
    is_locked = lambda: (
        subprocess.run(
            [sys.executable, "-c", LOOK, str(run.root)], capture_output=True, text=True, check=True
        ).stdout
    )
    with run.lock():
        with raises("already-holds-run-or-choose"):
            RunDirectory.refuse_occupied(run.root)
        assert not run.is_locked() and is_locked() == "True\n"
    assert is_locked() == "False\n"


def test_a_run_that_is_being_written_is_not_offered_to_be_resumed(tmp_path):
    run = create(tmp_path / "run")
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "held\n"
    with raises("choose-another-run-dir", f"process {child.pid} is writing to"):
        RunDirectory.refuse_occupied(run.root)
    child.kill()
    child.communicate()


def test_names_are_fit_for_files():
    now = datetime(2026, 11, 21, 10, 15)
    assert name_run("ppo", "CartPole-v1", seed=0, now=now) == Path("runs/ppo-CartPole-v1-seed0-20261121-101500")
    assert name_run("ppo", "gymnax:a/b c", seed=1, now=now).name == "ppo-gymnax-a-b-c-seed1-20261121-101500"


def test_machine_facts_are_json(tmp_path, monkeypatch):
    versions, hardware = machine.versions(), machine.hardware()
    assert {"rollmill", "python", "jax", "jaxlib", "numpy"} <= versions.keys() and versions["jax"]
    assert hardware["cores"] >= 1 and hardware["memory_bytes"] > 2**20
    assert hardware["devices"][0]["platform"] in ("cpu", "gpu", "tpu")
    write_json(Folder(tmp_path), "machine.json", {**versions, **hardware})


def test_commit_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of() is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    commands = [["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "one"], ["tag", "v1"]]
    (tmp_path / "file").write_text("1")
    for command in commands:
        subprocess.run(["git", *command], check=True)
    commit = commit_of()
    assert commit is not None and len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert commit_of() == f"{commit}-dirty"


def test_a_failed_write_is_told_in_the_words_of_the_system():
    error = write_failure(Path("run/.lock"), OSError(errno.EROFS, "Read-only file system", ".lock"))
    assert str(error) == "run/.lock cannot be written: Read-only file system."
    assert "the disk is full. hint: " in str(write_failure(Path("x"), OSError(errno.ENOSPC, "no space")))
    assert str(write_failure(Path("x"), ValueError("odd"))) == "x cannot be written: odd."
