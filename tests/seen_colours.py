"""Colours as a deuteranope sees them, and how far apart two of them are."""

import math

import numpy as np

DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
"""On linear RGB: Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision
Deficiency" (2009), table 1, severity 1."""
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = TO_XYZ.sum(1)


def linear(colour: str) -> np.ndarray:
    """Returns linear RGB of `#rrggbb` or `#rgb`."""
    digits = colour.removeprefix("#")
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    values = np.array([int(digits[at : at + 2], 16) for at in (0, 2, 4)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """Returns CIE Lab of linear RGB."""
    share = TO_XYZ @ rgb / WHITE
    x, y, z = np.where(share > (6 / 29) ** 3, np.cbrt(share), share / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def apart(one: str, other: str, *, deuteranope: bool = True) -> float:
    """Returns the difference of two colours by CIEDE2000: 1 can just be seen, 10 at a glance."""
    matrix = DEUTERANOPIA if deuteranope else np.eye(3)
    return ciede2000(*(lab(np.clip(matrix @ linear(colour), 0, 1)) for colour in (one, other)))


def ciede2000(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the difference of two colours in Lab (Sharma, Wu and Dalal, 2005)."""
    chroma = (math.hypot(*one[1:]) + math.hypot(*other[1:])) / 2
    stretch = 1 + 0.5 * (1 - math.sqrt(chroma**7 / (chroma**7 + 25**7)))
    (l1, a1, b1), (l2, a2, b2) = one, other
    c1, c2 = math.hypot(stretch * a1, b1), math.hypot(stretch * a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, stretch * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    total = (
        h1 + h2 if c1 * c2 == 0 else h1 + h2 if abs(h1 - h2) <= 180 else h1 + h2 + (360 if h1 + h2 < 360 else -360)
    )
    hue = total if c1 * c2 == 0 else total / 2
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    cosine = lambda degrees: math.cos(math.radians(degrees))
    weight = (
        1
        - 0.17 * cosine(hue - 30)
        + 0.24 * cosine(2 * hue)
        + 0.32 * cosine(3 * hue + 6)
        - 0.2 * cosine(4 * hue - 63)
    )
    of_light = 1 + 0.015 * (light - 50) ** 2 / math.sqrt(20 + (light - 50) ** 2)
    of_chroma, of_hue = 1 + 0.045 * chroma, 1 + 0.015 * chroma * weight
    rotation = 2 * math.sqrt(chroma**7 / (chroma**7 + 25**7))
    rotation *= -math.sin(math.radians(60 * math.exp(-(((hue - 275) / 25) ** 2))))
    parts = (
        (l2 - l1) / of_light,
        (c2 - c1) / of_chroma,
        2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2)) / of_hue,
    )
    return math.sqrt(sum(part**2 for part in parts) + rotation * parts[1] * parts[2])
