"""Temporary folders do not outlive a killed process beyond the next one."""

import os
import signal
import sys

import pytest

from rollmill.core.child_processes import start_python
from rollmill.core.temporary import TemporaryFolder, temporary_folder

MAKE = """
import os, signal
from rollmill.core.temporary import TemporaryFolder
(TemporaryFolder("killed").path / "file").write_text("left")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    return tmp_path / "temporary"


def test_a_folder_ends_with_its_context(cache):
    with temporary_folder("kind") as folder:
        (folder / "inner").mkdir()
        assert folder.parent == cache and folder.stat().st_mode & 0o777 == 0o700
    assert list(cache.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_another_uses_stays(cache, tmp_path):
    used = TemporaryFolder("used")
    assert start_python("-c", MAKE).wait(60) == -signal.SIGKILL
    assert len([entry for entry in cache.iterdir() if entry.is_dir()]) == 2
    precious = tmp_path / "precious"
    precious.mkdir()
    (cache / "evil").symlink_to(precious)
    (cache / "evil.lock").touch()
    with temporary_folder("next"):
        kinds = sorted(entry.name.partition("-")[0] for entry in cache.iterdir() if entry.is_dir())
    assert kinds == ["next", "used"] and precious.is_dir()
    used.close()
    assert not used.path.exists()


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="a file in place of the cache")
def test_where_the_cache_cannot_be_written_the_system_has_a_folder(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "file"))
    with temporary_folder("kind") as folder:
        assert folder.is_dir() and tmp_path not in folder.parents
