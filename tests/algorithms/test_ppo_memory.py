"""Memory pays where the task needs it."""

import pytest

import rollmill
from rollmill.execution import advance, lower


@pytest.mark.slow
@pytest.mark.parametrize("torso", ["gru", "mlp"])
def test_only_a_recurrent_policy_solves_the_t_maze(torso):
    network = rollmill.NetworkConfig(torso=torso, hidden_sizes=(32,), gru_size=32)
    config = rollmill.PPOConfig(
        num_envs=64, num_steps=32, total_timesteps=120 * 64 * 32, learning_rate=2e-3, network=network
    )
    program = lower(rollmill.ppo(rollmill.make("TMaze-v0"), config))
    rows = [row for window in advance(program, program.start(), first=0, until=120) for row in window.metrics]
    ended = sum(row["episodes/ended"] for row in rows[-20:])
    mean_return = sum(row["episodes/return_sum"] for row in rows[-20:]) / ended
    assert mean_return > 0.95 if torso == "gru" else abs(mean_return) < 0.1
