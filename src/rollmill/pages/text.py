"""Numbers and names as text of pages and of terminals."""

import math

UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """The text without control characters, which a terminal would obey."""
    return "".join(letter if letter.isprintable() else UNPRINTABLE for letter in text)


def cut(text: str, most: int) -> str:
    """The text, at most so many characters of it."""
    return text if len(text) <= most else text[: most - 1] + "…"


def number(value: float) -> str:
    """Three digits, without an exponent where it can be: `0.0123`, `47.9`, `1,024`."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size < 0.0005:
        return "0" if size == 0 else f"{value:.1e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"
