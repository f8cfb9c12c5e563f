"""The replay memory, against plain lists of all steps that were ever made.

Shape letters: `T` steps of a rollout, `E` environments.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill.dataflow import (
    ReplayRing,
    Trajectory,
    empty_experience,
    init_state,
    iterate,
)
from rollmill.dataflow.graph import Step
from rollmill.dataflow.lost_environments import end_running_episodes
from rollmill.dataflow.priorities import BLOCK
from rollmill.programs.compiled import lower

T, E = 5, 4
GAMMA = 0.9


def graph_of(*, capacity, batch_size=64, **options):
    env = rollmill.make("CartPole-v1")
    return rollmill.dqn(
        env,
        num_envs=E,
        num_steps=T,
        buffer_size=E * capacity,
        batch_size=batch_size,
        learning_starts=batch_size,
        gradient_steps=1,
        gamma=GAMMA,
        **options,
    )


class History:
    """All steps of all environments: observations are (environment, number of the step, final or not, life)."""

    def __init__(self, seed, *, truncated=0.2, terminated=0.2):
        self.rng = np.random.default_rng(seed)
        self.rates = truncated, terminated
        self.steps = [[] for _ in range(E)]
        self.life = 0

    def rollout(self):
        """The next steps of all environments, as a policy collects them."""
        for environment, steps in enumerate(self.steps):
            for _ in range(T):
                number = len(steps)
                truncated, terminated = (self.rng.random() < rate for rate in self.rates)
                steps.append(
                    {
                        "observation": [environment, number, 0, self.life],
                        "final": [environment, number, 1, self.life],
                        "action": int(self.rng.integers(2)),
                        "reward": float(self.rng.normal()),
                        "terminated": terminated,
                        "truncated": truncated,
                    }
                )
        newest = [steps[-T:] for steps in self.steps]
        column = lambda name, dtype: np.asarray([[newest[e][t][name] for e in range(E)] for t in range(T)], dtype)
        return Step(
            observation=column("observation", np.float32),
            action_mask=(),
            action=column("action", np.int32),
            extras=(),
            reward=column("reward", np.float32),
            terminated=column("terminated", bool),
            truncated=column("truncated", bool),
            final_observation=column("final", np.float32),
            final_memory=(),
            info={},
        )

    def oldest(self, environment, capacity):
        """The first step whose slot is still there: one slot a step, and one for each final observation."""
        steps, slots = self.steps[environment], []
        total = 0
        for step in steps:
            slots.append(total)
            total += 1 + (step["truncated"] and not step["terminated"])
        return next(n for n, slot in enumerate(slots) if slot >= total - capacity)

    def drawable(self, capacity):
        """Environments and numbers of all steps that may be drawn."""
        return {
            (environment, number)
            for environment, steps in enumerate(self.steps)
            for number in range(self.oldest(environment, capacity), len(steps) - 1)
        }

    def transition(self, environment, number, n_step):
        """Reward, discount and next observation of the transition that begins with a step."""
        steps = self.steps[environment]
        reward, factor = 0.0, 1.0
        for n in range(n_step):
            step = steps[number + n]
            reward += factor * step["reward"]
            factor *= GAMMA
            if step["terminated"]:
                return reward, 0.0, None
            if step["truncated"]:
                return reward, factor, step["final"]
            if n + 1 == n_step or number + n + 1 >= len(steps) - 1:
                return reward, factor, steps[number + n + 1]["observation"]
        raise AssertionError


def adding(graph):
    return jax.jit(lambda rings, steps: graph.replay.add(graph, rings, Trajectory(steps, (), (), ())))


def draw(graph, rings, key, index):
    return graph.replay.sample(graph, rings, None, key, index).minibatch.samples


def filled(graph, history, rollouts):
    index = jnp.arange(E, dtype=jnp.int32)
    rings, keep = empty_experience(graph, index), adding(graph)
    for _ in range(rollouts):
        rings = keep(rings, history.rollout())
    return rings


def drawn_from(graph, rings, *, times):
    index = jnp.arange(E, dtype=jnp.int32)
    each = jax.jit(lambda rings, key: draw(graph, rings, key, index))
    return [each(rings, jax.random.key(n)) for n in range(times)]


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("prioritised", [False, True])
@pytest.mark.parametrize("rollouts", [1, 3, 4, 13], ids=["fresh", "before the end", "at the end", "wrapped"])
@pytest.mark.slow_beyond(8)
def test_transitions_are_those_that_happened(rollouts, prioritised, n_step):
    capacity = 24
    graph = graph_of(capacity=capacity, n_step=n_step, prioritised=prioritised)
    history = History(rollouts)
    rings = filled(graph, history, rollouts)
    seen = set()
    for drawn in drawn_from(graph, rings, times=8):
        batch = jax.tree.map(np.asarray, drawn._replace(key=()))
        assert np.all(batch.weight > 0)
        for n in range(len(batch.reward)):
            environment, number = map(int, batch.observation[n][:2])
            seen.add((environment, number))
            reward, discount, following = history.transition(environment, number, n_step)
            assert batch.action[n] == history.steps[environment][number]["action"]
            np.testing.assert_allclose(batch.reward[n], reward, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(batch.discount[n], discount, rtol=1e-6)
            if following is not None:
                np.testing.assert_array_equal(batch.next_observation[n], following)
    assert seen == history.drawable(capacity), "all that is stored is drawn, and nothing else"


@pytest.mark.parametrize(
    ("rollouts", "prioritised"), [(1, False), (3, True), (13, False)], ids=["fresh", "before the end", "wrapped"]
)
def test_no_transition_leads_from_lost_environments_to_new_ones(rollouts, prioritised):
    capacity = 24
    graph, history = graph_of(capacity=capacity, n_step=3, prioritised=prioritised), History(rollouts)
    rings = jax.jit(partial(end_running_episodes, graph))(filled(graph, history, rollouts))
    again = jax.jit(partial(end_running_episodes, graph))(rings)
    jax.tree.map(np.testing.assert_array_equal, again, rings)  # those episodes have ended already
    running = [not (steps[-1]["terminated"] or steps[-1]["truncated"]) for steps in history.steps]
    assert any(running)
    for steps, runs in zip(history.steps, running, strict=True):
        if runs:
            unknown = steps.pop()
            if not (steps[-1]["terminated"] or steps[-1]["truncated"]):
                steps[-1] |= {"truncated": True, "final": unknown["observation"]}
    history.life = 1
    rings = adding(graph)(adding(graph)(rings, history.rollout()), history.rollout())
    seen = set()
    for drawn in drawn_from(graph, rings, times=8):
        batch = jax.tree.map(np.asarray, drawn._replace(key=()))
        for n in range(len(batch.reward)):
            environment, number = map(int, batch.observation[n][:2])
            seen.add((environment, number))
            reward, discount, following = history.transition(environment, number, 3)
            np.testing.assert_allclose(batch.reward[n], reward, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(batch.discount[n], discount, rtol=1e-6)
            if following is not None:
                np.testing.assert_array_equal(batch.next_observation[n], following)
                assert batch.next_observation[n][3] == batch.observation[n][3]
    assert seen == history.drawable(capacity)


def test_every_transition_is_drawn_equally_often():
    capacity = 16
    graph = graph_of(capacity=capacity, batch_size=32, num_shards=1)
    history = History(0, truncated=0.5)  # environments keep different numbers of steps
    rings = filled(graph, history, 6)
    counts = dict.fromkeys(history.drawable(capacity), 0)
    times = 400
    for drawn in drawn_from(graph, rings, times=times):
        for environment, number in np.asarray(drawn.observation)[:, :2].astype(int):
            counts[environment, number] += 1
    expected = times * 32 / len(counts)
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    assert statistic < len(counts) + 5 * np.sqrt(2 * len(counts))
    assert len({number for number in map(int, rings.steps - rings.oldest)}) > 1


@pytest.mark.slow
def test_prioritised_draws_follow_errors_and_weights_correct_for_them():
    capacity = 200  # more than one block of priorities
    assert capacity > BLOCK
    graph = graph_of(capacity=capacity, prioritised=True, priority_exponent=1.0, weight_exponent=1.0, num_shards=1)
    history = History(1)
    rings = filled(graph, history, 60)
    error = lambda observation: 0.1 + (observation[1] % 7)

    errors = lambda learner, minibatch: jax.vmap(error)(minibatch.samples.observation)
    store, index = graph.replay._replace(errors=errors), jnp.arange(E, dtype=jnp.int32)

    @jax.jit
    def again(rings, key):
        sample = store.sample(graph, rings, None, key, index)
        return store.update(graph, rings, None, sample), sample.minibatch.samples

    for n in range(400):
        rings, _ = again(rings, jax.random.key(n))
    drawable = history.drawable(capacity)
    priorities = {at: float(error(np.asarray([at[0], at[1], 0, 0], np.float32))) for at in drawable}
    known = np.asarray(rings.priorities.values).reshape(E, -1)
    for (environment, number), priority in priorities.items():
        np.testing.assert_allclose(known[environment, number % capacity], priority, rtol=1e-4)
    np.testing.assert_allclose(known.sum(), sum(priorities.values()), rtol=1e-4)
    np.testing.assert_allclose(rings.priorities.sums, rings.priorities.values.sum(axis=-1), rtol=1e-6)
    counts = dict.fromkeys(drawable, 0)
    total = sum(priorities.values())
    for n in range(400):
        _, drawn = again(rings, jax.random.key(1000 + n))
        places = np.asarray(drawn.observation)[:, :2].astype(int)
        for (environment, number), weight in zip(places, np.asarray(drawn.weight), strict=True):
            counts[environment, number] += 1
            probability = priorities[environment, number] / total
            np.testing.assert_allclose(weight, 1 / (len(drawable) * probability), rtol=1e-3)
    expected = {at: 400 * 64 * priority / total for at, priority in priorities.items()}
    statistic = sum((counts[at] - expected[at]) ** 2 / expected[at] for at in drawable)
    assert statistic < len(drawable) + 5 * np.sqrt(2 * len(drawable))


def test_new_steps_are_drawn_before_their_errors_are_known():
    capacity = 100
    graph = graph_of(capacity=capacity, prioritised=True, num_shards=1)
    rings = filled(graph, History(2, truncated=0), 3)
    values = np.asarray(rings.priorities.values).reshape(E, -1)
    assert (values[:, : 3 * T - 1] == 1).all() and (values[:, 3 * T - 1 :] == 0).all()


@pytest.mark.parametrize("prioritised", [False, True])
@pytest.mark.slow_beyond(1)
def test_halves_of_the_environments_draw_their_halves_of_a_minibatch(prioritised):
    graph = graph_of(capacity=24, prioritised=prioritised, num_shards=4)
    rings = filled(graph, History(3), 7)
    key, index, sample = jax.random.key(5), np.arange(E, dtype=np.int32), jax.jit(partial(draw, graph))
    whole = sample(rings, key, index)
    halves = [
        sample(jax.tree.map(lambda leaf: leaf[part], rings), key, index[part])  # noqa: B023
        for part in (slice(0, 2), slice(2, 4))
    ]
    for one, two, both in zip(*map(jax.tree.leaves, (*halves, whole)), strict=True):
        assert (jnp.concatenate([one, two]) == both).all()


def test_learning_waits_until_enough_is_stored():
    graph = graph_of(capacity=100, batch_size=32)
    history, index = History(4), jnp.arange(E, dtype=jnp.int32)
    rings, keep = empty_experience(graph, index), adding(graph)
    stored = []
    for _ in range(4):
        rings = keep(rings, history.rollout())
        stored.append(bool(graph.replay.is_ready(rings, graph.loops)))
    assert stored == [T * E * n >= 32 + E for n in range(1, 5)]
    assert 0 < float(graph.replay.fill_fraction(rings)) < 1


@pytest.mark.parametrize("prioritised", [False, True])
def test_numbers_that_fall_back_leave_every_row_where_it_is(prioritised):
    """The same training with numbers that begin near the limit, and so fall back in between, draws the same."""
    capacity = 24
    graph = graph_of(capacity=capacity, n_step=3, prioritised=prioritised)
    plain, late = (filled(graph, History(3), 4) for _ in range(2))
    # Multiples of the capacity, so that rows are the same; slots and steps fall back at different times.
    steps, slots = (n // capacity * capacity for n in (3 * 2**29 - 40, 3 * 2**29 - 48))
    words = late.outcomes.words
    moved = (words[..., -1].view(jnp.int32) + slots).view(jnp.uint32)
    late = eqx.tree_at(
        lambda ring: (ring.steps, ring.oldest, ring.slots, ring.outcomes.words),
        late,
        (late.steps + steps, late.oldest + steps, late.slots + slots, words.at[..., -1].set(moved)),
    )
    keep, index = adding(graph), jnp.arange(E, dtype=jnp.int32)
    draws = jax.jit(lambda rings, n: draw(graph, rings, jax.random.key(n), index))
    one, two, fell = History(9), History(9), set()
    for n in range(12):
        plain, late = keep(plain, one.rollout()), keep(late, two.rollout())
        fell |= {(bool((late.steps < 2**30).all()), bool((late.slots < 2**30).all()))}
        assert int(jnp.max(jnp.stack([late.steps, late.slots]))) < 3 * 2**29 + 2 * T
        assert (late.steps - late.oldest == plain.steps - plain.oldest).all()
        for mine, right in zip(*(jax.tree.leaves(draws(rings, n)) for rings in (late, plain)), strict=True):
            assert (mine == right).all()
    assert fell >= {(False, False), (True, True)} and bool(graph.replay.is_ready(late, graph.loops))


def test_observations_without_numbers_are_stored():
    """A bandit, whose observation has the shape (0,): rewards and ends are drawn as they happened."""

    def step(key, t, action, params):
        done = jnp.asarray(False)
        return rollmill.Timestep(jnp.zeros(0), t + 1, (t + 1).astype(jnp.float32), done, done, {})

    nothing, two = spaces.Box(-1, 1, (0,), np.float32), spaces.Discrete(2)
    env = rollmill.Environment("Bandit-v0", lambda key, params: (jnp.zeros(0), jnp.int32(0)), step, nothing, two)
    graph = rollmill.dqn(
        env,
        num_envs=2,
        num_steps=3,
        buffer_size=40,
        batch_size=8,
        learning_starts=12,
        total_timesteps=24,
        n_step=1,
    )
    state, once = init_state(graph, jax.random.key(0), jnp.arange(2)), jax.jit(partial(iterate, graph))
    for _ in range(3):
        state, metrics = once(state)
    drawn = draw(graph, state.rings, jax.random.key(0), jnp.arange(2))
    assert drawn.observation.shape == drawn.next_observation.shape == (8, 0)
    assert set(np.asarray(drawn.reward).tolist()) <= set(range(1, 9)) and float(metrics["epochs"]) == 1


def test_a_graph_without_a_replay_memory_has_no_rings():
    assert empty_experience(rollmill.ppo("CartPole-v1"), jnp.arange(2)) == ()
    assert isinstance(empty_experience(graph_of(capacity=24), jnp.arange(2)), ReplayRing)


@pytest.mark.slow
def test_the_ring_of_one_environment_is_not_copied():
    graph = rollmill.sac("Pendulum-v1", num_envs=1, gradient_steps=1, buffer_size=10_007, total_timesteps=20_000)
    lines = lower(graph).step.as_text().splitlines()
    assert any("10007" in line for line in lines)
    assert not [line for line in lines if " copy(" in line and "10007" in line.partition(" copy(")[0]]
