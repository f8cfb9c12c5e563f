"""VDN and QMIX: losses written again in NumPy, the values of the paper's game, agents that go out, and refusals.

Shape letters: `A` agents, `N` transitions.
"""

from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from losses_by_hand import assert_close, disturbed_network
from numpy_networks import assert_slopes, dense, in_float64

import rollmill
from agents_envs import crafts, crowd, lone, opposed, squad
from one_time import run_once
from rollmill.algorithms.agent_views import AgentView
from rollmill.algorithms.dqn import DQNLearner
from rollmill.dataflow import Batch, Graph, Step, Transitions, collect, identity, init_state
from rollmill.networks import NetworkConfig, monotonic_mixer
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from wordings import raises

BOTH = ["vdn", "qmix"]
GAMMA = 0.9
SMALL = {
    "num_envs": 8,
    "num_steps": 4,
    "buffer_size": 8 * 100,
    "batch_size": 16,
    "learning_starts": 64,
    "gamma": GAMMA,
    "network": NetworkConfig(hidden_sizes=(5,), activation="relu"),
}
TEAM = {"team": ("scout", "medic")}
MIXING = {"mixing_size": 3, "hypernetwork_size": 4}


def trained(graph):
    program = lower(graph)
    *_, window = dispatch_ahead(program, program.start(), first=0, until=graph.loops.iterations, span=50)
    return window.after


def settings_of(name, **more):
    return SMALL | TEAM | (MIXING if name == "qmix" else {}) | more


# --- the loss and its gradients -----------------------------------------------------------------------


class Drawn(NamedTuple):
    """Transitions of `squad` drawn from a replay memory, and a learner whose two networks differ."""

    graph: Graph
    learner: DQNLearner
    samples: Transitions


@cache
def collected():
    """Transitions from 20 rollouts of `squad` by the first weights of VDN. They hold for all graphs of `squad`."""
    graph = rollmill.vdn(squad(), **settings_of("vdn"))

    def add(carry, key, weights):
        collector, trajectory = collect(graph, weights, carry[0], key)
        return (collector, graph.replay.add(graph, carry[1], trajectory)), ()

    def draw(key):
        state = init_state(graph, key, INDEX)
        one = partial(add, weights=graph.weights(state.learner))
        (_, rings), _ = jax.lax.scan(one, (state.collector, state.rings), jax.random.split(key, 20))
        return graph.replay.sample(graph, rings, state.learner, jax.random.key(5), INDEX).minibatch

    return run_once(draw, jax.random.key(0))


@cache
def drawn(name, **more):
    graph = getattr(rollmill, name)(squad(), **settings_of(name, **more))
    learner = run_once(graph.start_learner, jax.random.key(0))
    learner = replace(
        learner,
        network=disturbed_network(learner.network, seed=1),
        target=disturbed_network(learner.network, seed=2),
    )
    return Drawn(graph, learner, graph.condition(collected(), identity).samples)


INDEX = jnp.arange(8, dtype=jnp.int32)
LAYERS = 4
"""Arrays of one network of action values: two matrices and two vectors."""


def total_by_hand(weights, view, chosen, n, *, normalised):
    """The value of the team in one transition, from the values of the three agents."""
    active = np.concatenate([view.active["scout"][n], view.active["medic"][n]])
    chosen = np.where(active, chosen, 0)
    mixer = weights[2 * LAYERS :]
    if not mixer:
        return chosen.sum()
    seen = np.concatenate([view.agents["scout"][n], np.zeros((2, 1))], axis=1) * active[:2, None]
    state = np.concatenate([seen[:, :2].ravel(), view.agents["medic"][n].ravel(), active])
    if normalised:
        state = (state - state.mean()) / np.sqrt(state.var() + 1e-5)
    first, first_bias, last, last_bias = mixer[:4], mixer[4:6], mixer[6:10], mixer[10:]
    hidden = chosen @ np.abs(dense(first, state)).reshape(3, -1) + dense(first_bias, state)
    hidden = np.where(hidden > 0, hidden, np.expm1(np.minimum(hidden, 0)))
    return hidden @ np.abs(dense(last, state)) + dense(last_bias, state)[0]


def values_by_hand(weights, view, n):
    """The action values of the three agents, which know their number among those of their kind."""
    medic, scout = weights[:LAYERS], weights[LAYERS : 2 * LAYERS]
    assert len(weights[0]) == 4  # sets are in the order of their names; the medic sees 3 numbers and its own
    scouts = [dense(scout, np.concatenate([view.agents["scout"][n][i], np.eye(2)[i]])) for i in range(2)]
    return [*scouts, dense(medic, np.concatenate([view.agents["medic"][n][0], np.ones(1)]))]


