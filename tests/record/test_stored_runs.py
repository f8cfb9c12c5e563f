"""A run is copied to an object store while it is written, and comes back on another machine."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from rollmill.core.errors import StorageError
from rollmill.core.stored_paths import FOLDER, run_folder, url_of
from rollmill.record import mirror, object_store
from rollmill.record.checkpoints import Checkpoints
from rollmill.record.mirror import Mirror, mirror_run
from rollmill.record.object_store import ObjectStore, StoreError
from rollmill.record.run_directory import RunDirectory
from rollmill.record.stored_runs import download_run, is_run_file, local_marker
from wordings import raises

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'rollmill[store]'")
boto3 = pytest.importorskip("boto3")
pytest.importorskip("flask_cors")


PATIENCE = 120.0
"""Limit for what takes a moment on an idle machine, in seconds."""


@pytest.fixture(scope="module")
def server():
    from moto.server import ThreadedMotoServer

    started = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket="bucket")
    yield endpoint
    started.stop()


@pytest.fixture
def url(server, monkeypatch, tmp_path, request):
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "ROLLMILL_CACHE_DIR": str(tmp_path / "first"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mirror, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(mirror, "STOPPED_SECONDS", PATIENCE)
    monkeypatch.setattr(mirror, "MAX_PAUSE", 0.02)
    return f"s3://bucket/{request.node.name}/run"


def folder(url):
    return run_folder("run_dir", url)


def begin(url, **config):
    return RunDirectory.create(folder(url), config={"graph": {}, **config}, versions={})


def numbers(iteration):
    return {"weights": np.full((3,), iteration, np.float32)}


def save(checkpoints, *iterations):
    for iteration in iterations:
        checkpoints.save(iteration, numbers(iteration), metadata={})
    checkpoints.wait()


def train(url, *iterations, keep_last=2, until="stopped", log=""):
    """Writes checkpoints as a training does, while they are copied, and returns the lines that were told."""
    run, told = RunDirectory(folder(url)), []
    with (
        run.lock(),
        mirror_run(run, url, told.append, told.append),
        Checkpoints(run.checkpoints, keep_last=keep_last) as kept,
    ):
        for iteration in iterations:
            run.metrics_file.write_text("".join(f"{n}\n" for n in range(iteration)))
            save(kept, iteration)
        run.write_summary({"status": until})
    return told


def elsewhere(monkeypatch, tmp_path, url):
    """Returns the run as another machine has it."""
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "second"))
    return RunDirectory.open(folder(url))


def restored(run):
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        return checkpoints.iterations(), checkpoints.restore(numbers(0))


def test_a_run_comes_to_another_machine_with_the_newest_checkpoints(url, monkeypatch, tmp_path):
    begin(url, seed=7)
    (folder(url) / "tensorboard").mkdir()
    (folder(url) / "tensorboard" / "events.1").write_bytes(b"event")
    assert train(url, 10, 20, 30) == [f"copying the run to {url}"]
    run = elsewhere(monkeypatch, tmp_path, url)
    assert url_of(run.root) == url and tmp_path / "second" in run.root.parents
    iterations, newest = restored(run)
    assert iterations == (20, 30) and newest is not None and newest.iteration == 30
    assert np.array_equal(newest.state["weights"], numbers(30)["weights"])
    assert run.read_config()["seed"] == 7 and len(run.metrics_file.read_text().splitlines()) == 30
    assert (run.root / "tensorboard" / "events.1").read_bytes() == b"event"
    assert not any("checkpoints/10/" in name for name in ObjectStore(url).sizes())
    assert run.command("resume") == f"rollmill resume {url}"


def test_the_newer_of_both_is_gone_on_with(url, monkeypatch, tmp_path):
    begin(url)
    train(url, 10)
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "second"))
    download_run(folder(url), url)
    train(url, 20)
    download_run(folder(url), url)
    assert restored(RunDirectory(folder(url)))[0] == (10, 20)
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "first"))
    with Checkpoints(folder(url) / "checkpoints") as here:
        save(here, 15)  # was never copied, and is older than what the second machine did
    download_run(folder(url), url)
    assert restored(RunDirectory(folder(url)))[0] == (10, 20)
    with Checkpoints(folder(url) / "checkpoints", keep_last=9) as here:
        save(here, 25)  # as after a kill while the store was out of reach
    before = (folder(url) / "config.json").stat().st_ino
    download_run(folder(url), url)
    assert restored(RunDirectory(folder(url)))[0] == (10, 20, 25)
    assert (folder(url) / "config.json").stat().st_ino == before


def failing(monkeypatch, fails):
    """Lets requests fail while `fails()` says so."""
    for name in ("write", "read", "delete", "sizes"):
        original = getattr(ObjectStore, name)

        def request(self, *arguments, original=original):
            if fails():
                raise StoreError("503 Slow Down", is_final=False)
            return original(self, *arguments)

        monkeypatch.setattr(ObjectStore, name, request)


def test_a_store_that_fails_is_tried_again_and_told_of(url, monkeypatch, tmp_path):
    begin(url)
    rng = np.random.default_rng(3)
    failing(monkeypatch, lambda: rng.random() < 0.6)
    monkeypatch.setattr(mirror, "FAILURES_TOLD", 1)
    told = train(url, *range(5, 50, 5), until="finished")
    assert any("is being retried: 503 Slow Down" in line for line in told), told
    assert any("has all finished checkpoints again" in line for line in told), told
    monkeypatch.setattr(object_store, "MAX_PAUSE", 0.01)
    monkeypatch.setattr(object_store.time, "sleep", lambda seconds: None)
    assert restored(elsewhere(monkeypatch, tmp_path, url))[0] == (40, 45)


def test_a_store_out_of_reach_neither_stops_a_training_nor_is_forgotten(url, monkeypatch, tmp_path):
    begin(url)
    down = threading.Event()
    down.set()
    failing(monkeypatch, down.is_set)
    monkeypatch.setattr(mirror, "STOPPED_SECONDS", 0.2)
    monkeypatch.setattr(mirror, "FINISHED_SECONDS", 0.2)
    told = train(url, 10)
    assert "is incomplete: 503 Slow Down" in told[-1]
    with raises("training-has-finished-but-lacks", url, "503 Slow Down"):
        train(url, 20, until="finished")
    down.clear()
    monkeypatch.setattr(mirror, "STOPPED_SECONDS", PATIENCE)
    train(url)
    assert restored(elsewhere(monkeypatch, tmp_path, url))[0] == (10, 20)


def test_a_checkpoint_that_is_deleted_while_it_is_copied_is_whole(url, monkeypatch, tmp_path):
    """One begins to be copied, three others replace it meanwhile, and the copy has not torn it."""
    run, written = begin(url), []
    original = ObjectStore.write
    with Checkpoints(run.checkpoints, keep_last=1) as kept:
        save(kept, 10)

        def write(self, name, content):
            if name == "checkpoints/10/state.safetensors":
                save(kept, 20)
            written.append(name)
            original(self, name, content)

        monkeypatch.setattr(ObjectStore, "write", write)
        copying = Mirror(run, ObjectStore(url), lambda text: None)
        copying._look(last=False)
        assert not (run.root / "checkpoints/10").exists()
    assert written[-3:] == ["checkpoints/10/state.safetensors", "checkpoints/10/record.json", "stored.json"]
    there = elsewhere(monkeypatch, tmp_path, url)
    iterations, newest = restored(there)
    assert iterations == (10,) and np.array_equal(newest.state["weights"], numbers(10)["weights"])


def test_the_process_that_began_last_copies(url):
    run = begin(url)
    first, second = (Mirror(run, ObjectStore(url), lambda text: None) for _ in range(2))
    first._writer, second._writer = "old:1", "new:2"
    first._look(last=True)
    second._look(last=True)
    with pytest.raises(mirror.TakenOver, match="another process on new"):
        first._look(last=True)
    second._look(last=True)
    marker = local_marker(run.folder)
    assert marker is not None and marker.revision == 3


def test_a_run_that_began_meanwhile_is_not_overwritten(url, monkeypatch, tmp_path):
    """Two trainings find the URL empty, and compile."""
    begin(url, seed=1)
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "second"))
    begin(url, seed=2)
    train(url, 10)
    before = {name: ObjectStore(url).read(name) for name in ("config.json", "writer.txt", "stored.json")}
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "first"))
    told = train(url, 20)
    assert any("no longer copied" in line and "contains another run" in line for line in told), told
    assert "the next start on this machine renames" in told[-1]
    assert {name: ObjectStore(url).read(name) for name in before} == before
    assert ObjectStore(url).sizes().keys() >= {"checkpoints/10/record.json"}


def test_files_with_any_printable_name_are_copied(url, monkeypatch, tmp_path):
    names = ["my notes (1).txt", "plots/größe, 10 %.svg", "plots/a'b#c?d.txt"]
    run = begin(url)
    (run.root / "plots").mkdir()
    for name in [*names, ".hidden", "plots/line\nbreak"]:
        (run.root / name).write_text(name)
    train(url, 10)
    root = elsewhere(monkeypatch, tmp_path, url).root
    assert [(root / name).read_text() for name in names] == names
    assert sorted(path.name for path in (root / "plots").iterdir()) == ["a'b#c?d.txt", "größe, 10 %.svg"]
    assert not (root / ".hidden").exists()


@pytest.mark.parametrize(
    "name", ["../x", "a/../x", "a//x", "/x", "a\\x", "x" * 256, "ö" * 128, "stored.json", "a/b/c/d"]
)
def test_no_other_name_is_fetched(name):
    assert not is_run_file(name)


def test_a_run_whose_first_copy_was_interrupted_goes_on(url):
    run = begin(url)
    ObjectStore(url).write("config.json", run.config_file.read_bytes())
    with Checkpoints(run.checkpoints) as here:
        save(here, 10)
    assert restored(RunDirectory.open(folder(url)))[0] == (10,)
    assert [path.name for path in run.root.parent.iterdir() if path.is_dir()] == [run.root.name]


def test_another_run_in_the_working_folder_is_moved_aside(url, monkeypatch, tmp_path):
    begin(url, seed=1)  # killed before anything was copied
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "second"))
    begin(url, seed=2)
    train(url, 10)
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "first"))
    assert RunDirectory.open(folder(url)).read_config()["seed"] == 2
    aside = Path(f"{folder(url)}.other-1")
    assert json.loads((aside / "config.json").read_text())["seed"] == 1


def test_a_run_that_another_tool_has_copied_is_read(url, tmp_path):
    store = ObjectStore(url)
    run = RunDirectory.create(tmp_path / "plain", config={"seed": 5}, versions={})
    with Checkpoints(run.checkpoints) as kept:
        save(kept, 10)
    for file in (path for path in run.root.rglob("*") if path.is_file()):
        store.write(str(file.relative_to(run.root)), file.read_bytes())
    store.write("checkpoints/.hidden", b"x")
    there = RunDirectory.open(folder(url))
    assert there.read_config()["seed"] == 5 and restored(there)[0] == (10,)
    assert not (there.checkpoints.path / ".hidden").exists()


def test_a_checkpoint_that_is_deleted_while_the_run_is_fetched_is_left_out(url, monkeypatch, tmp_path):
    begin(url)
    train(url, 10)
    original, stale = ObjectStore.sizes, ObjectStore(url).sizes()
    train(url, 20, 30)
    lists = [stale, stale]
    monkeypatch.setattr(ObjectStore, "sizes", lambda self: lists.pop() if lists else original(self))
    assert restored(elsewhere(monkeypatch, tmp_path, url))[0] == (20, 30)


def test_what_cannot_be_a_run_is_refused(url):
    with raises("holds-no-run", url):
        RunDirectory.open(folder(url))
    ObjectStore(url).write("notes.txt", b"mine")
    with raises("is-not-empty-and-holds-no-run", "notes.txt"):
        download_run(folder(url), url)
    for bad in ("s3://bucket", "s3://bucket/", "s3://bucket/a/../b"):
        with raises("names-no-folder-hint-runs"):
            folder(bad)
    with raises("has-more-than-characters-after", "200"):
        folder(f"gs://bucket/{'x' * 201}")
    missing = "s3://nobody-has-this/x"
    with pytest.raises(StorageError, match="the bucket does not exist"):
        download_run(folder(missing), missing)


def test_paths_and_urls(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    place = folder("s3://bucket/a b/c%d")
    assert place == folder(Path("s3://bucket/a b/c%d")) == tmp_path / FOLDER / "s3/bucket" / "a%20b%2Fc%25d"
    assert url_of(place) == "s3://bucket/a b/c%d"
    assert folder("runs/a") == Path("runs/a") and url_of(Path("runs/a")) is None
    assert url_of(tmp_path / FOLDER / "s3") is None
    (tmp_path / "linked").symlink_to(tmp_path / "disk")  # as ~/.cache on a cluster
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "linked"))
    place = folder("s3://bucket/a")
    assert url_of(place) == url_of(place.resolve()) == "s3://bucket/a" and place != place.resolve()


def test_the_extra_is_named_where_it_is_missing(url, monkeypatch):
    monkeypatch.setattr(object_store, "find_spec", lambda name: None)
    with raises("needs-package-obstore-hint", "store"):
        RunDirectory.open(folder(url))
