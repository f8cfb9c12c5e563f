"""Formats numbers for messages, and escapes untrusted strings for terminals and web pages."""

import math
from pathlib import Path

from rollmill.core.errors import UsageError

MAX_MESSAGE = 2500
"""Maximum number of characters in a message. A longer message would mostly repeat a value."""
UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def compact(value: int | float) -> str:
    """Formats a number with three digits and a letter for a power of a thousand: `1.39 M`, `999 k`."""
    for size, letter in UNITS:
        if abs(value) >= 0.9995 * size:  # otherwise 999,960 would be shown as 1,000 k
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def format_bytes(count: int | float) -> str:
    """Formats a number of bytes with a unit. For example, 1536 becomes `1.5 KiB`."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"


def format_count(number_of: int, one: str, many: str | None = None) -> str:
    """Formats a number together with its noun, in the singular or the plural, by default `one` with an s."""
    return f"{number_of:,} {one if number_of == 1 else many or one + 's'}"


def check_is_text(option: str, value: str | Path) -> None:
    """Raises a `UsageError` if a string cannot be encoded as UTF-8, which JSON files require."""
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{option} {printable(str(value))} contains bytes that are not valid UTF-8. hint: choose another name."
        ) from None


def printable(text: str) -> str:
    r"""Makes untrusted text safe for a terminal, with control characters shown as escapes such as `\x1b`."""
    shown = text.encode("utf-8", "backslashreplace").decode()
    return "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in shown)


def shorten_message(text: str) -> str:
    """Shortens a long message by cutting its middle. The beginning names the error, and the end the remedy."""
    if len(text) <= MAX_MESSAGE:
        return text
    end = MAX_MESSAGE // 3
    return f"{text[: MAX_MESSAGE - end]} [...] {text[-end:]}"


UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


def one_line(text: str) -> str:
    """Makes untrusted text safe for a web page, with each control character replaced by a placeholder."""
    return "".join(letter if letter.isprintable() else UNPRINTABLE for letter in text)


def truncate(text: str, limit: int) -> str:
    """Truncates a string to `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def number(value: float) -> str:
    """Formats a number with three digits, without an exponent if possible: `0.0123`, `47.9`, `1,024`."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size < 0.0005:
        return "0" if size == 0 else f"{value:.1e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"
