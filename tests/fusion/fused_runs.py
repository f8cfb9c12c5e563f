"""Runs functions of one environment both ways: under `vmap`, and lowered and evaluated."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from program_rules import check_program

from rollmill.fusion import LoweredFunction, evaluate, lower_function
from rollmill.fusion.lower.values import Const, KeyPair, PrologueOutput, RowArray, ScalarArray, is_output


def is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def split(value: ScalarArray | RowArray, array: Any) -> list[Any]:
    """An array [E, ...] as the inputs of a program."""
    block = array.shape[0]
    if is_key(array):
        data = jax.random.key_data(array).reshape(block, -1)
        return [data[:, n] for n in range(data.shape[1])]
    tail = (value.width,) if isinstance(value, RowArray) else ()
    flat = array.reshape(block, -1, *tail)
    return [flat[:, n] for n in range(flat.shape[1])]


def join(value: Any, found: list[Any], shared: list[Any], block: int) -> Any:
    """A value of one environment as an array [E, ...]; takes its outputs from the front of `found`."""
    if isinstance(value, Const | PrologueOutput):
        array = value.array if isinstance(value, Const) else shared[value.number]
        return jnp.broadcast_to(jnp.asarray(array), (block, *value.shape))
    pairs = bool(value.nodes.size) and isinstance(value.nodes.flat[0], KeyPair)
    count = value.nodes.size * (2 if pairs else 1)
    own = [found.pop(0) for _ in range(count)]
    if pairs:
        return jax.random.wrap_key_data(jnp.stack(own, axis=1).reshape(block, *value.shape, 2))
    return (
        jnp.stack(own, axis=1).reshape(block, *value.shape)
        if own
        else jnp.zeros((block, *value.shape), value.dtype)
    )


def by_program(
    function: Callable,
    each: Sequence[Any],
    uniform: Sequence[Any] = (),
    *,
    carried: bool = False,
    evaluate: Callable = evaluate,
) -> Any:
    """The results of a function's program for arguments [E, ...]; call it under `jax.jit`."""
    return of_lowered(lowered_for(function, each, uniform, carried=carried), each, uniform, evaluate=evaluate)


def lowered_for(
    function: Callable, each: Sequence[Any], uniform: Sequence[Any] = (), *, carried: bool = False
) -> LoweredFunction:
    """The program of a function of one environment, for arguments [E, ...]."""
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tuple(each))
    lowered = lower_function(function, one, uniform, carried=carried)
    check_program(lowered.program)
    return lowered


def of_lowered(
    lowered: LoweredFunction, each: Sequence[Any], uniform: Sequence[Any] = (), *, evaluate: Callable = evaluate
) -> Any:
    """The results of a program for arguments [E, ...]."""
    block = jax.tree.leaves(each)[0].shape[0]
    slots, shared = lowered.prologue(*uniform)
    kinds = jax.tree.leaves(lowered.inputs, is_leaf=is_output)
    arrays = jax.tree.leaves(tuple(each))
    inputs = [x for kind, array in zip(kinds, arrays, strict=True) for x in split(kind, array)]
    found = list(evaluate(lowered.program, inputs, slots, block=block))
    result = jax.tree.map(lambda value: join(value, found, shared, block), lowered.outputs, is_leaf=is_output)
    assert not found
    return result


def by_vmap(function: Callable, each: Sequence[Any], uniform: Sequence[Any] = ()) -> Any:
    return jax.vmap(lambda *own: function(*uniform, *own))(*each)


def both(
    function: Callable, each: Sequence[Any], uniform: Sequence[Any] = (), *, evaluate: Callable = evaluate
) -> tuple[Any, Any]:
    """By the program, and by `vmap`."""
    run = lambda uniform, each: by_program(function, each, uniform, evaluate=evaluate)
    fused = (jax.jit(run) if uniform else run)(uniform, each)
    return fused, jax.jit(lambda uniform, each: by_vmap(function, each, uniform))(uniform, each)


def assert_same(found: Any, expected: Any, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Integers, booleans and keys are equal, floats nearly."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        assert one.dtype == other.dtype and one.shape == other.shape, (
            name,
            one.dtype,
            other.dtype,
            one.shape,
            other.shape,
        )
        if is_key(one):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        if jnp.issubdtype(one.dtype, jnp.floating):
            one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
            np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=name)
        else:
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=name)
