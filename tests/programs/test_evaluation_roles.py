"""Evaluations with opposed kinds of agents: a return for each kind, on JAX and on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill.cli.evaluate import _result, _sentence
from rollmill.core.types import AgentKind
from rollmill.envs import joint_spaces
from rollmill.envs.adapters.pettingzoo import parallel_environment
from rollmill.fusion import backend_for
from rollmill.programs.evaluation.compiled import evaluator
from rollmill.programs.evaluation.episodes import EvaluationEpisodes
from rollmill.programs.evaluation.host_environments import evaluate_on_host
from rollmill.training.evaluations import _metrics

NUMBERS = spaces.Box(-1, 1, (2,))
KINDS = (AgentKind("buyer", 2, NUMBERS, spaces.Discrete(2)), AgentKind("seller", 1, NUMBERS, spaces.Discrete(2)))
STEPS = 3
"""Of an episode, in each of which buyers get 2 and 4, and the seller -6: means of 9 and -18, and 0 over all."""


def market():
    """The market in JAX."""
    observe = lambda: {kind.name: jnp.zeros((kind.count, 2)) for kind in KINDS}

    def step(key, state, action, params):
        rewards = {"buyer": jnp.asarray([2.0, 4.0]), "seller": jnp.asarray([-6.0])}
        return rollmill.Timestep(observe(), state + 1, rewards, state + 1 >= STEPS, jnp.asarray(False), {})

    return rollmill.Environment(
        "Market", lambda key, params: (observe(), jnp.int32(0)), step, *joint_spaces(KINDS), agents=KINDS
    )


class HostMarket:
    """The market as PettingZoo has environments."""

    possible_agents = ("buyer_0", "buyer_1", "seller_0")
    metadata = {"name": "market"}  # noqa: RUF012
    rewards = {"buyer_0": 2.0, "buyer_1": 4.0, "seller_0": -6.0}  # noqa: RUF012

    def observation_space(self, agent):
        return NUMBERS

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self._time = list(self.possible_agents), 0
        return self._observe(), dict.fromkeys(self.agents, {})

    def step(self, actions):
        self._time += 1
        ended = dict.fromkeys(self.agents, self._time >= STEPS)
        result = self._observe(), dict(self.rewards), ended, dict.fromkeys(self.agents, False)
        infos = dict.fromkeys(self.agents, {})
        self.agents = [] if self._time >= STEPS else self.agents
        return *result, infos

    def _observe(self):
        return {agent: np.zeros(2, np.float32) for agent in self.possible_agents}

    def close(self):
        """Frees nothing."""


def trained(env):
    graph = rollmill.mappo(env, num_envs=5, num_steps=2, total_timesteps=10, num_minibatches=1)
    return graph, graph.weights(graph.start_learner(jax.random.key(0)))


@pytest.mark.parametrize("by", ["xla", "machine code", "host"])
def test_each_kind_has_a_return_of_its_own(by):
    env = parallel_environment("Market", HostMarket) if by == "host" else market()
    graph, weights = trained(env)
    if by == "host":
        played = evaluate_on_host(graph, weights, env, episodes=5)
    else:
        backend = backend_for(jax.devices()[0], "float32") if by == "machine code" else None
        played = evaluator(graph, weights, episodes=5, backend=backend)(weights)
    assert played.lengths.tolist() == [STEPS] * 5 and played.returns.tolist() == [0.0] * 5
    assert {kind: returns.tolist() for kind, returns in played.agent_returns.items()} == {
        "buyer": [9.0] * 5,
        "seller": [-18.0] * 5,
    }


def test_a_single_agent_has_none():
    result = _result("CartPole-v1", {"iteration": 1}, EvaluationEpisodes(np.ones(2, np.float32), np.full(2, 3)))
    assert "mean_returns" not in result and "mean return 1 (std 0" in _sentence(result)


def test_the_command_prints_them():
    played = EvaluationEpisodes(
        np.zeros(2, np.float32),
        np.full(2, 3),
        {"buyer": np.array([8.0, 10.0]), "seller": np.array([-16.0, -20.0])},
    )
    result = _result("Market", {"iteration": 7}, played)
    assert result["mean_return"] == 0.0 and result["mean_returns"] == {"buyer": 9.0, "seller": -18.0}
    assert result["std_returns"] == {"buyer": 1.0, "seller": 2.0}
    sentence = "mean return buyer 9 (std 1), seller -18 (std 2), all agents 0, mean length 3"
    assert sentence in _sentence(result)


def test_evaluations_while_training_log_them():
    """Means over the episodes of all seeds."""
    of_seeds = [
        EvaluationEpisodes(np.zeros(1), np.full(1, 3), {"buyer": np.array([own]), "seller": np.array([-2 * own])})
        for own in (8.0, 11.0)
    ]
    row = _metrics(of_seeds, seeds=(4, 5))
    assert (row["evaluation/returns/buyer"], row["evaluation/returns/seller"]) == (9.5, -19.0)
