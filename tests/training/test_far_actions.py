"""A training says that its policy begins far from the range of its actions."""

import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill.core.types import AgentKind, Environment, Timestep
from rollmill.envs import joint_spaces
from rollmill.training.action_coverage import notes_on_far_actions

SMALL = {"num_envs": 4, "num_steps": 4, "total_timesteps": 64}
FAR = spaces.Box(290.0, 300.0, (2,), np.float32)
OBSERVATION = spaces.Box(-1.0, 1.0, (1,), np.float32)


def environment(action_space=FAR):
    def step(key, state, action, params):
        return Timestep(jnp.zeros(1), state, jnp.float32(0), jnp.asarray(True), jnp.asarray(False), {})

    return Environment(
        name="Valve",
        reset=lambda key, params: (jnp.zeros(1), ()),
        step=step,
        observation_space=OBSERVATION,
        action_space=action_space,
        params={},
    )


def agents(**boxes):
    kinds = tuple(AgentKind(name, 2, OBSERVATION, box) for name, box in boxes.items())
    observation_space, action_space = joint_spaces(kinds)
    observation = {name: jnp.zeros((2, 1)) for name in boxes}
    reward = {name: jnp.zeros(2) for name in boxes}

    def step(key, state, action, params):
        return Timestep(observation, state, reward, jnp.asarray(True), jnp.asarray(False), {})

    return Environment(
        name="Valves",
        reset=lambda key, params: (observation, ()),
        step=step,
        observation_space=observation_space,
        action_space=action_space,
        params={},
        agents=kinds,
    )


@pytest.mark.parametrize("algorithm", [rollmill.ppo, rollmill.a3c, rollmill.impala])
def test_gaussian_policies(algorithm):
    (note,) = notes_on_far_actions(algorithm(environment(), **SMALL))
    assert note.startswith("note: the actions lie between 290 and 300")
    assert "--transform rescale-actions" in note and "--network.squash-actions" in note


@pytest.mark.parametrize("algorithm", [rollmill.mappo, rollmill.ippo])
def test_gaussian_policies_of_agents_are_named_by_kind(algorithm):
    env = agents(pump=spaces.Box(0.0, 1000.0, (1,), np.float32), valve=spaces.Box(-1.0, 1.0, (1,), np.float32))
    (note,) = notes_on_far_actions(algorithm(env, **SMALL))
    assert note.startswith("note: the actions['pump'] lie between 0 and 1000")


@pytest.mark.parametrize(
    "graph",
    [
        lambda: rollmill.ppo(environment(), network={"squash_actions": True}, **SMALL),
        lambda: rollmill.ppo(rollmill.transform(environment(), "rescale-actions"), **SMALL),
        lambda: rollmill.ppo(environment(spaces.Discrete(300)), **SMALL),
        lambda: rollmill.ppo("Pendulum-v1", **SMALL),
        # 1,000 wide, with a standard deviation of exp(5) = 148: 297 on each side are explored.
        lambda: rollmill.ppo(
            environment(spaces.Box(-500.0, 500.0, (1,), np.float32)), network={"initial_log_std": 5.0}, **SMALL
        ),
        lambda: rollmill.sac(environment(), num_envs=4),
        lambda: rollmill.td3(environment(), num_envs=4),
    ],
    ids=["squashed", "rescaled", "discrete", "near", "wide", "sac", "td3"],
)
def test_policies_without_a_note(graph):
    assert notes_on_far_actions(graph()) == []


def test_a_training_says_it_once(tmp_path, capsys):
    rollmill.train(rollmill.ppo(environment(), **SMALL), run_dir=tmp_path / "run", tensorboard=False)
    assert capsys.readouterr().err.count("the actions lie between 290 and 300") == 1
