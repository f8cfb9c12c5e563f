"""Steps of optimisers as machine code: those of Optax, and which ones are left to XLA."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rollmill.algorithms.optimisers import clipped_descent, descend
from rollmill.lowerings.flat_descent import register_descent_code
from rollmill.lowerings.threefry import THREEFRY_CALL
from rollmill.programs import own_descent
from rollmill.programs.program_store import calls_of

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="machine code of CPUs")

SHAPES = {"kernel": (3, 3, 8, 16), "layer": (300, 450), "bias": (450,), "odd": (7, 5), "one": (1,)}
"""Leaves that are many vectors long, few and a rest, and shorter than one."""


@pytest.fixture(autouse=True)
def own_code():
    register_descent_code(own_descent)


def drawn(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES, scale: float = 1.0) -> dict[str, jax.Array]:
    draws = np.random.default_rng(seed)
    return {name: jnp.asarray(scale * draws.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def by_optax(optimiser: Any, weights: Any, state: Any, gradients: Any, share: float) -> Any:
    """As Optax computes it, from the optimiser's own update."""
    with jax.numpy_dtype_promotion("standard"):
        steps, state = optimiser.update(gradients, state, weights, share=share)
    return optax.apply_updates(weights, steps), state


OPTIMISERS = {
    "adam": optax.scale_by_adam(eps=1e-5),
    "a root of squares": optax.scale_by_rms(),
    "a corrected root of squares": optax.scale_by_rms(bias_correction=True),
    "momentum": optax.trace(0.9),
    "none": optax.identity(),
}


@pytest.mark.parametrize("scaling", OPTIMISERS.values(), ids=OPTIMISERS)
@pytest.mark.parametrize("scale", [1.0, 1e-5], ids=["clipped", "unclipped"])
def test_steps_are_those_of_optax(scaling: Any, scale: float) -> None:
    optimiser = clipped_descent(scaling, learning_rate=0.01, max_grad_norm=0.5, anneal_over=100)
    weights, state = drawn(0), optimiser.init(drawn(0))
    step = jax.jit(lambda *given: descend(optimiser, *given, share=0.5))
    reference = jax.jit(lambda *given: by_optax(optimiser, *given, share=0.5))
    assert "@rollmill_" in step.lower(weights, state, weights).as_text()
    expected, expected_state = weights, state
    for number in range(3):
        gradients = drawn(number + 1, scale=scale)
        weights, state = step(weights, state, gradients)
        expected, expected_state = reference(expected, expected_state, gradients)
    for found, wanted in zip(
        jax.tree.leaves((weights, state)), jax.tree.leaves((expected, expected_state)), strict=True
    ):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-7)


def test_a_gradient_that_is_not_finite_reaches_the_weights() -> None:
    optimiser = clipped_descent(optax.scale_by_adam(), learning_rate=0.01, max_grad_norm=0.5)
    weights = drawn(0)
    gradients = {**drawn(1), "one": jnp.full(1, jnp.nan)}
    moved, _ = jax.jit(lambda *given: descend(optimiser, *given))(weights, optimiser.init(weights), gradients)
    assert all(np.isnan(leaf).all() for leaf in moved.values())  # by the norm of all


def test_seeds_side_by_side_have_the_steps_of_each() -> None:
    optimiser = clipped_descent(optax.scale_by_adam(), learning_rate=0.01, max_grad_norm=0.5)
    weights, gradients = ([drawn(seed) for seed in seeds] for seeds in ((0, 1), (2, 3)))
    states = [optimiser.init(each) for each in weights]
    stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *each) for each in (weights, states, gradients)]
    together = jax.jit(jax.vmap(lambda *given: descend(optimiser, *given)))(*stacked)
    for n in range(2):
        alone = jax.jit(lambda *given: descend(optimiser, *given))(weights[n], states[n], gradients[n])
        for one, all_of_it in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_allclose(all_of_it[n], one, rtol=2e-5, atol=1e-7)


LEFT_TO_XLA = {
    "few numbers": (optax.scale_by_adam(), {"layer": (100, 100)}),
    "noise": (optax.add_noise(0.1, 0.5, 0), SHAPES),
}


@pytest.mark.parametrize("case", LEFT_TO_XLA.values(), ids=LEFT_TO_XLA)
def test_steps_without_machine_code_are_xlas(case: Any) -> None:
    scaling, shapes = case
    optimiser = clipped_descent(scaling, learning_rate=0.01, max_grad_norm=0.5)
    weights, gradients = drawn(0, shapes), drawn(1, shapes)
    state = optimiser.init(weights)
    step = jax.jit(lambda *given: descend(optimiser, *given))
    assert calls_of(step.lower(weights, state, gradients).as_text()) <= {THREEFRY_CALL}
    found, _ = step(weights, state, gradients)
    expected, _ = jax.jit(lambda *given: by_optax(optimiser, *given, share=1.0))(weights, state, gradients)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), found, expected)
