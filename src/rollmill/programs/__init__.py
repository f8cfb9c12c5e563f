"""Graphs as compiled programs of one process: kernels, devices, dispatch, evaluation, matches, and faults."""

from rollmill.core.convolutions import order_convolutions
from rollmill.core.threefry import unroll_threefry
from rollmill.programs.own_convolutions import own_convolution

unroll_threefry()  # before anything that this package compiles
order_convolutions(own_convolution)
