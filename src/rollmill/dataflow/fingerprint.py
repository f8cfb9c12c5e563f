"""Computes a digest of everything a graph computes. Equal code gives equal digests in every process.

The graph is traced but not compiled. The digest covers the first state, one whole iteration (environment, policy,
prepare, condition, gradients, update and the end of learning) and the greedy policy. Two graphs with equal
fingerprints train the same weights. A graph rebuilt from names is therefore the intended one if both agree.
"""

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from rollmill.dataflow.collecting import step_one
from rollmill.dataflow.graph import Graph, State
from rollmill.dataflow.graph_traces import traces_of

NAMES_ONLY = {("jit", "name"), ("jit", "ctx_mesh"), ("name", "name")}
"""Parameters of primitives that do not affect results."""


def fingerprint(graph: Graph) -> str:
    """Returns the digest of a graph: its traced program, sizes, spaces, and how it starts host environments.

    Hyperparameters that are data are inputs of the program, and no part of the digest.
    """
    traces = traces_of(graph)
    programs = (traces.start.program, traces.iterate.program, *_decisions(graph, traces.start.result))
    digests = _Digests()
    host = None if graph.host is None else _without_addresses(repr(graph.host))
    around = (tuple(graph.loops), repr(graph.observation_space), repr(graph.action_space), host)
    return _sha256(f"{[digests.of_closed(program) for program in programs]}{around}")


def fragment_fingerprints(graph: Graph) -> dict[str, str]:
    """Returns digests of the parts a user may have replaced: environment, policy, and the rest as algorithm."""
    index, key = jnp.zeros((), jnp.int32), jax.random.key(0)
    state, observation = jax.eval_shape(graph.start_environment, key, index)
    mask = jax.eval_shape(graph.action_mask, state)
    weights, memory = jax.eval_shape(lambda k: graph.weights(graph.start_learner(k)), key), graph.start_memory()
    decision = jax.eval_shape(graph.policy, weights, key, memory, observation, mask)
    host = None if graph.host is None else _without_addresses(repr(graph.host))
    environment = (
        jax.make_jaxpr(graph.start_environment)(key, index),
        jax.make_jaxpr(graph.environment)(key, state, decision.action),
        jax.make_jaxpr(graph.action_mask)(state),
    )
    policy = tuple(
        jax.make_jaxpr(function)(weights, key, memory, observation, mask)
        for function in (graph.policy, graph.greedy)
    )
    digest = lambda programs: _sha256("".join(map(_Digests().of_closed, programs)))
    return {"environment": _sha256(f"{digest(environment)}{host}"), "policy": digest(policy)}


def _decisions(graph: Graph, begin: State) -> list[core.ClosedJaxpr]:
    """Returns the programs of a greedy decision in ONE environment and, if there is one, of its appraisal."""
    key = begin.key
    weights = jax.eval_shape(graph.weights, begin.learner)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), begin.collector)
    programs = [jax.make_jaxpr(graph.greedy)(weights, key, one.memory, one.observation, one.action_mask)]
    if graph.appraise is not None:
        _, step = jax.eval_shape(functools.partial(step_one, graph), weights, one, key, 0)
        programs.append(jax.make_jaxpr(graph.appraise)(weights, step))
    return programs


class _Digests:
    """Digests of programs and of the objects their operations hold. Caches programs that occur more than once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}

    def of_closed(self, program: core.ClosedJaxpr) -> str:
        """Returns the digest of a program and its constants."""
        if id(program) not in self._known:
            constants = [self._value(constant) for constant in program.consts]
            self._known[id(program)] = (program, _sha256(f"{constants}{self._program(program.jaxpr)}"))
        return self._known[id(program)][1]

    def _program(self, program: core.Jaxpr) -> str:
        """Returns the digest of the operations in order. Variables are numbered by first use."""
        numbers: dict[core.Var, int] = {}

        def atom(atom: Any) -> str:
            if isinstance(atom, core.Literal):
                return f"{self._value(atom.val)}:{_type(atom.aval)}"
            return f"v{numbers.setdefault(atom, len(numbers))}:{_type(atom.aval)}"

        lines = [[atom(var) for var in (*program.constvars, *program.invars)]]
        for equation in program.eqns:
            operation = equation.primitive.name
            parameters = [
                f"{name}={self._value(value)}"
                for name, value in sorted(equation.params.items())
                if (operation, name) not in NAMES_ONLY
            ]
            lines.append([operation, *parameters, *map(atom, equation.invars), "->", *map(atom, equation.outvars)])
        lines.append([atom(var) for var in program.outvars])
        return _sha256("\n".join(map(" ".join, lines)))

    def _value(self, value: Any) -> str:
        match value:
            case core.ClosedJaxpr():
                return self.of_closed(value)
            case core.Jaxpr():
                return self._program(value)
            case tuple() | list():
                return f"[{','.join(map(self._value, value))}]"
            case set() | frozenset():
                return f"{{{','.join(sorted(map(self._value, value)))}}}"
            case Mapping():
                return f"{{{','.join(sorted(f'{key}:{self._value(part)}' for key, part in value.items()))}}}"
            case jax.Array() | np.ndarray() | np.generic():
                return _array(value)
            case functools.partial():
                return f"partial{self._value([value.func, value.args, value.keywords])}"
        return _without_addresses(repr(value))


def _array(value: Any) -> str:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"key<{jax.random.key_impl(value)}>{_array(jax.random.key_data(value))}"
    content = np.ascontiguousarray(np.asarray(value))
    return f"{content.dtype}{content.shape}{hashlib.sha256(content.tobytes()).hexdigest()}"


def _type(aval: Any) -> str:
    return f"{getattr(aval, 'dtype', aval)}{getattr(aval, 'shape', '')}{getattr(aval, 'weak_type', '')}"


def _without_addresses(text: str) -> str:
    """Removes memory addresses, which differ between processes."""
    return re.sub(r"\b(at )?0x[0-9a-f]+", "", text)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
