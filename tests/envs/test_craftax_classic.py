"""CraftaxClassic-v0: the rules of the package craftax, its worlds, observations and options."""

import dataclasses
import json

import craftax_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill import envs
from rollmill.dataflow import fingerprint
from rollmill.envs.craftax_classic import environment, world
from rollmill.envs.craftax_classic.blocks import Block
from rollmill.envs.craftax_classic.state import CraftaxParams, replace
from wordings import raises

NAME = "CraftaxClassic-v0"
EPISODES, STEPS = 200, 500
"""Size of the slow comparison with the package. With 500 and 1,000, it takes five minutes on two cores."""


@pytest.mark.parametrize("platform", ["cpu", "default"])
def test_episodes_are_those_that_the_package_recorded(platform, monkeypatch):
    """With the operations for CPUs, and with those for other platforms."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *inputs, **functions: functions[platform](*inputs))
    states = reference.worlds(reference.EPISODES, 0)
    last, sums, _ = reference.play(reference.advance_ours, states, jax.random.key(1), reference.STEPS)
    recorded, played = json.loads(reference.RECORDED.read_text()), reference.summary(last, sums)
    assert set(played) == set(recorded)
    assert [name for name in recorded if played[name] != recorded[name]] == []


def test_a_run_is_the_same_program_on_every_platform(monkeypatch):
    digests = set()
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        digests.add(fingerprint(rollmill.ppo(NAME, num_envs=4, num_steps=4, total_timesteps=16)))
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_steps_equal_those_of_the_package(seed):
    """In random worlds, with the same random numbers. All achievements occur, and many deaths."""
    pytest.importorskip("craftax", reason="pip install 'rollmill[craftax]'")
    package, states = reference.Package(), reference.worlds(EPISODES, seed)
    both = (states, jax.vmap(package.begin)(states))
    keys = jax.random.split(jax.random.key(1), EPISODES)
    after, _ = jax.eval_shape(package.advance_both, keys, both, jnp.zeros(EPISODES, int))
    both = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), both, after)
    _, counts, deaths = reference.play(package.advance_both, both, jax.random.key(seed), STEPS)
    achieved = [counts.pop(f"achieved {i}") for i in range(22)]
    assert {name: int(count) for name, count in counts.items() if count} == {}
    assert all(achieved) and deaths > EPISODES


@pytest.mark.slow
def test_worlds_equal_those_of_the_package():
    pytest.importorskip("craftax", reason="pip install 'rollmill[craftax]'")
    world_gen = pytest.importorskip("craftax.craftax_classic.world_gen")
    package = reference.Package()

    @jax.jit
    def theirs(key):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return world_gen.generate_world(key, package.params, package.env.static_env_params).map

    ours = jax.jit(lambda key: world.generate(key, always_diamond=True))
    for seed in range(20):
        key = jax.random.key(seed)
        np.testing.assert_array_equal(ours(key), theirs(key))


@pytest.fixture(scope="module")
def first():
    env = envs.make(NAME)
    return env, *jax.jit(env.reset)(jax.random.key(0), env.params)


def test_a_world_has_what_an_episode_needs(first):
    _, _, state = first
    cells = np.asarray(state.inner.cells)
    assert cells[32, 32] == Block.GRASS
    counts = {block: int(np.sum(cells == block)) for block in Block}
    assert min(counts[block] for block in (Block.GRASS, Block.TREE, Block.WATER, Block.STONE, Block.COAL)) > 10
    assert counts[Block.DIAMOND] >= 1
    assert counts[Block.CRAFTING_TABLE] == counts[Block.FURNACE] == counts[Block.PLANT] == 0


def test_without_the_option_a_diamond_is_left_to_chance():
    generated = jax.jit(jax.vmap(lambda key: world.generate(key, always_diamond=False)))
    counts = np.sum(np.asarray(generated(jax.random.split(jax.random.key(0), 20))) == Block.DIAMOND, axis=(1, 2))
    assert counts.min() == 0 < counts.max()


def test_the_flat_observation_has_the_same_content(first):
    _, seen, state = first
    flat = environment.observe_flat(state.inner, CraftaxParams())
    planes = flat[:1323].reshape(7, 9, 21)
    np.testing.assert_array_equal(jnp.argmax(planes[..., :17], axis=-1), seen["blocks"])
    np.testing.assert_array_equal(planes[..., 17:], seen["creatures"])
    np.testing.assert_allclose(flat[1323:], seen["self"], rtol=1e-6)
    assert envs.make(NAME, flat=True).observation_space.shape == flat.shape


def test_cells_beyond_the_map_are_out_of_bounds_in_a_view(first):
    _, _, state = first
    corner = replace(state.inner, position=jnp.array([0, 63], jnp.int32))
    seen = np.asarray(environment.observe(corner, CraftaxParams())["blocks"])
    assert (seen[:3] == Block.OUT_OF_BOUNDS).all() and (seen[:, 5:] == Block.OUT_OF_BOUNDS).all()
    np.testing.assert_array_equal(seen[3:, :5], corner.cells[:4, 59:])


def test_death_terminates_and_the_time_limit_truncates(first):
    env, _, state = first
    step = jax.jit(env.step)
    for inner, elapsed, ends in (
        (state.inner, 0, (False, False)),
        (state.inner, 9_999, (False, True)),
        (replace(state.inner, health=jnp.zeros((), jnp.int32)), 0, (True, False)),
    ):
        before = dataclasses.replace(state, inner=inner, elapsed=jnp.int32(elapsed))
        after = step(jax.random.key(1), before, jnp.int32(0), env.params)
        assert (bool(after.terminated), bool(after.truncated)) == ends


def test_worlds_are_made_in_groups_by_default():
    assert envs.make(NAME).reset_ratio == 64
    assert envs.make(NAME, reset_ratio=1).reset_ratio == 1
    with raises("reset-ratio-has-to-be", "reset_ratio=0"):
        envs.make(NAME, reset_ratio=0)
