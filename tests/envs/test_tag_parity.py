"""Tag beside WarpDrive's NumPy environments, step by step: only the first state is copied.

Tolerances: cells, rewards and ends are exact, but for the rounding of float32 against float64. In TagContinuous,
directions, speeds and accelerations agree to 1e-6. Places are sums of sines and cosines, which NumPy and
XLA round differently: they agree to 2e-5 after 500 steps, and observations, which are in units of the diagonal,
to 2e-6. Where a decision hangs on less than that in the reference's own history, it may fall either way. These
close calls are found there, not where the two differ; everything else must agree, and there must be few.

Shape letters: `T` steps, `A` agents, `G` taggers, `R` runners.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tag_reference

from rollmill import envs
from rollmill.envs.tag_continuous import TagContinuousState, observe
from rollmill.envs.tag_gridworld import TagGridWorldState

PLACE = 2e-5
"""Tolerance of places, and what makes a call close."""


def run(env, params, states, actions):
    """Observations, rewards, ends and states of `E` episodes under actions `[T, E, A, ...]`, agents joined."""
    count = env.agents[0].count
    lifted = jax.vmap(env.step, in_axes=(None, 0, {"tagger": 0, "runner": 0}, None))
    joined = lambda kinds: jnp.concatenate([kinds["tagger"], kinds["runner"]], axis=1)

    def one(state, choices):
        split = {"tagger": choices[:, :count], "runner": choices[:, count:]}
        timestep = lifted(jax.random.key(0), state, split, params)
        assert not timestep.info
        done = timestep.terminated | timestep.truncated
        return timestep.state, (joined(timestep.observation), joined(timestep.reward), done, timestep.state)

    go = jax.jit(lambda states, actions: jax.lax.scan(one, states, actions)[1])
    return jax.device_get(go(states, jnp.asarray(actions, jnp.int32)))


def stacked(leaves):
    return jax.tree.map(lambda *rows: jnp.stack(rows), *leaves)


# --- TagGridWorld -------------------------------------------------------------------------------------


def play_grids(num_seeds, *, full, length, max_steps):
    """The same episodes in both, and all that ours returned."""
    rng = np.random.default_rng(0)
    size = 5
    actions = rng.integers(5, size=(max_steps, num_seeds, size))
    rules = {"wall_hit_penalty": 0.2, "tag_reward_for_tagger": 7.0, "tag_penalty_for_runner": 3.0}
    rules |= {"step_cost_for_tagger": 0.05, "grid_length": length}
    references, starts = [], []
    for seed in range(num_seeds):
        places = rng.integers(0, length + 1, size=(2, size))
        env = tag_reference.grid_world(
            num_taggers=4,
            episode_length=max_steps,
            starting_location_x=places[0],
            starting_location_y=places[1],
            use_full_observation=full,
            **rules,
        )
        references.append(tag_reference.play(env, actions[:, seed]))
        first = (jnp.asarray(references[-1].states[name][0], jnp.int32) for name in ("loc_x", "loc_y"))
        starts.append(TagGridWorldState(*first, jnp.ones(size, bool), jnp.int32(0)))
    env = envs.make("TagGridWorld-v0", max_steps=max_steps, use_full_observation=full)
    params = dataclasses.replace(env.params, **rules)
    return references, run(env, params, stacked(starts), actions)


@pytest.mark.parametrize(("full", "length"), [(True, 6), (False, 6), (True, 100), (False, 25)])
def test_grid_worlds_agree_over_a_hundred_episodes(full, length):
    references, (seen, paid, done, states) = play_grids(100, full=full, length=length, max_steps=60)
    for seed, reference in enumerate(references):
        t = slice(0, reference.length)
        np.testing.assert_array_equal(states.x[t, seed], reference.states["loc_x"][1:])
        np.testing.assert_array_equal(states.y[t, seed], reference.states["loc_y"][1:])
        np.testing.assert_array_equal(done[t, seed], reference.done)
        np.testing.assert_allclose(paid[t, seed], reference.reward, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(seen[t, seed], reference.observation[1:], rtol=0, atol=1e-7)
    lengths = [reference.length for reference in references]
    assert length > 6 or np.mean(np.array(lengths) < 60) > 0.5, "hardly any episode had a tag"


@pytest.mark.parametrize("full", [True, False])
def test_grid_worlds_begin_alike(full):
    theirs = tag_reference.grid_world(num_taggers=4, grid_length=9, use_full_observation=full).reset()
    env = envs.make("TagGridWorld-v0", use_full_observation=full)
    params = dataclasses.replace(env.params, grid_length=9)
    observation, _ = jax.jit(env.reset)(jax.random.key(0), params)
    rows = np.concatenate([observation["tagger"], observation["runner"]])
    np.testing.assert_allclose(rows, [theirs[agent] for agent in range(5)], rtol=0, atol=1e-7)


# --- TagContinuous ------------------------------------------------------------------------------------

SMALL = {
    "num_taggers": 3,
    "num_runners": 7,
    "max_steps": 100,
    "num_acceleration_levels": 3,
    "num_turn_levels": 5,
    "num_other_agents_observed": 4,
}
DENSE = {"grid_length": 6.0, "tagging_distance": 0.1, "edge_hit_penalty": -0.5}
PAID = {"tag_reward_for_tagger": 10.0, "tag_penalty_for_runner": -10.0, "end_of_game_reward_for_runner": 1.0}
STEPS = {"step_penalty_for_tagger": -0.25, "step_reward_for_runner": 0.125}
SKILLS = {"skill_level_tagger": 1.25, "skill_level_runner": 0.75, "max_speed": 0.8}


def play_continuous(seeds, options, rules):
    """The same episodes in both, and all that ours returned."""
    env = envs.make("TagContinuous-v0", **options)
    params = dataclasses.replace(env.params, **rules)
    same = {name: value for name, value in options.items() if name != "max_steps"}
    counts = same.pop("num_taggers", 10), same.pop("num_runners", 100)
    same = {"num_acceleration_levels": 20, "num_turn_levels": 20, "use_full_observation": False} | same
    same = {"num_other_agents_observed": 10, "episode_length": options["max_steps"], **same, **rules}
    bounds = {"max_acceleration": 0.1, "min_acceleration": -0.1, "max_turn": 2.356, "min_turn": -2.356}
    choices = (same["num_acceleration_levels"] + 1, same["num_turn_levels"] + 1)
    shape = (options["max_steps"], len(seeds), sum(counts), 2)
    actions = np.random.default_rng(seeds[0]).integers(choices, size=shape)
    references = []
    for seed, own in zip(seeds, actions.swapaxes(0, 1), strict=True):
        references.append(tag_reference.play(tag_reference.continuous(seed, *counts, **same, **bounds), own))
    return env, params, references, run(env, params, stacked(map(first_state, references)), actions)


def first_state(reference):
    names = ("loc_x", "loc_y", "speed", "direction", "acceleration")
    first = [jnp.asarray(reference.states[name][0]) for name in names]
    return TagContinuousState(*first, jnp.ones(first[0].size, bool), jnp.int32(0))


class CloseCalls:
    """Events of a reference that hang on rounding: `tags` of `[T]` steps, `edges` of agents, `[T, A]`."""

    def __init__(self, reference, num_taggers, params):
        states = {name: np.asarray(values, np.float64) for name, values in reference.states.items()}
        self.at = np.stack([states["loc_x"], states["loc_y"]], axis=-1)
        self.in_game = reference.states["still_in_the_game"].astype(bool)
        apart = self.at[1:, :num_taggers, None] - self.at[1:, None, num_taggers:]
        distance = np.sort(np.linalg.norm(apart, axis=-1), axis=1)
        reach = float(params.tagging_distance) * float(params.grid_length)
        playing = self.in_game[:-1, num_taggers:]
        unsure = np.abs(distance[:, 0] - reach) < PLACE
        rivals = (distance[:, 0] < reach) & (np.diff(distance[:, :2], axis=1)[:, 0] < PLACE)
        self.tags = ((unsure | rivals) & playing).any(axis=1)
        heading = np.stack([np.cos(states["direction"]), np.sin(states["direction"])], axis=-1)
        target = self.at[:-1] + states["speed"][1:, :, None] * heading[1:]
        past = np.minimum(np.abs(target), np.abs(target - float(params.grid_length)))
        self.edges = ((past > 1e-7) & (past < PLACE)).any(axis=-1)

    def neighbours(self, count):
        """`[T, A]`: of which agents two of the nearest, or the last and the next one, are equally far."""
        close = []
        for t in range(1, len(self.at)):
            distance = np.linalg.norm(self.at[t][:, None] - self.at[t][None], axis=-1)
            distance[:, ~self.in_game[t - 1]] = np.inf
            np.fill_diagonal(distance, np.inf)
            least = np.sort(distance, axis=1)[:, : count + 1]
            gaps = np.diff(np.where(np.isfinite(least), least, 1e9 * np.arange(1, least.shape[1] + 1)), axis=1)
            close.append(((gaps > 0) & (gaps < PLACE)).any(axis=1))
        return np.array(close)


def check_continuous(seeds, options, rules):
    """Compares all episodes; returns the parts of the steps and observations that were no close calls."""
    env, params, references, (seen, paid, done, states) = play_continuous(seeds, options, rules)
    count, steps, rows = env.agents[0].count, [], []
    for episode, reference in enumerate(references):
        calls = CloseCalls(reference, count, params)
        length = int(np.argmax(calls.tags)) if calls.tags.any() else reference.length
        t = slice(0, length)
        ours = jax.tree.map(lambda leaf, t=t, episode=episode: leaf[t, episode], (seen, paid, done, states))
        check_episode(ours, reference, calls, length)
        rows.append(check_observations(env, ours[0], reference, calls, length))
        steps.append(length / reference.length)
    return np.mean(steps), np.mean(rows)


def check_episode(ours, reference, calls, length):
    _, paid, done, states = ours
    theirs = {name: values[1 : length + 1] for name, values in reference.states.items()}
    np.testing.assert_allclose(states.x, theirs["loc_x"], rtol=0, atol=PLACE)
    np.testing.assert_allclose(states.y, theirs["loc_y"], rtol=0, atol=PLACE)
    for name in ("speed", "direction", "acceleration"):
        np.testing.assert_allclose(getattr(states, name), theirs[name], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(states.in_game, theirs["still_in_the_game"].astype(bool))
    np.testing.assert_array_equal(done, reference.done[:length])
    sure = ~calls.edges[:length]
    np.testing.assert_allclose(paid[sure], reference.reward[:length][sure], rtol=1e-6, atol=1e-6)


def check_observations(env, seen, reference, calls, length):
    theirs = reference.observation[1 : length + 1]
    rules = env.step.args[0]
    if rules.use_full_observation:
        np.testing.assert_allclose(seen, theirs, rtol=0, atol=2e-6)
        return 1.0
    close = calls.neighbours(rules.num_other_agents_observed)[:length]
    np.testing.assert_allclose(seen[~close], theirs[~close], rtol=0, atol=2e-6)
    # Where two are equally far, another one may be seen, at the same distance.
    far = [
        np.linalg.norm(row[..., :-1].reshape(*row.shape[:2], 7, -1)[..., :2, :], axis=-2) for row in (seen, theirs)
    ]
    np.testing.assert_allclose(far[0], far[1], rtol=0, atol=2e-6)
    return 1 - close.mean()


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        (SMALL, DENSE | PAID | STEPS | SKILLS),
        (SMALL | {"use_full_observation": True, "max_steps": 12}, DENSE | PAID | STEPS),
        (SMALL | {"runner_exits_game_after_tagged": False, "max_steps": 50}, DENSE | PAID | STEPS),
        (SMALL | {"num_taggers": 2, "num_runners": 4, "num_other_agents_observed": 5}, DENSE | PAID),
    ],
    ids=["skills", "full observation, ended by the clock", "runners stay", "few others left"],
)
@pytest.mark.slow
def test_small_games_agree_over_a_hundred_episodes(options, rules):
    steps, rows = check_continuous(range(100), options, rules)
    assert steps > 0.98 and rows > 0.999


@pytest.mark.slow
def test_games_of_the_published_size_agree():
    steps, rows = check_continuous([0], {"max_steps": 500}, PAID | {"grid_length": 20.0, "tagging_distance": 0.02})
    assert steps > 0.9 and rows > 0.999


@pytest.mark.slow
def test_many_games_of_the_published_size_agree():
    rules = PAID | {"grid_length": 20.0, "tagging_distance": 0.02, "edge_hit_penalty": -0.1}
    steps, rows = check_continuous(range(10), {"max_steps": 500}, rules)
    assert steps > 0.9 and rows > 0.999


def test_first_observations_agree():
    env, params, references, _ = play_continuous([3], SMALL | {"max_steps": 1}, DENSE)
    look = jax.jit(lambda state, params: observe(env.step.args[0], state, params))
    seen = look(first_state(references[0]), params)
    rows = np.concatenate([seen["tagger"], seen["runner"]])
    np.testing.assert_allclose(rows, references[0].observation[0], rtol=0, atol=2e-6)
