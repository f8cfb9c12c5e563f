"""Two policies in different roles of one environment: who plays which role, and the returns of each, by value."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill.cli.main import _exit_code as command
from rollmill.core.types import AgentKind
from rollmill.envs import joint_spaces
from rollmill.envs.adapters.pettingzoo import parallel_environment
from rollmill.policies.cross_play import cross_play
from rollmill.policies.loading import load_weights
from wordings import raises, tells

NUMBERS = spaces.Box(-1, 1, (2,))
KINDS = (AgentKind("left", 2, NUMBERS, spaces.Discrete(3)), AgentKind("right", 1, NUMBERS, spaces.Discrete(3)))
STEPS = 4
ENV = "Signals-v0"


def signals():
    """Each agent is paid its own action, for four steps."""

    def observe(key):
        numbers = jax.random.uniform(key, (3, 2), minval=-1.0)
        return {"left": numbers[:2], "right": numbers[2:]}

    def step(key, state, action, params):
        rewards = jax.tree.map(lambda chosen: chosen.astype(jnp.float32), action)
        return rollmill.Timestep(observe(key), state + 1, rewards, state + 1 >= STEPS, jnp.asarray(False), {})

    return rollmill.Environment(
        ENV, lambda key, params: (observe(key), jnp.int32(0)), step, *joint_spaces(KINDS), agents=KINDS
    )


class HostSignals:
    """The same environment, as PettingZoo has environments."""

    possible_agents = ("left_0", "left_1", "right_0")
    metadata = {"name": "signals"}  # noqa: RUF012

    def observation_space(self, agent):
        return NUMBERS

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.agents, self._time = list(self.possible_agents), 0
        return self._observe(), dict.fromkeys(self.agents, {})

    def step(self, actions):
        self._time += 1
        ended = dict.fromkeys(self.agents, self._time >= STEPS)
        paid = {agent: float(action) for agent, action in actions.items()}
        result = self._observe(), paid, ended, dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, {})
        self.agents = [] if self._time >= STEPS else self.agents
        return result

    def _observe(self):
        return {agent: np.zeros(2, np.float32) for agent in self.possible_agents}

    def close(self):
        """Frees nothing."""


def always(action):
    def rule(key, observation, legal):
        assert observation["left"].shape == (2, 2)
        return {kind.name: jnp.full(kind.count, action, jnp.int32) for kind in KINDS}

    return rule


two = always(2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of two algorithms, with other weights."""
    rollmill.register(ENV, signals, overwrite=True)
    folder = tmp_path_factory.mktemp("runs")
    sizes = {"num_envs": 4, "num_steps": 4, "total_timesteps": 32, "network": {"hidden_sizes": (4,)}}
    for seed, build in enumerate((rollmill.ippo, rollmill.mappo)):
        rollmill.train(
            build(ENV, **sizes), run_dir=folder / build.__name__, seed=seed, quiet=True, tensorboard=False
        )
    return folder / "ippo", folder / "mappo"


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_policy_in_all_roles_plays_as_it_does_alone(runs, stochastic):
    play = {"episodes": 10, "seed": 3, "stochastic": stochastic}
    alone = rollmill.evaluate(runs[0], **play)
    shared = rollmill.evaluate(runs[0], against=runs[0], roles=["left"], **play)
    jax.tree.map(np.testing.assert_array_equal, dict(shared.agent_returns), dict(alone.agent_returns))
    np.testing.assert_array_equal(shared.returns, alone.returns)


def test_each_role_is_played_by_its_own_policy(runs):
    play = {"episodes": 10, "seed": 3}
    alone = [rollmill.evaluate(run, **play).agent_returns for run in runs]
    found = rollmill.evaluate(runs[0], against=runs[1], roles=["left"], **play)
    np.testing.assert_array_equal(found.agent_returns["left"], alone[0]["left"])
    np.testing.assert_array_equal(found.agent_returns["right"], alone[1]["right"])
    found = rollmill.evaluate(runs[0], against=two, roles=["right"], **play)
    np.testing.assert_array_equal(found.agent_returns["left"], np.full(10, 2.0 * STEPS))
    np.testing.assert_array_equal(found.agent_returns["right"], alone[0]["right"])
    drawn = rollmill.evaluate(runs[0], against="random", roles=["left"], **play).agent_returns
    np.testing.assert_array_equal(drawn["left"], alone[0]["left"])
    assert len(set(drawn["right"].tolist())) > 2


