"""An off-policy algorithm, a game and a search take one file each; the rest of the package knows none of them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from algorithms.own_nim import MOST, Heap, nim, observe
from algorithms.own_search import with_two_plies
from algorithms.own_soft_q import soft_q
from rollmill.policies.matches import match_runs
from rollmill.policies.policy import LoadedRun
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from rollmill.tree_search.positions import Position

SHARED = rollmill.NetworkConfig(hidden_sizes=(32,), activation="relu", shared_torso=True)


def trained(graph, **options):
    program = lower(graph, **options)
    for window in dispatch_ahead(program, program.start(), first=0, until=graph.loops.iterations):
        after = window.after
    return after.learner


def agreeing(iterations):
    """Soft Q-learning where observation and action have to agree: values are 1 and -1."""
    return soft_q(
        "Probe-ActionObservation-v0",
        num_envs=8,
        buffer_size=1024,
        batch_size=64,
        learning_starts=128,
        total_timesteps=8 * iterations,
        learning_rate=5e-3,
        network=rollmill.NetworkConfig(hidden_sizes=(32,)),
    )


def test_the_page_shows_the_file_and_it_is_short():
    here = Path(__file__).parent
    text, page = (here / "own_soft_q.py").read_text(), (here.parents[1] / "docs/extending.md").read_text()
    assert text in page and text.count("\n") <= 120


@pytest.mark.slow
def test_the_algorithm_is_the_same_on_two_devices():
    one, two = (trained(agreeing(24), devices=jax.devices()[:n]).network for n in (1, 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), one, two)


def test_the_algorithm_draws_actions_by_their_soft_values():
    graph = agreeing(800)
    weights = graph.weights(trained(graph))
    shares = []
    for observed in (1.0, -1.0):
        observation = jnp.full(graph.observation_space.shape, observed, jnp.float32)
        keys = jax.random.split(jax.random.key(0), 4_000)
        actions = jax.jit(jax.vmap(lambda key, o=observation: graph.policy(weights, key, (), o, ()).action))(keys)
        shares.append(float(jnp.mean(actions == graph.greedy(weights, keys[0], (), observation, ()).action)))
    assert shares == pytest.approx([1 / (1 + np.exp(-2 / 0.5))] * 2, abs=0.02)


@pytest.mark.slow
def test_the_game_keeps_the_contract_and_the_search_learns_to_win_it():
    """Who leaves a multiple of four wins, whatever the opponent does; two plies alone do not see that far."""
    env = nim()
    rollmill.check_environment(env)
    sizes = {"num_envs": 32, "num_steps": 16, "num_minibatches": 4, "learning_rate": 5e-3, "network": SHARED}
    graph = with_two_plies(rollmill.alphazero(env, total_timesteps=32 * 16 * 60, **sizes))
    weights = graph.weights(trained(graph))

    def move(left):
        state = Heap(left, jnp.int32(0))
        return graph.greedy(
            weights, jax.random.key(0), (), observe(state), Position(jnp.arange(3) < left, state, ())
        )

    lefts = [left for left in range(1, MOST + 1) if left % 4]
    actions = jax.jit(jax.vmap(lambda left: move(left).action))(jnp.asarray(lefts, jnp.int32))
    assert [int(action) + 1 for action in actions] == [left % 4 for left in lefts]
    found = match_runs(
        LoadedRun(graph._replace(rebuild_for=lambda env: graph), weights, 60), "lookahead-2", env=env, games=40
    )
    assert found.score > 0.6
