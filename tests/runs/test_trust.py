"""A directory is trusted as long as its configuration is the one that this user's training wrote."""

import os
import shutil

import pytest

from rollmill.core.folder import Folder
from rollmill.core.stored_paths import run_folder
from rollmill.hooks.csv_log import _CsvTable
from rollmill.record.json_files import read_json, write_json
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.saved_run import SavedConfig
from rollmill.runs.trust import (
    check_cluster,
    check_start,
    names_to_remember,
    remember,
    rewrite_config,
    trusted_modules,
)
from wordings import raises

CONFIG = {"a": 1}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that may import the module `own`."""
    monkeypatch.setenv("ROLLMILL_STATE_DIR", str(tmp_path / "state"))
    run = RunDirectory.create(tmp_path / "run", config=CONFIG, versions={})
    remember(run, ["own"])
    assert trusted_modules(run) == {"own"}
    return run


def test_another_configuration_in_the_same_place_is_not_trusted(run):
    content = run.config_file.read_bytes()
    run.config_file.unlink()  # the directory keeps its path and its number
    run.config_file.write_bytes(content)
    assert trusted_modules(run) == set()


def test_the_same_file_that_somebody_has_written_to_is_not_trusted(run):
    with run.config_file.open("r+b") as file:
        file.write(file.read()[:1])
    times = os.stat(run.config_file)
    os.utime(run.config_file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as archives do
    assert trusted_modules(run) == set()


def test_what_a_training_notes_in_its_configuration_keeps_the_trust(run):
    rewrite_config(run, {"a": 2})
    assert trusted_modules(run) == {"own"} and run.read_config() == {"a": 2}


def test_a_directory_that_moves_is_trusted_and_a_copy_is_not(run, tmp_path):
    run.root.rename(tmp_path / "moved")
    assert trusted_modules(RunDirectory(tmp_path / "moved")) == {"own"}
    shutil.copytree(tmp_path / "moved", run.root)
    assert trusted_modules(run) == set()


def test_a_cluster_that_only_the_configuration_names_is_not_joined(run):
    saved = SavedConfig(graph={"environment": "x"}, options={"cluster": "evil.example:6379"}, imports=())
    with raises("was-not-made-here-and", "evil.example:6379"):
        check_cluster(run, saved, trust=False)
    remember(run, names_to_remember(saved))
    check_cluster(run, saved, trust=False)
    check_cluster(run, SavedConfig(graph=saved.graph, options={"cluster": "ray"}, imports=()), trust=False)


def test_a_store_that_only_the_configuration_names_is_not_asked(run):
    def starting(start):
        return SavedConfig(graph={"environment": "x"}, options={"start_from": start}, imports=())

    url = "s3://stranger/run"
    for start in (url, str(run_folder("start_from", url))):
        with raises("was-not-made-here-and-begins", url):
            check_start(run, starting(start), trust=False)
    remember(run, names_to_remember(starting(url)))
    check_start(run, starting(url), trust=False)
    with raises("was-not-made-here-and-begins", "s3://other/run"):
        check_start(run, starting("s3://other/run"), trust=False)
    for start in ("runs/mine", None, "ftp://x/y"):
        check_start(run, starting(start), trust=False)
    check_start(run, starting("s3://other/run"), trust=True)
    check_start(run, starting("s3://other/run"), trust=False)


@pytest.mark.parametrize("name", [".metrics.csv.tmp", "metrics.csv"])
def test_a_table_of_metrics_is_not_written_through_a_link(name, run, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("iteration\n1\n")
    (run.root / name).symlink_to(precious)
    table = _CsvTable(run.root / "metrics.csv")
    if name == "metrics.csv":
        with raises("is-link-and-links-inside"):
            table.cut_after(0)
    else:
        table.cut_after(0)
        table.add({"iteration": 1, "loss": 2.0})
        assert (run.root / "metrics.csv").read_text() == "iteration,loss\n1,2.0\n"
    assert precious.read_text() == "iteration\n1\n"


def test_a_name_that_is_no_text_is_refused_before_anything_is_written(tmp_path):
    root = tmp_path / os.fsdecode(b"bad\xff")
    with raises("has-bytes-are-not-utf", "--run-dir", "bad", "udcff"):
        RunDirectory.create(root, config=CONFIG, versions={})
    assert list(tmp_path.iterdir()) == []


def test_text_that_no_file_could_hold_is_written_escaped(tmp_path):
    write_json(Folder(tmp_path), "file.json", {"option": os.fsdecode(b"bad\xff")})
    assert read_json(Folder(tmp_path), "file.json") == {"option": "bad\\udcff"}
