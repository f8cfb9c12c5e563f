"""The programs of a graph, traced but not compiled, for tests of what they contain."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from rollmill.dataflow import Graph, init_state, iterate
from rollmill.dataflow.program_digests import Digests
from rollmill.programs.states import hyperparameters_of


class Programs(NamedTuple):
    """The start and one iteration of a graph, and the shapes of its state."""

    start: ClosedJaxpr
    iteration: ClosedJaxpr
    state: Any


def programs_of(graph: Graph) -> Programs:
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    begin = lambda seed, held: init_state(graph, jax.random.key(seed), index, held)
    start, state = jax.make_jaxpr(begin, return_shape=True)(jnp.uint32(0), hyperparameters_of(graph))
    return Programs(start, jax.make_jaxpr(partial(iterate, graph))(state), state)


def digests_of(programs: Programs) -> list[str]:
    """Digests of both programs, with all constants that they contain. Operations without a use do not count."""
    return [Digests().of_closed(without_unused(each)) for each in (programs.start, programs.iteration)]


def without_unused(program: ClosedJaxpr) -> ClosedJaxpr:
    needed, _ = dce_jaxpr(program.jaxpr, [True] * len(program.out_avals), instantiate=True)
    return program.replace(jaxpr=needed)
