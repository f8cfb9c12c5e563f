"""Functions evaluated as policies: heuristics, and random play."""

import sys

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill.cli.main import _exit_code as command
from rollmill.core.errors import ContractError, UsageError
from rollmill.core.types import Environment, Timestep


def steps_of_three():
    """Three steps; the reward is the action, of which 2 is illegal in the last step, where 1 is the best."""

    def reset(key, params):
        return jnp.zeros((), jnp.float32), jnp.int32(0)

    def step(key, state, action, params):
        t = state + 1
        return Timestep(t.astype(jnp.float32), t, action.astype(jnp.float32), t >= 3, jnp.asarray(False), {})

    return Environment(
        "Three",
        reset,
        step,
        spaces.Box(0, 3, (), np.float32),
        spaces.Discrete(3),
        action_mask=lambda state, params: jnp.stack([jnp.asarray(True), jnp.asarray(True), state < 2]),
    )


def best(key, observation, legal):
    return jnp.where(legal[2], 2, 1)


def late(key, observation, legal):
    return (observation >= 2).astype(jnp.int32)


def vector(key, observation, legal):
    return jnp.zeros(3, jnp.int32)


def breaks(key, observation, legal):
    return observation["position"]


def observes(observation):
    return jnp.int32(0)


@pytest.mark.parametrize(("policy", "expected"), [(best, 5.0), (late, 1.0)])
def test_a_function_plays_whole_episodes(policy, expected):
    episodes = rollmill.evaluate(policy, env=steps_of_three(), episodes=7)
    np.testing.assert_array_equal(episodes.returns, np.full(7, expected))
    np.testing.assert_array_equal(episodes.lengths, np.full(7, 3))


def test_random_play_draws_each_legal_action_equally_often():
    """The mean of two draws of 0 to 2 and one of 0 and 1 is 2.5, with a variance of 2 * 2/3 + 1/4."""
    returns = rollmill.evaluate("random", env=steps_of_three(), episodes=4000).returns
    assert set(returns) == {0, 1, 2, 3, 4, 5}
    assert returns.mean() == pytest.approx(2.5, abs=4 * np.sqrt(19 / 12 / 4000))
    np.testing.assert_array_equal(
        returns, rollmill.evaluate("random", env=steps_of_three(), episodes=4000).returns
    )


class Host(gymnasium.Env):
    """As above, on the host, without a mask."""

    observation_space, action_space = spaces.Box(0, 3, (1,), np.float32), spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), float(action), self.t >= 3, False, {}


def test_a_function_plays_an_environment_of_the_host():
    def late(key, observation, legal):
        assert legal == ()
        return (observation[0] >= 2).astype(jnp.int32)

    episodes = rollmill.evaluate(late, env=rollmill.from_gymnasium(Host), episodes=5)
    np.testing.assert_array_equal(episodes.returns, np.ones(5))


@pytest.mark.parametrize(
    ("policy", "arguments", "error", "message"),
    [
        (vector, {}, ContractError, r"the policy returned int32\[3\], expected an action of Three, int32\[\]\."),
        (breaks, {}, ContractError, r"the policy raised .*\n  at .*test_rules\.py:\d+: return observation"),
        (observes, {}, ContractError, r"the policy observes takes \(observation\), but is called with \(key, obs"),
        (f"{__name__}:observes", {}, ContractError, r"the policy \S+:observes takes \(observation\)"),
        (best, {"checkpoint": "best"}, UsageError, "checkpoint applies only to the policy of a run, not to best"),
        (best, {"env": None}, UsageError, "best needs an environment to play in"),
        (f"{__name__}:worst", {}, UsageError, f"{__name__} has no function 'worst'"),
        ("no_such_module:best", {}, UsageError, "cannot import 'no_such_module'"),
    ],
)
def test_what_is_wrong_is_named(policy, arguments, error, message):
    with pytest.raises(error, match=message):
        rollmill.evaluate(policy, **({"env": steps_of_three()} | arguments))


def test_the_command_takes_functions_by_name_and_refuses_options_of_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rules.py").write_text("def left(key, observation, legal):\n    return 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rules", raising=False)
    assert command(["evaluate", "my_rules:left", "--env", "CartPole-v1", "--episodes", "20"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("CartPole-v1, 20 episodes, my_rules:left: mean return 9.")
    assert command(["evaluate", "random", "--env", "CartPole-v1", "--train-seed", "3"]) == 2
    assert "--train-seed applies only to the policy of a run, not to random" in capsys.readouterr().err
    (tmp_path / "random").mkdir()
    assert command(["evaluate", "random", "--env", "CartPole-v1"]) == 2
    assert "not to random" not in capsys.readouterr().err
