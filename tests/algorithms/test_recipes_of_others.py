"""Recipes with the defaults of other libraries: sizes that count there in steps, here in updates."""

import pytest

import rollmill
from rollmill.recipes.others import RECIPES
from rollmill.runs.algorithms import find_algorithm

ENV = {"dqn": "CartPole-v1", "ppo": "CartPole-v1", "sac": "Pendulum-v1", "td3": "Pendulum-v1"}
SAMPLES = {"sb3-ppo": 64, "cleanrl-ppo": 128, "cleanrl-ppo-continuous": 64}
"""Of a minibatch, as `batch_size` of Stable-Baselines3 and `minibatch_size` of CleanRL."""
STEPS_A_MOVE = {"sb3-dqn": 10_000, "cleanrl-dqn": 500}
"""Environment steps between moves of the target network."""


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_fit_their_algorithms(name):
    recipe = RECIPES[name]()
    graph = find_algorithm(recipe.algorithm).build(rollmill.make(ENV[recipe.algorithm]), recipe.config)
    steps = graph.loops.iterations * graph.loops.batch_size
    assert abs(steps - recipe.config.total_timesteps) < graph.loops.batch_size


@pytest.mark.parametrize("name", SAMPLES)
def test_minibatches_are_as_large_as_there(name):
    config = RECIPES[name]().config
    assert config.num_envs * config.num_steps // config.num_minibatches == SAMPLES[name]


@pytest.mark.parametrize("name", STEPS_A_MOVE)
def test_target_networks_move_as_often_as_there(name):
    config = RECIPES[name]().config
    steps_per_update = config.num_envs * config.num_steps / config.gradient_steps
    assert config.target_interval * steps_per_update == STEPS_A_MOVE[name]