def test_environments_of_python_are_played_too(runs):
    env = parallel_environment("Signals", HostSignals)
    found = cross_play(load_weights(runs[0]), always(1), roles=["left"], env=env, episodes=3)
    alone = rollmill.evaluate(runs[0], env=env, episodes=3)
    np.testing.assert_array_equal(found.agent_returns["right"], np.full(3, STEPS))
    np.testing.assert_array_equal(found.agent_returns["left"], alone.agent_returns["left"])


def test_the_command_plays_each_role_in_turn(runs, capsys):
    words = ["evaluate", str(runs[0]), "--against", str(runs[1]), "--episodes", "5"]
    assert command([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["iteration"] == result["against_iteration"] == 2 and result["episodes"] == 5
    rounds = [(played["roles"], played["roles_of_other"]) for played in result["cross_play"]]
    assert rounds == [(["left"], ["right"]), (["right"], ["left"])]
    expected = rollmill.evaluate(runs[0], against=runs[1], roles=["right"], episodes=5).agent_returns
    means = {name: float(np.mean(own)) for name, own in expected.items()}
    assert result["cross_play"][1]["mean_returns"] == pytest.approx(means)
    assert command([*words, "--roles", "right"]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert f"{runs[0]} (iteration 2) and {runs[1]} (iteration 2)" in heading
    assert line.startswith(f"  right by {runs[0]}, left by {runs[1]}: mean return left ")
    deviations = result["cross_play"][1]["std_returns"]
    assert all(f"(std {deviation:.4g})" in line for deviation in deviations.values())


def test_the_summary_of_a_run_has_the_return_of_each_kind(runs):
    summary = json.loads((runs[0] / "summary.json").read_text())
    assert set(summary["final_returns"]) == {"left", "right"}
    over_all = (2 * summary["final_returns"]["left"] + summary["final_returns"]["right"]) / 3
    assert summary["final_return"] == pytest.approx(over_all)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--roles", "left"], "has-no-effect-without-against"),
        (["--against-checkpoint", "1"], "has-no-effect-without-against"),
        (["--against", "random", "--roles", "lift"], "unknown-name"),
        (["--against", "random", "--roles", "left", "right"], "roles-leaves-no-role-to"),
        (["--against", "random", "--opening-plies", "2"], "opening-plies-applies-to-games"),
        (["--against", "random", "--record", "file.npz"], "record-is-episodes-and-against"),
        (["--against", "random", "--env", "CartPole-v1"], "is-no-game-for-two"),
        (["--against", "random", "--env-option", "a=1"], "options-are-for-another-environment"),
    ],
)
def test_what_cannot_be_played_is_one_sentence(runs, words, code, capsys):
    assert command(["evaluate", str(runs[0]), *words]) == 2
    assert tells(code, capsys.readouterr().err)


def test_two_policies_need_an_environment_with_roles(runs, tmp_path):
    with raises("against-needs-roles-kinds-agents", "left or right"):
        rollmill.evaluate(runs[0], against=runs[1])
    with raises("has-no-effect-without-against-other", "roles"):
        rollmill.evaluate(runs[0], roles=["left"])
    with raises("record-writes-episodes-one-policy", ""):
        rollmill.evaluate(runs[0], against="random", roles=["left"], record=tmp_path / "file.npz")
    with raises("has-so-two-policies-cannot", "CartPole-v1", "one agent"):
        rollmill.evaluate(runs[0], against="random", roles=["left"], env="CartPole-v1")
    with raises("has-so-two-policies-cannot", "rollmill.match"):
        rollmill.evaluate(runs[0], against="random", roles=["left"], env="TicTacToe-v0")
    with raises("has-other-than-policy-trained", "TagGridWorld-Small-v0"):
        rollmill.evaluate(runs[0], against="random", roles=["tagger"], env="TagGridWorld-Small-v0")
