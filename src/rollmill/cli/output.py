"""Standard output and error that may go away: a reader such as `head`, a terminal that is closed.

Nothing that is printed may end a training. Once nobody reads a stream any more, what is written to it is dropped;
a command that has nothing but its output to give says so by its exit code.
"""

import errno
import io
import os
import sys
from typing import Any

LOST_READER = 141
"""Exit code where the reader of a result went away: 128 and the number of SIGPIPE, as a shell reports it."""
UNWRITTEN = 1
"""Exit code where a result could not be written for another reason, such as a full disk."""

GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET, errno.EBADF)
"""Nobody reads: a closed pipe, a terminal that hung up, a closed descriptor."""


class ForgivingFile(io.FileIO):
    """A stream whose failed writes are remembered instead of raised."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Writes, or drops what cannot be written."""
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
        return len(memoryview(data).cast("B"))


def open_streams() -> tuple[ForgivingFile | None, ForgivingFile | None]:
    """Puts forgiving streams in the place of standard output and error; None where somebody captures these.

    Descriptors 0 to 2 that are closed are opened on the null device first: otherwise the next file that is opened
    gets such a number, and what a library prints to it ends up in the file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR if descriptor else os.O_RDONLY)
    streams = []
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None and (not isinstance(stream, io.TextIOWrapper) or _number(stream) != descriptor):
            streams.append(None)  # somebody captures it
            continue
        file = ForgivingFile(descriptor, "w", closefd=False)
        setattr(sys, name, _text(file, stream))
        streams.append(file)
    return streams[0], streams[1]


def _text(file: ForgivingFile, before: io.TextIOWrapper | None) -> io.TextIOWrapper:
    if before is not None:
        before.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=before.encoding if before else "utf-8",
        errors=before.errors if before else "replace",
        line_buffering=file.isatty() or file.fileno() == 2,
        write_through=before.write_through if before else False,
    )


def _number(stream: io.TextIOWrapper) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def code_after_output(code: int, output: ForgivingFile | None) -> int:
    """The exit code of a command whose result is what it printed; says so where that could not be written."""
    sys.stdout.flush()
    failure = output.failure if output is not None else None
    if failure is None or code:
        return code
    if failure.errno in GONE:
        return LOST_READER
    print(f"rollmill: the output cannot be written: {failure.strerror}.", file=sys.stderr)
    return UNWRITTEN
