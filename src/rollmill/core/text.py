"""Numbers as text."""

UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def compact(value: float) -> str:
    """Three digits and the letter of a power of a thousand: `1.39 M`, `999 k`."""
    for size, letter in UNITS:
        if abs(value) >= 0.9995 * size:  # what would be rounded to 1,000 of the next smaller unit
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def in_bytes(count: int) -> str:
    """A number of bytes as text: 1536 as `1.5 KiB`."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
