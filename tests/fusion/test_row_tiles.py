"""Programs whose wide rows are divided into tiles compute what they did before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_rules import check_node

import rollmill
from rollmill.core.errors import CannotFuse
from rollmill.fusion import evaluate, lower_function, lower_gradients, lower_rollout
from rollmill.fusion.kernels.sums import mean_of
from rollmill.fusion.kernels.wide_gradients import OfStored, wide_gradients
from rollmill.fusion.opt.row_tiles import divide_into_tiles

BLOCK, TILE = 5, 16
NETWORKS = {
    "two layers": rollmill.NetworkConfig(hidden_sizes=(48, 40)),
    "normalised": rollmill.NetworkConfig(hidden_sizes=(37, 24), layer_norm=True, shared_torso=True),
    "residual": rollmill.NetworkConfig(hidden_sizes=(24, 24), residual=True),
}


def lowered_steps(network):
    sizes = {"num_envs": 8, "num_steps": 4, "total_timesteps": 32, "num_minibatches": 2}
    graph = rollmill.ppo("Pendulum-v1", network=NETWORKS[network], **sizes)
    return lower_rollout(graph), lower_gradients(graph)


def made_up(node, random, shape):
    if node.dtype.kind == "f":
        return jnp.asarray(random.normal(size=shape) * 0.3, node.dtype)
    return jnp.asarray(random.integers(0, 2, shape), node.dtype)


def example_of(step):
    random = np.random.default_rng(0)
    shape = lambda node: (BLOCK,) if node.width is None else (BLOCK, node.width)
    inputs = [made_up(node, random, shape(node)) for node in step.program.inputs]
    return inputs, [made_up(array, random, array.shape) for array in step.prologue.shapes.slots]


def joined(outputs, places):
    parts = [outputs[place] for place in places]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


@pytest.mark.parametrize("network", NETWORKS)
def test_tiles_side_by_side_are_the_rows(network):
    for step in lowered_steps(network):
        inputs, uniforms = example_of(step)
        found = divide_into_tiles(step.program, TILE)
        for node in found.program.nodes():
            check_node(node, found.program)
        assert max(node.width or 0 for node in found.program.nodes()) == TILE
        compute = lambda program: evaluate(program, inputs, uniforms, block=BLOCK, precision="highest")  # noqa: B023
        mine, right = compute(found.program), compute(step.program)
        for places, output in zip(found.outputs, right, strict=True):
            np.testing.assert_allclose(joined(mine, places), output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_of_large_matrices_are_products_of_stored_rows(network, monkeypatch):
    monkeypatch.setattr("rollmill.fusion.kernels.wide_gradients.MAX_SUMMED", 400)
    _, step = lowered_steps(network)
    wide, uniforms = wide_gradients(step, TILE), step.prologue.shapes
    inputs, slots = example_of(step)
    compute = lambda program: evaluate(program, inputs, slots, block=BLOCK, precision="highest")
    mean = lambda sums, outputs: [
        mean_of(each, outputs, uniforms, BLOCK, "highest").reshape(-1) for each in sums if each.is_computed
    ]
    outputs = compute(wide.step.program)
    nodes = dict(zip(wide.step.program.outputs, outputs, strict=True))
    rows = [jnp.concatenate([nodes[tile] for tile in row], axis=-1) for row in wide.stored]
    mine = wide.assembled(jnp.concatenate(mean(wide.step.sums, outputs)), rows, "float32")
    right = jnp.concatenate(mean(step.sums, compute(step.program)))
    np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-5)
    assert any(isinstance(result, OfStored) and result.pairs for result in wide.results)
    assert any(isinstance(result, OfStored) and result.row is not None for result in wide.results)


def test_extremes_and_columns_of_wide_rows():
    def function(weights, x, y):
        row = jnp.tanh(x * weights[0] + y)
        return row.max(), row.min(), row.sum(), row[39], jnp.where(row > 0, row, weights[1]) @ weights.T

    weights = jnp.linspace(-2.0, 1.5, 80).reshape(2, 40)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    lowered = lower_function(function, (number, number), (weights,))
    found = divide_into_tiles(lowered.program, TILE)
    each = [jnp.linspace(-1.0, 1.0, BLOCK), jnp.linspace(0.3, 0.2, BLOCK)]
    slots = lowered.prologue(weights).slots
    mine = evaluate(found.program, each, slots, block=BLOCK, precision="highest")
    for one, other in zip(
        mine, evaluate(lowered.program, each, slots, block=BLOCK, precision="highest"), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_wide_rows_of_samples_are_refused():
    network = rollmill.NetworkConfig(torso="gru", hidden_sizes=(40,), recurrent_size=40)
    graph = rollmill.ppo("CartPole-v1", network=network, num_envs=8, num_steps=4, total_timesteps=32)
    assert divide_into_tiles(lower_rollout(graph).program, TILE) is None
    with pytest.raises(CannotFuse, match="tiles of 16 columns"):
        wide_gradients(lower_gradients(graph), TILE)
