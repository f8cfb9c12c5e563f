"""The flow of data through a graph, derived from its functions: who writes what of the learner, and shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting_graph import counting_graph

import rollmill
from rollmill.dataflow import StepReply, flow, init_state, iterate

WEIGHTS, OPTIMISER = ".weights.network", ".optimiser"
HYPERPARAMETERS = ".hyperparameters"
OBSERVATIONS, RETURNS = ".weights.observations", ".returns"
TINY = rollmill.NetworkConfig(hidden_sizes=(3,))
RECURRENT = rollmill.NetworkConfig(torso="gru", hidden_sizes=(3,), recurrent_size=3)


def ppo(env="CartPole-v1", **config):
    sizes = {"num_envs": 4, "num_steps": 4, "num_minibatches": 2, "network": TINY}
    return rollmill.ppo(rollmill.make(env), **(sizes | config))


def names(flows, places):
    paths, _ = jax.tree_util.tree_flatten_with_path(flows.state.learner)
    return {jax.tree_util.keystr(paths[place][0]) for place in places}


def rooms(flows, places):
    """Which parts of the learner the leaves at these places lie in."""
    known = (WEIGHTS, OBSERVATIONS, RETURNS, OPTIMISER, HYPERPARAMETERS)
    return {room for room in known if any(name.startswith(room) for name in names(flows, places))}


def kinds(tree):
    return [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(tree)]


VARIANTS = {
    "plain": ({}, set()),
    "observations": ({"normalize_observations": True}, {OBSERVATIONS}),
    "both": ({"normalize_observations": True, "normalize_rewards": True}, {OBSERVATIONS, RETURNS}),
    "recurrent": ({"network": RECURRENT}, set()),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_who_writes_what_of_the_learner_of_ppo(variant):
    config, statistics = VARIANTS[variant]
    flows = flow(ppo(**config))
    every = frozenset(range(len(jax.tree.leaves(flows.state.learner))))
    assert rooms(flows, flows.updated_leaves) == {WEIGHTS, OPTIMISER}
    assert rooms(flows, flows.prepared_leaves) == statistics
    assert not flows.updated_leaves & flows.prepared_leaves
    constant = every - flows.updated_leaves - flows.prepared_leaves
    assert rooms(flows, constant) == {HYPERPARAMETERS} and not constant & set(flows.parameters)
    # The optimiser's state is read by the update alone, so it does not travel, but for how far annealing is.
    travelling = names(flows, flows.parameters)
    annealing = {name for name in names(flows, every) if name.endswith((".whole", ".part"))}
    assert len(annealing) == 2
    assert travelling == annealing | {name for name in names(flows, every) if name.startswith(WEIGHTS)}


def test_a_step_size_that_is_fixed_does_not_travel():
    flows = flow(ppo(anneal_lr=False, target_kl=0.01))
    assert rooms(flows, flows.parameters) == {WEIGHTS}


def test_parameters_are_picked_and_put_where_they_belong():
    graph = counting_graph()
    flows = flow(graph)
    learner = graph.start_learner(jax.random.key(0))
    # In the order of names: prepared is written by `prepare`, updates and weight by the update.
    assert (flows.prepared_leaves, flows.updated_leaves, flows.parameters) == ({0}, {1, 2}, (1, 2))
    assert flows.select_parameters(learner) == [learner["updates"], learner["weight"]]
    put = flows.replace_parameters(learner, [jnp.int32(7), jnp.float32(8)])
    assert put == {"prepared": learner["prepared"], "updates": 7, "weight": 8.0}


def test_what_only_the_update_reads_and_what_nobody_writes_do_not_travel():
    graph = counting_graph()

    def update(learner, gradients):
        inner = graph.update(learner["inner"], gradients)
        return {**learner, "inner": inner, "momentum": 0.9 * learner["momentum"] + gradients["weight"]}

    nested = graph._replace(
        start_learner=lambda key: {
            "fixed": jnp.float32(3),
            "inner": graph.start_learner(key),
            "momentum": jnp.float32(0),
        },
        weights=lambda learner: graph.weights(learner["inner"]),
        prepare=lambda learner, trajectory, **how: _prepared(graph, learner, trajectory, how),
        gradients=lambda learner, batch: graph.gradients(learner["inner"], batch),
        update=update,
    )
    flows = flow(nested)
    assert names(flows, flows.prepared_leaves) == {"['inner']['prepared']"}
    assert names(flows, flows.updated_leaves) == {"['inner']['updates']", "['inner']['weight']", "['momentum']"}
    assert names(flows, flows.parameters) == {"['inner']['updates']", "['inner']['weight']"}


def _prepared(graph, learner, trajectory, how):
    inner, batch = graph.prepare(learner["inner"], trajectory, **how)
    return {**learner, "inner": inner}, batch


# --- shapes -------------------------------------------------------------------------------------------


def test_an_environment_is_asked_and_answers_one_at_a_time():
    flows = flow(ppo("Pendulum-v1"))
    assert kinds(flows.request.key) == [((2,), "uint32")]
    assert kinds(flows.request.action) == [((1,), "float32")]
    reply = flows.reply
    assert isinstance(reply, StepReply)
    assert kinds((reply.observation, reply.reward)) == [((3,), "float32"), ((), "float32")]
    assert kinds((reply.terminated, reply.truncated)) == [((), "bool")] * 2
    assert reply.action_mask == ()
    assert {name: kinds(leaf) for name, leaf in reply.info.items()} == {
        "episode_return": [((), "float32")],
        "episode_length": [((), "int32")],
        "final_observation": [((3,), "float32")],
    }


def test_masks_and_discounted_returns_travel_where_there_are_some():
    reply = flow(counting_graph()).reply
    assert kinds(reply.action_mask) == [((2,), "bool")]
    assert set(reply.info) == {"episode_return", "episode_length", "noise", "final_observation"}
    assert "discounted_return" in flow(ppo(normalize_rewards=True)).reply.info


def test_trajectories_weights_and_gradients():
    graph = ppo("Pendulum-v1", normalize_observations=True)
    flows = flow(graph)
    assert {leaf.shape[:2] for leaf in jax.tree.leaves(flows.trajectory.steps)} == {(4, 4)}
    assert jax.tree.leaves(flows.trajectory.memory) == []
    state = jax.eval_shape(lambda: init_state(graph, jax.random.key(0), jnp.arange(4, dtype=jnp.int32)))
    assert kinds(flows.state.learner) == kinds(state.learner)
    assert kinds(flows.weights) == kinds(graph.weights(state.learner))
    assert kinds(flows.gradients) == kinds(graph.weights(state.learner).network)


@pytest.mark.parametrize("config", [{}, {"target_kl": 0.01}, {"network": RECURRENT}])
def test_the_metrics_are_those_of_an_iteration(config):
    graph = ppo(**config)
    state = jax.eval_shape(lambda: init_state(graph, jax.random.key(0), jnp.arange(4, dtype=jnp.int32)))
    assert flow(graph).metric_names == tuple(sorted(jax.eval_shape(lambda s: iterate(graph, s), state)[1]))


def test_nothing_is_computed():
    graph = counting_graph(num_envs=2**24, num_steps=48)
    assert np.prod(flow(graph).trajectory.steps.observation.shape) == 2**25 * 48
