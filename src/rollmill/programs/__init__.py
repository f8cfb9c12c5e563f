"""Graphs as compiled programs of one process: kernels, devices, dispatch, evaluation, matches, and faults."""

from rollmill.core.convolutions import order_convolutions
from rollmill.core.flat_descent import compute_descents_by
from rollmill.core.threefry import unroll_threefry
from rollmill.programs.own_code import own_convolution, own_descent

unroll_threefry()  # before anything that this package compiles
order_convolutions(own_convolution)
compute_descents_by(own_descent)
