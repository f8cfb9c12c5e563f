"""Converts drawings to pixels, and frames to files or terminal output. Draws figures with matplotlib."""

from rollmill.pictures.captions import Legend as Legend, captioned as captioned
from rollmill.pictures.figures import (
    GREY as GREY,
    new_figure as new_figure,
    require_matplotlib as require_matplotlib,
    tidy as tidy,
)
from rollmill.pictures.files import (
    FASTEST_GIF as FASTEST_GIF,
    check_fps as check_fps,
    check_place as check_place,
    gathered as gathered,
    pillow as pillow,
    write_frames as write_frames,
)
from rollmill.pictures.raster import Picture as Picture, rasterise as rasterise, resized as resized
from rollmill.pictures.terminal import coloured_lines as coloured_lines, plain_lines as plain_lines
