"""Metrics are means over the iterations and updates that computed them, and null where none did."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.dataflow import Batch, Transitions, gradient_metrics
from rollmill.programs.states import begin_learner
from rollmill.record.aggregates import RowSums
from rollmill.record.metrics import read_metrics
from rollmill.training.metric_counts import computed_shares, defined_mean, reported_names

REPLAY = {
    **{"total_timesteps": 12 * 8, "num_envs": 8, "buffer_size": 800, "batch_size": 8, "learning_starts": 40},
    **{"num_shards": 1, "gradient_steps": 2, "network": rollmill.NetworkConfig(hidden_sizes=(4,))},
}


def graph_of(algorithm, **options):
    environment = "CartPole-v1" if algorithm == "dqn" else "Pendulum-v1"
    return getattr(rollmill, algorithm)(environment, **REPLAY | options)


@pytest.mark.parametrize(
    ("algorithm", "always"),
    [
        ("dqn", {"learning_rate", "exploration/epsilon"}),
        ("sac", {"learning_rate", "losses/temperature"}),
        ("td3", {"learning_rate"}),
    ],
)
def test_what_is_reported_in_every_iteration_is_not_of_learning(algorithm, always):
    graph = graph_of(algorithm)
    learner = jax.eval_shape(graph.start_learner, jax.random.key(0))
    reported = reported_names(graph, learner)
    assert reported == always
    names = {"losses/q", "losses/temperature", "replay/fill", "epochs", *reported}
    shares = computed_shares(graph, names, reported)
    assert shares == {name: "epochs" for name in {"losses/q", "losses/temperature"} - always}
    assert computed_shares(rollmill.ppo("CartPole-v1"), {"losses/policy"}, frozenset()) == {}


def test_means_are_over_what_was_computed():
    """Iterations without updates, with updates of which one in two moves the actor, and with three in four."""
    sums = RowSums()
    for epochs, q, policy, share, fill in ((0, 0, 0, 0, 0.1), (1, 2.0, 1.5, 0.5, 0.2), (1, 4.0, 6.0, 0.75, 0.6)):
        sums.add({"epochs": epochs, "q": q, "policy": policy, "computed/policy": share, "fill": fill})
    means = sums.means({"q": "epochs", "policy": "computed/policy"})
    assert [float(means[name][0]) for name in ("q", "policy", "fill")] == pytest.approx([3.0, 6.0, 0.3])
    empty = RowSums()
    empty.add({"epochs": np.zeros(2), "q": np.zeros(2)}, iterations=5)
    assert defined_mean(empty.means({"q": "epochs"})["q"]) is None
    assert defined_mean(np.array([1.0, np.nan, 2.0])) == 1.5


def test_the_policy_loss_of_td3_is_that_of_updates_that_move_the_actor():
    graph = graph_of("td3")
    transitions = Transitions(
        observation=np.ones((4, 3), np.float32),
        action_mask=(),
        action=np.zeros((4, 1), np.float32),
        reward=np.zeros(4, np.float32),
        discount=np.zeros(4, np.float32),
        next_observation=np.zeros((4, 3), np.float32),
        next_action_mask=(),
        weight=np.ones(4, np.float32),
        key=jax.random.split(jax.random.key(0), 4),
    )
    begin, compute, seen = begin_learner(graph, jax.random.key(0)), jax.jit(graph.gradients), []
    for updates in (0, 1):
        learner = eqx.tree_at(lambda learner: learner.progress.updates, begin, jnp.uint32(updates))
        gradients, metrics = compute(learner, Batch(transitions))
        seen.append({**metrics, **gradient_metrics(gradients, metrics)})
    for name in ("losses/policy", "losses/total", "losses/gradient_norm"):
        assert [float(metrics[name] != 0) for metrics in seen] == [0, 1]
        assert [float(metrics[f"computed/{name}"]) for metrics in seen] == [0, 1]
    assert all(float(metrics["losses/critic"]) > 0 and "computed/losses/critic" not in metrics for metrics in seen)


def test_norms_are_of_all_gradients():
    """Of 3 and 4 it is 5; where only some updates have all of them, it is 0 in the others."""
    gradients = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    name = "losses/gradient_norm"
    norms = [
        gradient_metrics(gradients, metrics)[name]
        for metrics in ({}, {f"computed/{name}": jnp.float32(1)}, {f"computed/{name}": jnp.float32(0)})
    ]
    assert [float(norm) for norm in norms] == [5, 5, 0]


@pytest.mark.slow
def test_lines_before_learning_have_no_losses(tmp_path):
    """Of 12 iterations the last eight learn; each of four longer lines is over three of them."""
    quiet = {"quiet": True, "tensorboard": False, "seed": 1}
    each, longer = (
        read_metrics(
            rollmill.train(graph_of("dqn"), run_dir=tmp_path / str(n), log_every=n, **quiet).directory
            / "metrics.jsonl"
        )
        for n in (1, 3)
    )
    losses = [name for name in each[0] if name.startswith("losses/") and name != "losses/explained_variance"]
    assert {"losses/q", "losses/total", "losses/td_error", "losses/gradient_norm"} <= set(losses)
    learns = [row["epochs"] for row in each]
    assert learns == [0] * 4 + [1] * 8 and [row["epochs"] for row in longer] == pytest.approx([0, 2 / 3, 1, 1])
    for name in losses:
        assert [row[name] is None for row in each] == [not learned for learned in learns]
        right = [None, *(np.mean([row[name] for row in part]) for part in (each[4:6], each[6:9], each[9:12]))]
        assert longer[0][name] is None
        assert [row[name] for row in longer[1:]] == pytest.approx(right[1:], rel=1e-5)
    for name in ("learning_rate", "exploration/epsilon", "replay/fill"):
        assert all(isinstance(row[name], float) for row in each)
