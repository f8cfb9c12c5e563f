"""Files of the cache."""

import json

import pytest

from rollmill.fusion.cache import read_cached, write_once


def way(values):
    return values["way"]


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "means" / "a.json"
    assert read_cached(file, way) is None
    write_once(file, json.dumps({"way": "flat"}))
    write_once(file, json.dumps({"way": "host"}))
    assert read_cached(file, way) == "flat"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b"\xff\xfe"])
def test_a_damaged_file_is_removed_so_that_it_is_written_again(tmp_path, text):
    file = tmp_path / "a.json"
    file.write_bytes(text)
    assert read_cached(file, way) is None
    write_once(file, json.dumps({"way": "flat"}))
    assert read_cached(file, way) == "flat"