def chosen_by_hand(weights, samples, n):
    actions = [*samples.action["scout"][n], samples.action["medic"][n][0] - 1]
    values = values_by_hand(weights, samples.observation, n)
    return np.array([v[a] for v, a in zip(values, actions, strict=True)])


def goal_by_hand(online, target, samples, n, *, double, normalised):
    """What the value of the team is to become in one transition, through which no gradient passes."""
    after = samples.next_observation
    next_values = values_by_hand(target, after, n)
    judged = values_by_hand(online, after, n) if double else next_values
    legal = [*samples.next_action_mask["scout"][n], samples.next_action_mask["medic"][n][0]]
    best = [np.argmax(np.where(ok, v, -np.inf)) for v, ok in zip(judged, legal, strict=True)]
    following = np.array([v[a] for v, a in zip(next_values, best, strict=True)])
    value = total_by_hand(target, after, following, n, normalised=normalised)
    return samples.reward[n] + samples.discount[n] * value


def loss_by_hand(weights, goals, samples, *, normalised):
    value = lambda n: total_by_hand(
        weights, samples.observation, chosen_by_hand(weights, samples, n), n, normalised=normalised
    )
    return np.mean([0.5 * (goal - value(n)) ** 2 for n, goal in enumerate(goals)])


@pytest.mark.parametrize(
    ("name", "double", "normalised"),
    [
        ("vdn", True, True),
        ("qmix", False, True),
        pytest.param("qmix", True, True, marks=pytest.mark.slow),
        pytest.param("qmix", True, False, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_written_again_in_numpy(name, double, normalised):
    graph, learner, samples = drawn(
        name, double=double, **({"normalize_state": normalised} if name == "qmix" else {})
    )
    shown = jax.device_get(samples._replace(key=()))
    active = shown.observation.active["scout"]
    assert 0.2 < active.mean() < 0.9 and (shown.discount == 0).any() and (shown.discount > 0).any()
    gradients, metrics = eqx.filter_jit(graph.gradients.__call__)(learner, Batch(samples))
    weights, target = in_float64(learner.network), in_float64(learner.target)
    goal = partial(goal_by_hand, weights, target, shown, double=double, normalised=normalised)
    goals = [goal(n) for n in range(len(shown.reward))]
    by_hand = lambda weights: loss_by_hand(weights, goals, shown, normalised=normalised)
    np.testing.assert_allclose(metrics["losses/total"], by_hand(weights), rtol=1e-4)
    assert_slopes(gradients, by_hand, weights)


@pytest.mark.parametrize("name", BOTH)
def test_agents_that_are_out_change_neither_loss_nor_gradients(name):
    graph, learner, samples = drawn(name)

    def disturbed(view):
        out = ~view.active["scout"][..., None]
        return view._replace(agents=view.agents | {"scout": jnp.where(out, 7.0, view.agents["scout"])})

    other = samples._replace(
        observation=disturbed(samples.observation), next_observation=disturbed(samples.next_observation)
    )
    assert not np.array_equal(other.observation.agents["scout"], samples.observation.agents["scout"])
    gradients = eqx.filter_jit(lambda each: graph.gradients(learner, Batch(each)))
    assert_close(gradients(other), gradients(samples), rtol=0, atol=0)


def test_a_team_without_active_agents_is_worth_nothing():
    graph, learner, samples = drawn("qmix")
    nobody = jax.tree.map(jnp.zeros_like, samples.next_observation.active)
    without = samples._replace(next_observation=samples.next_observation._replace(active=nobody))
    ended = samples._replace(discount=jnp.zeros_like(samples.discount))
    loss = eqx.filter_jit(lambda each: graph.gradients(learner, Batch(each))[1]["losses/total"])
    np.testing.assert_allclose(loss(without), loss(ended), rtol=1e-6)
    assert abs(loss(samples) - loss(ended)) > 1e-3


def test_the_reward_of_a_team_is_the_mean_of_its_active_agents():
    graph = rollmill.vdn(squad(), **settings_of("vdn"))
    view = AgentView(
        {}, {"scout": jnp.asarray([[True, False], [False, False]]), "medic": jnp.ones((2, 1), bool)}, ()
    )
    rewards = {"scout": jnp.asarray([[3.0, 100.0], [100.0, 100.0]]), "medic": jnp.asarray([[5.0], [2.0]])}
    step = Step(view, (), (), (), rewards, (), (), view, (), {})
    np.testing.assert_allclose(graph.replay.convert(step).reward, [4.0, 2.0])


# --- the mixing network -------------------------------------------------------------------------------


@pytest.mark.parametrize("hypernetwork_size", [0, 8])
def test_the_mixing_network_never_decreases_in_any_agents_value(hypernetwork_size):
    sizes = {"num_agents": 3, "state_size": 4, "mixing_size": 16, "hypernetwork_size": hypernetwork_size}
    mixer = disturbed_network(monotonic_mixer(jax.random.key(0), **sizes, normalised=True))
    values, states = (jax.random.normal(jax.random.key(k), (200, n)) * 3 for k, n in ((1, 3), (2, 4)))
    slopes = jax.jit(jax.vmap(jax.grad(mixer)))(values, states)
    assert (slopes >= 0).all() and float(slopes.max()) > 0.1
    assert (
        float(np.std(jax.jit(jax.vmap(mixer))(jnp.zeros((200, 3)), states))) > 0.1
    )  # the bias depends on the state


@pytest.mark.parametrize("hypernetwork_size", [0, 8])
def test_a_large_state_multiplies_the_values_of_agents_unless_it_is_normalised(hypernetwork_size):
    sizes = {"num_agents": 3, "state_size": 4, "mixing_size": 16, "hypernetwork_size": hypernetwork_size}
    values, state = jnp.asarray([1.0, 2.0, 3.0]), jax.random.normal(jax.random.key(1), (4,))

    def slopes(mixer):
        return [float(max(jax.jit(jax.grad(mixer))(values, scale * state))) for scale in (1e2, 1e4)]

    far, farther = slopes(monotonic_mixer(jax.random.key(0), **sizes, normalised=True))
    np.testing.assert_allclose(far, farther, rtol=1e-3)
    far, farther = slopes(monotonic_mixer(jax.random.key(0), **sizes, normalised=False))
    assert farther > 1e3 * far > 1e3


def test_a_state_of_two_features_is_not_normalised():
    sizes = {"num_agents": 2, "state_size": 2, "mixing_size": 4, "hypernetwork_size": 8}
    mixer = monotonic_mixer(jax.random.key(0), **sizes, normalised=True)
    value = partial(eqx.filter_jit(mixer), jnp.asarray([1.0, 2.0]))
    values = [value(jnp.asarray(state)) for state in ([1.0, 0.0], [2.0, 0.0], [2.0, 1.0])]
    assert len(set(map(float, values))) == 3


def test_a_state_of_zeros_teaches_the_weights_of_the_mixing_network():
    sizes = {"num_agents": 2, "state_size": 3, "mixing_size": 4, "hypernetwork_size": 0}
    mixer = monotonic_mixer(jax.random.key(0), **sizes, normalised=True)
    loss = lambda mixer: mixer(jnp.asarray([1.0, -2.0]), jnp.zeros(3))
    slopes = eqx.filter_jit(eqx.filter_grad(loss))(mixer)
    assert jnp.abs(slopes.first.head.bias).max() > 1e-3


# --- what is known ------------------------------------------------------------------------------------

GAME = {"total_timesteps": 30_000, "start_epsilon": 1.0, "end_epsilon": 1.0, "gamma": 0.99}
"""As in the paper, actions stay random, so that all pairs of actions are equally frequent."""


def values_of_game(graph, learner, place):
    """The value of the team for each pair of actions in one state."""
    state = np.eye(3, dtype=np.float32)[place]
    team, view = (
        graph.gradients.loss.args[0],
        AgentView({"agent": jnp.tile(state, (2, 1))}, {"agent": jnp.ones(2, bool)}, jnp.asarray(state)),
    )
    if graph.settings["algorithm"] == "vdn":
        view = view._replace(central=())
    values = team.values(learner.network.agents, view)
    pair = lambda a, b: team.total(learner.network.mixer, view, values, {"agent": jnp.asarray([a, b])})
    return np.array([[pair(a, b) for b in range(2)] for a in range(2)])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "best"), [("vdn", 7.0), ("qmix", 8.0)])
def test_the_two_step_game_ends_as_in_the_paper(name, best, tmp_path):
    """Tables 2 and 3 of Rashid et al. (2018): a sum of values does not represent the risky game."""
    graph = getattr(rollmill, name)("TwoStepGame-v0", **GAME | {"total_timesteps": 10_000})
    run = rollmill.train(graph, num_seeds=5, quiet=True, tensorboard=False, run_dir=tmp_path / "run")
    for seed in range(5):
        returns = rollmill.evaluate(run, episodes=4, train_seed=seed).returns
        np.testing.assert_array_equal(returns, best)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "risky"), [("vdn", [[-1.5, 2.5], [2.5, 6.5]]), ("qmix", [[0, 1], [1, 8]])])
