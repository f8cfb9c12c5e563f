"""Wide layers, which programs for GPUs compute in another form, are fused in that form, too."""

import jax
import jax.numpy as jnp
import numpy as np
from drawn_compare import WAYS, results
from fused_runs import lowered_for
from gymnasium import spaces

import rollmill
from rollmill.fusion import lower_rollout
from rollmill.lowerings.column_major import column_major

SIZE = 24
"""Rows and columns of an image, from which a convolutional network computes 1,600 features."""

SHAPE = (SIZE, SIZE, 1)


def scanner() -> rollmill.Environment:
    """A line that moves down an image."""

    def seen(row):
        return jnp.broadcast_to(jnp.where(jnp.arange(SIZE) == row, 200, 0).astype(jnp.uint8)[:, None, None], SHAPE)

    def reset(key, params):
        row = jax.random.randint(key, (), 0, SIZE)
        return seen(row), row

    def step(key, row, action, params):
        row = (row + action) % SIZE
        return rollmill.Timestep(seen(row), row, row.astype(jnp.float32), row == 0, jnp.zeros((), bool), {})

    return rollmill.Environment("Scanner", reset, step, spaces.Box(0, 255, SHAPE, np.uint8), spaces.Discrete(3))


def test_a_layout_changes_nothing_in_a_kernel():
    x = jnp.linspace(-1.0, 1.0, 8)
    lowered = lowered_for(lambda x: 2 * column_major(x * jnp.arange(4, dtype=jnp.float32)), (x,))
    for way in WAYS.values():
        (found,) = results(way, lowered, (x,))
        np.testing.assert_allclose(found, 2 * np.asarray(x)[:, None] * np.arange(4), rtol=1e-6)


def test_a_convolutional_network_with_wide_features_is_fused_as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *inputs, cuda=None, default: (cuda or default)(*inputs)
    )
    network = rollmill.NetworkConfig(torso="cnn")
    lower_rollout(rollmill.ppo(scanner(), num_envs=8, num_steps=4, num_minibatches=1, network=network))
