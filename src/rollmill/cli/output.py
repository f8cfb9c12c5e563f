"""Keeps standard output and error usable after their reader is gone, such as `head` or a closed terminal.

Printing must never end training. Once a stream has no reader, further output is dropped. Commands whose only
result is their output report the loss in their exit code.
"""

import errno
import io
import os
import sys
from typing import Any

from rollmill.core.text import printable

LOST_READER = 141
"""Exit code if the reader of a result disappeared, as a shell reports SIGPIPE: 128 plus the signal's number."""
UNWRITTEN = 1
"""Exit code if a result could not be written for another reason, such as a full disk."""

GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET, errno.EBADF)
"""Error numbers of a stream without a reader: a closed pipe, a closed terminal, or a closed descriptor."""


class ForgivingFile(io.FileIO):
    """A stream that records a failed write instead of raising an exception."""

    failure: OSError | None = None
    """The first failure, or None."""

    def write(self, data: Any, /) -> int:
        """Writes the data, or drops it after a failure."""
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
        return len(memoryview(data).cast("B"))


class PlainText(io.TextIOWrapper):
    """A text stream that escapes control characters, so that untrusted text cannot control the terminal."""

    def write(self, text: str, /) -> int:
        """Writes text, with control characters escaped."""
        super().write(printable(text))
        return len(text)


def control_terminal(text: str) -> None:
    """Prints trusted text without escaping its control sequences, which move the cursor or set colours."""
    stream = sys.stdout
    if isinstance(stream, PlainText):
        io.TextIOWrapper.write(stream, text)
    else:
        stream.write(text)
    stream.flush()


def open_streams() -> tuple[ForgivingFile | None, ForgivingFile | None]:
    """Replaces standard output and error with streams that tolerate the loss of their reader.

    Returns None for a stream that is already captured. Closed descriptors from 0 to 2 are first opened on the null
    device. Otherwise the next file to be opened would get one of these descriptors, and receive the output of
    libraries.
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
            streams.append(None)  # captured, for example by pytest
            continue
        file = ForgivingFile(descriptor, "w", closefd=False)
        setattr(sys, name, _text(file, stream))
        streams.append(file)
    return streams[0], streams[1]


def _text(file: ForgivingFile, original: io.TextIOWrapper | None) -> io.TextIOWrapper:
    if original is not None:
        original.flush()
    kind = PlainText if file.fileno() == 1 else io.TextIOWrapper
    return kind(
        io.BufferedWriter(file),
        encoding=original.encoding if original else "utf-8",
        errors=original.errors if original else "replace",
        line_buffering=file.isatty() or file.fileno() == 2,
        write_through=original.write_through if original else False,
    )


def _number(stream: io.TextIOWrapper) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def code_after_output(code: int, output: ForgivingFile | None) -> int:
    """Returns the exit code of a command that printed its result, and reports a failure to write it."""
    sys.stdout.flush()
    failure = output.failure if output is not None else None
    if failure is None or code:
        return code
    if failure.errno in GONE:
        return LOST_READER
    print(f"rollmill: output cannot be written: {failure.strerror}.", file=sys.stderr)
    return UNWRITTEN
