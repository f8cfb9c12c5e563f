"""Converts drawings to pixels, and frames to files or terminal output. Draws figures with matplotlib."""

from rollmill.pictures.captions import Legend as Legend, add_caption as add_caption
from rollmill.pictures.figures import (
    GREY as GREY,
    new_figure as new_figure,
    require_matplotlib as require_matplotlib,
    tidy_axes as tidy_axes,
)
from rollmill.pictures.files import (
    FASTEST_GIF as FASTEST_GIF,
    check_destination as check_destination,
    check_fps as check_fps,
    collect_frames as collect_frames,
    pillow as pillow,
    write_frames as write_frames,
)
from rollmill.pictures.raster import Picture as Picture, rasterise as rasterise, resize as resize
from rollmill.pictures.terminal import coloured_lines as coloured_lines, plain_lines as plain_lines
