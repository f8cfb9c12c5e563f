"""Finds the line that another thread is executing, without touching its frames."""

import faulthandler
import linecache
import os
import re
import sysconfig
import tempfile
from pathlib import Path
from typing import IO, NamedTuple

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_CARRIERS = (str(Path(__file__).parent) + os.sep, os.path.join(_PACKAGE, "channels") + os.sep)
_INSTALLED = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
_THREAD = re.compile(r"hread 0x([0-9a-f]+) .*\(most recent call first\):")
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class CodeLine(NamedTuple):
    """A source line on the stack of a thread."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def text(self) -> str:
        """The text of the source line."""
        return linecache.getline(self.file, self.line).strip()


def current_line(thread: int) -> str:
    """Returns the innermost line of user code that a thread executes, and the library line called from it, if any.

    User code excludes the folders of Python, and the modules of Rollmill that carry messages.
    """
    places = stack_of(thread)
    if not places:
        return "its main thread has ended"
    own = next((place for place in places if _is_own(place.file)), places[0])
    text = f"{own}: {own.text}"
    return text if own is places[0] else f"{text} (inside, {places[0]})"


def stack_of(thread: int) -> list[CodeLine]:
    """Returns up to a hundred lines of a thread's stack, innermost first. Empty if the thread has ended.

    The stack is read with faulthandler, which runs while no Python code does. `sys._current_frames` would return
    frames that their thread continues to change while they are read, and following them has crashed CPython 3.11.
    """
    with _open_unnamed_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.read().decode(errors="replace").splitlines()
    places: list[CodeLine] = []
    inside = False
    for line in lines:
        if found := _THREAD.search(line):
            inside = int(found[1], 16) == thread
        elif inside and (found := _LINE.match(line)):
            places.append(CodeLine(found[1], int(found[2]), found[3]))
    return places


def _open_unnamed_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stacks"), "w+b")
    return tempfile.TemporaryFile()


def _is_own(file: str) -> bool:
    if file.startswith(_PACKAGE):
        return not file.startswith(_CARRIERS)
    return not file.startswith(("<", *_INSTALLED))
