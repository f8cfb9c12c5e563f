"""Numbers as text."""

UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def compact(value: float) -> str:
    """Three digits and the letter of a power of a thousand: `1.39 M`, `999 k`."""
    for size, letter in UNITS:
        if abs(value) >= 0.9995 * size:  # what would be rounded to 1,000 of the next smaller unit
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"
