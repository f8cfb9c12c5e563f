"""Memory pays where the task needs it."""

import pytest

import rollmill
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead

ONE_PASS = {"num_steps": 16, "learning_rate": 5e-3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "torso", "settings"),
    [
        pytest.param("ppo", "gru", {"num_steps": 32, "learning_rate": 2e-3}, marks=pytest.mark.slow),
        pytest.param("ppo", "mlp", {"num_steps": 32, "learning_rate": 2e-3}, marks=pytest.mark.slow),
        pytest.param("a3c", "gru", ONE_PASS, marks=pytest.mark.slow),
        ("impala", "gru", ONE_PASS),
        pytest.param("ppo", "lstm", {"num_steps": 32, "learning_rate": 2e-3}, marks=pytest.mark.slow),
        pytest.param("impala", "lstm", ONE_PASS, marks=pytest.mark.slow),
        pytest.param("impala", "mlp", ONE_PASS, marks=pytest.mark.slow),
    ],
)
def test_only_a_recurrent_policy_solves_the_t_maze(algorithm, torso, settings):
    memory = {} if torso == "mlp" else {"recurrent_size": 32}
    network = rollmill.NetworkConfig(torso=torso, hidden_sizes=(32,), **memory)
    make_graph, env = getattr(rollmill, algorithm), rollmill.make("TMaze-v0")
    graph = make_graph(env, num_envs=64, total_timesteps=120 * 64 * 32, network=network, **settings)
    program = lower(graph)
    windows = dispatch_ahead(program, program.start(), first=0, until=graph.loops.iterations)
    rows = [row for window in windows for row in window.metrics]
    ended = sum(row["episodes/ended"] for row in rows[-20:])
    mean_return = sum(row["episodes/return_sum"] for row in rows[-20:]) / ended
    assert mean_return > 0.95 if torso != "mlp" else abs(mean_return) < 0.1
