"""Converts drawings to pixels, and frames to files or text. Draws figures with matplotlib."""

from rollmill.pictures.captions import Legend, captioned
from rollmill.pictures.figures import GREY, new_figure, require_matplotlib, tidy
from rollmill.pictures.files import FASTEST_GIF, check_fps, check_place, gathered, pillow, write_frames
from rollmill.pictures.raster import Picture, rasterise, resized
from rollmill.pictures.terminal import coloured_lines, plain_lines

__all__ = [
    "FASTEST_GIF",
    "GREY",
    "Legend",
    "Picture",
    "captioned",
    "check_fps",
    "check_place",
    "coloured_lines",
    "gathered",
    "new_figure",
    "pillow",
    "plain_lines",
    "rasterise",
    "require_matplotlib",
    "resized",
    "tidy",
    "write_frames",
]
