"""Draws the states of environments. Drawings are separate from the rules.

The colours are dark enough for white paper, and people with colour blindness can tell them apart.
"""

PAPER = "#ffffff"
INK = "#1d2327"
SOFT = "#c3cbd1"
FAINT = "#e9edf0"
BLUE = "#0072b2"
ORANGE = "#e69f00"
RED = "#d55e00"
GREEN = "#009e73"
WOOD = "#b07b48"
SKY, PINK, BROWN, VIOLET = "#56b4e9", "#b84f8f", "#5c4a00", "#3b2270"
CHANNELS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, BROWN, VIOLET)
"""Colours of the channels of an image."""
