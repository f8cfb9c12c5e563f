"""Tries what strangers have made, in this process and in a folder of its own, and finds the harm that it does."""

import contextlib
import importlib
import io
import os
import signal
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rollmill.cli.main import _code_of

LIMIT = 30.0
"""Seconds after which a case is said to wait for ever."""
MAX_PRINTED = 3000
"""Characters that an error may have."""
EVIL = "evil_tool"
"""A module beside the files that nothing may import."""
MARKUP = "<script>alert(1)"


class Case(NamedTuple):
    """Files of a stranger, and what is done with them."""

    kind: str
    name: str
    make: Callable[[Path, Path], object]
    """Makes them, from their folder and a folder outside of it."""
    call: Callable[[Path], int | None]
    """Uses the folder; returns an exit code, or None for 0."""


class Outcome(NamedTuple):
    """The end of a case."""

    code: int | None
    """None if an error was raised that no command catches."""
    faults: tuple[str, ...]


def tried(case: Case, root: Path) -> Outcome:
    """What becomes of a case; `root` is an empty folder."""
    got, outside, printed, errors = root / "got", root / "outside", io.StringIO(), io.StringIO()
    got.mkdir()
    (outside / "folder").mkdir(parents=True)
    for file in ("thesis.txt", "folder/letter.txt"):
        (outside / file).write_text("the only copy")
    case.make(got, outside)
    before, code, faults = _state(root), None, []
    with _as_a_command(got), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            code = _code_of(lambda: case.call(got) or 0)
        except BaseException as error:  # the command line would show it as a traceback
            faults.append(f"raised {type(error).__name__}: {error!s:.200}")
    text = errors.getvalue()
    if _state(root) != before:
        faults.append("wrote or deleted outside")
    if EVIL in sys.modules:
        faults.append("imported a module")
        del sys.modules[EVIL]
    if "\x1b" in text + printed.getvalue() or "Traceback" in text or len(text) > MAX_PRINTED:
        faults.append(f"printed {text[:300]!r}")
    if any(MARKUP in page.read_text() for page in got.glob("*.html") if page.is_file()):
        faults.append("wrote markup into a page")
    if code not in (0, 1, 2, None):
        faults.append(f"ended with exit code {code}")
    return Outcome(code, tuple(faults))


def _state(root: Path) -> dict[str, Any]:
    """All that is in a folder but outside of its subfolder `got`."""
    found = {}
    for folder, names, files in os.walk(root):
        if Path(folder) == root:
            names.remove("got")
        for name in (*names, *files):
            path = Path(folder, name)
            status = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
            found[str(path)] = (status.st_mode, status.st_ino, status.st_mtime_ns, content)
    return found


@contextlib.contextmanager
def _as_a_command(folder: Path) -> Iterator[None]:
    """Works in a folder that has the evil module, with an alarm, and gives everything back."""
    before, variables, path = Path.cwd(), dict(os.environ), list(sys.path)
    (folder / f"{EVIL}.py").write_text("")
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    handler = signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)
        sys.path[:] = path


class TooLate(BaseException):
    """A case that waits for ever."""


def _late(number: int, frame: object) -> None:
    raise TooLate(f"it had not ended after {LIMIT:.0f} s")
