"""Missing packages are installed from where Rollmill is, and caches lie where the user says."""

import os
import stat
from pathlib import Path

import pytest

from rollmill.core import installation
from rollmill.core.installation import cache_root, install_command
from rollmill.fusion.backends.triton.compile import _source_file
from rollmill.programs.cache import cache_directory
from wordings import raises


def test_a_clone_is_installed_by_its_path(monkeypatch, tmp_path):
    clone = tmp_path / "a clone"
    (clone / "src" / "rollmill").mkdir(parents=True)
    (clone / "pyproject.toml").touch()
    monkeypatch.setattr(installation, "PROJECT", clone)
    assert install_command("fusion") == f"pip install -e '{clone}[fusion]'"
    (clone / "pyproject.toml").unlink()
    assert install_command("fusion") == "pip install 'rollmill[fusion]'"


@pytest.mark.parametrize(
    ("own", "home", "root"),
    [
        ("/fast/cache", "/xdg", "/fast/cache"),
        (None, "/xdg", "/xdg/rollmill"),
        ("", "", str(Path.home() / ".cache" / "rollmill")),
    ],
)
def test_all_caches_are_in_one_folder(monkeypatch, own, home, root):
    for name, value in (("ROLLMILL_CACHE_DIR", own), ("XDG_CACHE_HOME", home)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert cache_root() == Path(root)
    assert cache_directory().parent == Path(root)


def test_a_cache_that_cannot_be_written_is_named_with_the_setting(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "file"))
    with raises("rollmill-cache-dir-can-name", "file/kernels/kernel_", "cannot be written"):
        _source_file("kernel = None")


class OfAnother(type(Path())):
    """A path of a folder that belongs to another user."""

    def stat(self, **options):
        return os.stat_result([stat.S_IFDIR | 0o755, 0, 0, 0, 7, 7, 0, 0, 0, 0])


def test_a_cache_that_others_can_write_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o757)
    with raises("every-user-can-write-to", tmp_path, f"`chmod o-w {tmp_path}`"):
        cache_root()
    tmp_path.chmod(0o775)
    assert cache_root() == tmp_path
    with monkeypatch.context() as changed:
        changed.setattr(os, "geteuid", lambda: 1000)
        with raises("cache-belongs-to-another-user", "(uid 7)"):
            installation._check_writers(OfAnother(tmp_path))
        changed.setattr(os, "geteuid", lambda: 7)
        installation._check_writers(OfAnother(tmp_path))
