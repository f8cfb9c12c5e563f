"""Drawings as pixels, and frames as files and as text."""

from rollmill.pictures.files import FASTEST_GIF, check_fps, check_place, gathered, write_frames
from rollmill.pictures.raster import Picture, rasterise, resized
from rollmill.pictures.terminal import coloured_lines, plain_lines

__all__ = [
    "FASTEST_GIF",
    "Picture",
    "check_fps",
    "check_place",
    "coloured_lines",
    "gathered",
    "plain_lines",
    "rasterise",
    "resized",
    "write_frames",
]
