"""Makes an optimiser step on all gradients as one flat vector, in a single JAX operation.

If a step consists of several JAX operations, it reads and writes memory several times: to concatenate the
gradients, for each moment, and to change the weights. On CPUs, machine code may compute the step in one pass
(`register_descent_code`). On other devices, and under `vmap`, the operation is lowered to its parts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import batching, mlir
from jaxlib.mlir import ir
from jaxtyping import Array, Float, PyTree

FlatUpdate: TypeAlias = Callable[[Float[Array, " numbers"], PyTree[Array]], tuple[Array, PyTree[Array]]]
"""Maps flat gradients and a state to the flat step and the next state."""

OwnDescent: TypeAlias = Callable[[Sequence[Any], core.ClosedJaxpr, int], Callable[..., Sequence[Array]] | None]
"""Maps the operands' shapes and dtypes, the traced flat update, and the number of weight leaves to a function of
the operands, or to None to use JAX operations. Operands are the leaves of weights, gradients and state."""

MIN_CODED = 2**17
"""Minimum number of weights for machine code. Fewer weights stay in a core's cache, where XLA is as fast."""

_descent = core.Primitive("flat_descent")
_descent.multiple_results = True


def descend_flat(
    update: FlatUpdate, weights: PyTree[Array], state: PyTree[Array], gradients: PyTree[Array]
) -> tuple[PyTree[Array], PyTree[Array]]:
    """Applies an optimiser step to the weights. Returns the new weights and the next optimiser state."""
    leaves, structure = jax.tree.flatten(weights)
    states, state_structure = jax.tree.flatten(state)
    flat = jax.eval_shape(_join, leaves)
    program = jax.make_jaxpr(lambda flat, *states: update(flat, jax.tree.unflatten(state_structure, states)))(
        flat, *states
    )
    operands = [*leaves, *jax.tree.leaves(gradients), *states]
    if program.consts or any(leaf.dtype != jnp.float32 for leaf in operands[: 2 * len(leaves)]):
        results = _in_parts(*operands, program=program, count=len(leaves))
    else:
        results = _descent.bind(*operands, program=program, count=len(leaves))
    moved, following = results[: len(leaves)], results[len(leaves) :]
    return jax.tree.unflatten(structure, moved), jax.tree.unflatten(state_structure, following)


def register_descent_code(compile_code: OwnDescent) -> None:
    """Registers machine code for optimiser steps in programs that this process compiles for CPUs."""

    def rule(context: mlir.LoweringRuleContext, *operands: ir.Value, program: Any, count: int) -> Sequence[Any]:
        is_exported = context.module_context.lowering_parameters.for_export
        is_small = program.out_avals[0].size < MIN_CODED
        compute = None if is_exported or is_small else compile_code(context.avals_in, program, count)
        compute = compute or partial(_in_parts, program=program, count=count)
        return mlir.lower_fun(compute, multiple_results=True)(context, *operands)

    mlir.register_lowering(_descent, rule, platform="cpu")


def _in_parts(*operands: Array, program: core.ClosedJaxpr, count: int) -> list[Array]:
    """Computes weights and state after a step, by JAX operations."""
    weights, gradients, states = operands[:count], operands[count : 2 * count], operands[2 * count :]
    step, *states = core.jaxpr_as_fun(program)(_join(gradients), *states)
    steps = jnp.split(step, _ends(weights))
    return [*(leaf + one.reshape(leaf.shape) for leaf, one in zip(weights, steps, strict=True)), *states]


def _join(leaves: Sequence[Array]) -> Float[Array, " numbers"]:
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])


def _ends(leaves: Sequence[Any]) -> list[int]:
    """Returns the end of each leaf in the flat vector, except for the last."""
    ends = []
    for leaf in leaves[:-1]:
        ends.append((ends[-1] if ends else 0) + leaf.size)
    return ends


@_descent.def_impl
def _compute(*operands: Array, **params: Any) -> list[Array]:
    return jax.jit(partial(_descent.bind, **params))(*operands)


@_descent.def_abstract_eval
def _shapes(*operands: Any, program: core.ClosedJaxpr, count: int) -> list[ShapedArray]:
    shapes = [(leaf.shape, leaf.dtype) for leaf in operands[:count]]
    states = [(aval.shape, aval.dtype) for aval in program.out_avals[1:]]
    return [ShapedArray(shape, dtype) for shape, dtype in [*shapes, *states]]


def _batch(operands: Sequence[Array], axes: Sequence[Any], **params: Any) -> tuple[list[Array], list[int]]:
    results = jax.vmap(partial(_in_parts, **params), in_axes=tuple(axes))(*operands)
    return results, [0] * len(results)


batching.primitive_batchers[_descent] = _batch
mlir.register_lowering(_descent, mlir.lower_fun(_in_parts, multiple_results=True))