def test_the_values_of_the_two_step_game_are_those_of_the_paper(name, risky):
    graph = getattr(rollmill, name)("TwoStepGame-v0", **GAME)
    learner = trained(graph).learner
    np.testing.assert_allclose(values_of_game(graph, learner, 1), np.full((2, 2), 7.0), atol=0.3)
    np.testing.assert_allclose(values_of_game(graph, learner, 2), risky, atol=0.3)
    start = 0.99 * np.array([7.0, np.max(risky)])
    np.testing.assert_allclose(values_of_game(graph, learner, 0), np.stack([start, start], 1), atol=0.3)


@pytest.mark.slow
def test_a_lone_agent_learns_what_dqn_learns():
    env = rollmill.time_limit(rollmill.make("CartPole-v1"), 15)
    sizes = SMALL | {"total_timesteps": 8 * 4 * 40, "num_shards": 2}
    theirs = trained(rollmill.dqn(env, **sizes, n_step=1, learning_rate=1e-3, adam_eps=1e-5)).learner
    ours = trained(rollmill.vdn(lone(env), **sizes, learning_rate=1e-3, agent_ids=False)).learner
    for a, b in zip(jax.tree.leaves(ours.network), jax.tree.leaves(theirs.network), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert ours.progress.updates == theirs.progress.updates > 100


@pytest.mark.parametrize("name", BOTH)
def test_actions_are_legal_and_random_ones_independent(name):
    graph = getattr(rollmill, name)(squad(), **settings_of(name))
    learner = run_once(graph.start_learner, jax.random.key(0))
    legal = {
        "scout": jnp.asarray([[True, False, True], [False, True, False]]),
        "medic": jnp.asarray([[False, True]]),
    }
    seen = {"scout": jnp.zeros((2, 2)), "medic": jnp.zeros((1, 3))}
    decide = lambda key, how: how(graph.weights(learner), key, (), seen, legal).action
    keys = jax.random.split(jax.random.key(1), 400)
    decide_all = lambda how: jax.jit(jax.vmap(partial(decide, how=how)))(keys)
    drawn = decide_all(graph.policy)
    assert set(np.unique(drawn["scout"][:, 0])) == {0, 2} and set(np.unique(drawn["scout"][:, 1])) == {1}
    assert set(np.unique(drawn["medic"])) == {2}
    assert abs(np.mean(drawn["scout"][:, 0] == 2) - 0.5) < 0.1
    greedy = decide_all(graph.greedy)
    assert all(len(np.unique(each, axis=0)) == 1 for each in greedy.values())


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_what_is_no_team_is_refused(name):
    build = getattr(rollmill, name)
    with raises("has-several-kinds-agents-but", "TagGridWorld-Small-v0", "tagger, runner", "--team tagger runner"):
        build("TagGridWorld-Small-v0")
    with raises("team-leaves-out-but-trains", "medic"):
        build(squad(), team=("scout",))
    with raises("unknown-name", "kind of agents in team", "Did you mean scout"):
        build(squad(), team=("scuot", "medic"))
    with raises("has-one-agent-is-for-environments", "CartPole-v1", "dqn"):
        build("CartPole-v1")
    with raises("has-one-agent-is-for-environments", "TicTacToe-v0", "alphazero"):
        build("TicTacToe-v0")
    with raises("needs-discrete-action-space-this", "painter", "mappo"):
        build(crafts(), team=("reader", "painter", "packer", "clerk"))
    with raises("needs-discrete-action-space-this", "keeper"):
        build(crowd(), team=("walker", "keeper"))


@pytest.mark.parametrize("name", BOTH)
def test_options_that_do_not_fit_are_refused(name):
    build = getattr(rollmill, name)
    with raises("torso-needs-whole-sequences-algorithms", "'gru'"):
        build("TwoStepGame-v0", network="gru")
    with raises("sharing-gives-and-parameters-but", "observation_space"):
        build(squad(), **TEAM, sharing={"scout": "all", "medic": "all"})
    with raises("is-more-updates-than-are", "target_interval"):
        build("TwoStepGame-v0", target_interval=2**32)
    build(opposed(), team=("left", "right"), sharing={"left": "both", "right": "both"})


def test_sizes_of_the_mixing_network_are_checked():
    with raises("must-be-at-least-1", "mixing_size=0"):
        rollmill.qmix("TwoStepGame-v0", mixing_size=0)
    with raises("must-be", "hypernetwork_size=-1", "at least 0"):
        rollmill.qmix("TwoStepGame-v0", hypernetwork_size=-1)
    assert isinstance(rollmill.qmix("TwoStepGame-v0", hypernetwork_size=0).action_space, spaces.Dict)
