"""Functions of tests that compute something once, compiled as programs that run once are."""

from functools import partial

import equinox as eqx

from rollmill.dataflow import init_state
from rollmill.lowerings.threefry import small_programs


def run_once(function, *arguments):
    """Compiles a function, whose random numbers are drawn in loops, and calls it."""
    with small_programs():
        return eqx.filter_jit(function)(*arguments)


def first_state(graph, key, index):
    """The state of a training before its first iteration."""
    return run_once(partial(init_state, graph), key, index)
