"""The command `rollmill board [FOLDER]`, which shows the runs and sweeps of a folder in the browser."""

import contextlib
import html
import sys
import tempfile
import time
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rollmill.board.server import BoardServer
from rollmill.cli.parsing import parse
from rollmill.core.errors import UsageError
from rollmill.core.local_paths import check_folder
from rollmill.core.options import Arg
from rollmill.core.text import printable
from rollmill.record.signals import stop_on_signals

SNAPS = Path("/snap/bin")
SNAP_BROWSERS = ("firefox", "chromium", "brave", "opera", "vivaldi")
POLL_SECONDS = 0.1
"""Seconds within which the board reacts to a signal."""


@dataclass(frozen=True)
class Board:
    """Show the runs and sweeps of a folder on a page in the browser, while they train."""

    folder: Annotated[Path, Arg(metavar="[FOLDER]", positional=True)] = Path("runs")
    """Folder to show, including its subfolders. Default: runs/."""
    port: int = 0
    """Port of this machine to listen at; 0 picks a free one."""
    open: Annotated[bool, Arg(only_on=True)] = False
    """Open the page in the browser."""


def run(arguments: list[str]) -> int:
    """Serves the page of runs and sweeps until Ctrl-C, and returns the exit code."""
    options = parse(Board, arguments, prog="rollmill board")
    if not 0 <= options.port <= 65535:
        raise UsageError(f"--port {options.port} must be between 0 and 65535.")
    check_folder(options.folder)
    with (
        BoardServer(options.folder, port=options.port) as server,
        stop_on_signals() as stop,
        server.serving(),
        leading_page(server.url) if options.open else contextlib.nullcontext() as page,
    ):
        print(f"runs of {printable(str(options.folder))}: {server.url}", flush=True)
        print("Ctrl-C ends the board. Training continues.", file=sys.stderr)
        if page is not None and not webbrowser.open(page.as_uri()):
            print("note: no browser was found on this machine. Open the address above.", file=sys.stderr)
        elif page is not None:
            print("If the browser cannot read the file, open the address above.", file=sys.stderr)
        while not stop.requested:
            time.sleep(POLL_SECONDS)
    return stop.exit_code


@contextlib.contextmanager
def leading_page(url: str) -> Iterator[Path]:
    """Context manager that writes a file that redirects a browser to `url`, and yields its path.

    The file hides the token in `url` from other users, who can see the arguments of a browser's command.
    """
    with _folder_for_browsers() as folder:  # only this user can access the folder
        page = Path(folder, "board.html")
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(url)}">\n')
        yield page


def _folder_for_browsers() -> tempfile.TemporaryDirectory[str]:
    """Makes a folder that the browsers of this machine can read.

    A browser installed by snap has its own /tmp, and reads only folders of the home directory without a dot.
    """
    if any(Path(SNAPS, name).exists() for name in SNAP_BROWSERS):
        with contextlib.suppress(OSError, RuntimeError):
            return tempfile.TemporaryDirectory(prefix="rollmill-board-", dir=Path.home())
    return tempfile.TemporaryDirectory(prefix="rollmill-board-")
