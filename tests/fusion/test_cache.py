"""Files of the cache."""

import json
import os

import pytest

from rollmill.fusion.cache import read_cached, write_exactly, write_once
from rollmill.fusion.tune.timing import LaunchSearch, TunedLaunch
from wordings import raises


def way(values):
    return values["way"]


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "means" / "a.json"
    assert read_cached(file, way) is None
    write_once(file, json.dumps({"way": "flat"}))
    write_once(file, json.dumps({"way": "host"}))
    assert read_cached(file, way) == "flat"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 10**5, b" " * 2**21])
def test_a_damaged_file_is_removed_so_that_it_is_written_again(tmp_path, text):
    file = tmp_path / "a.json"
    file.write_bytes(text)
    assert read_cached(file, way) is None
    write_once(file, json.dumps({"way": "flat"}))
    assert read_cached(file, way) == "flat"


def put(file, kind, outside):
    """Something else in the place of a file."""
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            (file / "inner").mkdir(parents=True)
        case "link":
            file.symlink_to(outside)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_is_no_file_is_replaced_and_no_link_is_followed(tmp_path, kind):
    outside, file = tmp_path / "outside", tmp_path / "cache" / "a.json"
    outside.write_text("precious")
    file.parent.mkdir()
    put(file, kind, outside)
    assert read_cached(file, way) is None
    write_once(file, json.dumps({"way": "flat"}))
    assert read_cached(file, way) == "flat" and outside.read_text() == "precious"


def test_a_broken_link_in_place_of_a_file_is_replaced(tmp_path):
    file = tmp_path / "a.json"
    file.symlink_to(tmp_path / "new")
    write_once(file, "{}")
    assert not file.is_symlink() and not (tmp_path / "new").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "stored",
    [
        {"launch": [64, 4], "seconds": 1.0, "unfused_seconds": 2.0},  # was not tried
        {"launch": "32", "seconds": 1.0, "unfused_seconds": 2.0},
        {"launch": [32, 4], "seconds": 0.0, "unfused_seconds": 2.0},
        {"launch": [32, 4], "seconds": "1", "unfused_seconds": 2.0},
        {"launch": [32, 4], "seconds": 1.0},
    ],
)
def test_a_stored_launch_of_another_form_is_searched_for_again(tmp_path, stored):
    search = LaunchSearch(tmp_path / "a.json", [(32, 4)], *[lambda *_: None] * 2, [], lambda: None)
    right = {"launch": [32, 4], "seconds": 1.0, "unfused_seconds": 2.0}
    search.file.write_text(json.dumps(right))
    assert search.stored_result() == TunedLaunch((32, 4), 1.0, 2.0)
    search.file.write_text(json.dumps(stored))
    assert search.stored_result() is None


def test_a_link_in_place_of_a_folder_of_the_cache_leads_nowhere(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.json").write_text("precious")
    (tmp_path / "means").symlink_to(outside)
    assert read_cached(tmp_path / "means" / "a.json", way) is None
    for write in (write_once, write_exactly):
        with raises("is-link-and-links-inside"):
            write(tmp_path / "means" / "b.json", "{}")
    assert [entry.name for entry in outside.iterdir()] == ["a.json"]
    assert (outside / "a.json").read_text() == "precious"


@pytest.mark.parametrize("planted", ["import os", "", "kernel = 1\n# and more"])
def test_a_file_that_is_imported_has_the_content_that_was_made(tmp_path, planted):
    file = tmp_path / "kernels" / "a.py"
    write_exactly(file, "kernel = 1\n")
    file.write_text(planted)
    write_exactly(file, "kernel = 1\n")
    assert file.read_text() == "kernel = 1\n"
    before = file.stat().st_ino
    write_exactly(file, "kernel = 1\n")
    assert file.stat().st_ino == before
