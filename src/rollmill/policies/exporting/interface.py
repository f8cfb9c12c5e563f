"""Presents a policy as one function of named arrays, for export formats that only support arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from rollmill.algorithms import clip_to_space
from rollmill.core.spaces import struct
from rollmill.core.types import Action, Memory, Observation
from rollmill.dataflow import ActionMask
from rollmill.policies.policy import LoadedRun
from rollmill.policies.policy_arguments import mask_struct

OBSERVATION, MASK, MEMORY = "observation", "action_mask", "memory"
ACTION, LOGITS, MEAN, SCALE, VALUE, Q_VALUES = "action", "logits", "mean", "scale", "value", "q_values"
NEXT_MEMORY = "next_memory"


class ExportedArray(NamedTuple):
    """A named input or output of an exported policy, described without its leading batch axis."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the array, without its batch axis."""
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))


class ExportedFunction(NamedTuple):
    """A policy as a function of named arrays."""

    function: Callable[..., tuple[Array, ...]]
    """Maps the inputs for ONE observation, in order, to the outputs."""
    inputs: tuple[ExportedArray, ...]
    outputs: tuple[ExportedArray, ...]
    arguments: tuple[int, ...]
    """Position of each input among the leaves of observation, action mask and memory."""


def exported_function(loaded: LoadedRun) -> ExportedFunction:
    """Returns the greedy policy of a run as a function with all outputs: action, logits or mean and scale, value,
    and next memory.

    The leaves of dictionaries and tuples are named by their path: `observation.position`, `memory.0`. Memories
    that the policy only passes on, such as those of critics, are left out.
    """
    graph = loaded.graph
    given = {
        OBSERVATION: struct(graph.observation_space),
        MASK: mask_struct(graph),
        MEMORY: jax.eval_shape(graph.start_memory),
    }
    leaves, structure = jax.tree.flatten(tuple(given.values()))

    names: list[str] = []

    def trees(*inputs: Array) -> list[PyTree]:
        observation, mask, memory = jax.tree.unflatten(structure, inputs)
        found = _outputs(loaded, observation, mask, memory)
        names[:] = found
        return list(found.values())

    program, shapes = jax.make_jaxpr(trees, return_shape=True)(*leaves)
    outputs, inputs = _name_leaves(dict(zip(names, shapes, strict=True))), _name_leaves(given)
    unused = _find_passed_on(program.jaxpr, len(jax.tree.leaves(given[MEMORY])))
    kept, results = (_positions(len(arrays), without=unused) for arrays in (inputs, outputs))

    def function(*arrays: Array) -> tuple[Array, ...]:
        whole = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
        for position, array in zip(kept, arrays, strict=True):
            whole[position] = array
        found = jax.tree.leaves(trees(*whole))
        return tuple(found[position] for position in results)

    return ExportedFunction(
        function, tuple(inputs[i] for i in kept), tuple(outputs[i] for i in results), arguments=kept
    )


def _find_passed_on(program: Any, count: int) -> set[int]:
    """Returns which of the `count` memories at the end of a program's inputs are only passed on to the next step.

    Positions are counted from the end, as -1 for the last input and output.
    """
    read = {id(atom) for equation in program.eqns for atom in equation.invars}
    return {
        place
        for place in range(-count, 0)
        if program.outvars[place] is program.invars[place] and id(program.invars[place]) not in read
    }


def _positions(count: int, *, without: set[int]) -> tuple[int, ...]:
    return tuple(position for position in range(count) if position - count not in without)


def _outputs(loaded: LoadedRun, observation: Observation, mask: ActionMask, memory: Memory) -> dict[str, PyTree]:
    weights, outputs, found = loaded.weights, loaded.graph.outputs, {}
    found[ACTION], after = _decision(loaded, observation, mask, memory)
    if outputs.distribution is not None:
        found |= _parameters(outputs.distribution(weights, memory, observation, mask))
    if outputs.value is not None:
        found[VALUE] = outputs.value(weights, memory, observation)
    if outputs.q_values is not None:
        found[Q_VALUES] = outputs.q_values(weights, observation)
    found[NEXT_MEMORY] = after
    return found


def _decision(
    loaded: LoadedRun, observation: Observation, mask: ActionMask, memory: Memory
) -> tuple[Action, Memory]:
    """Returns the greedy action and the next memory. For a search it is its network's action."""
    graph = loaded.graph
    if graph.outputs.searches:
        assert graph.outputs.distribution is not None
        return graph.outputs.distribution(loaded.weights, memory, observation, mask).mode(), memory
    decision = graph.greedy(loaded.weights, jax.random.key(0), memory, observation, mask)
    return clip_to_space(graph.action_space, decision.action), decision.memory


def _parameters(distribution: Any) -> dict[str, PyTree]:
    """Returns logits, or mean and standard deviation. Empty for other distributions.

    In a multi-agent environment, the names include the kind of agents.
    """
    if isinstance(distribution, dict):
        of_kinds = {kind: _parameters(part) for kind, part in distribution.items()}
        names = dict.fromkeys(name for part in of_kinds.values() for name in part)
        return {name: {kind: part[name] for kind, part in of_kinds.items() if name in part} for name in names}
    if hasattr(distribution, "logits"):
        return {LOGITS: distribution.logits}
    if hasattr(distribution, "mean") and hasattr(distribution, "log_std"):
        return {MEAN: distribution.mean, SCALE: jnp.exp(distribution.log_std)}
    return {}


def _name_leaves(trees: dict[str, PyTree]) -> tuple[ExportedArray, ...]:
    found = []
    for name, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            full = ".".join([name, *(_part(key) for key in path)])
            found.append(ExportedArray(full, tuple(leaf.shape), str(leaf.dtype)))
    return tuple(found)


def _part(key: Any) -> str:
    """Returns one component of a path: the key of a dictionary, the index in a tuple, or the name of a field."""
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))
