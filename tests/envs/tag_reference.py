"""WarpDrive's NumPy environments as plain histories: what every agent saw and was paid in one episode.

rl-warp-drive is installed without what it depends on (`make test` does so): of gym, its environments take the
spaces alone, for which Gymnasium's do, and torch and numba stay away from them.
"""

import importlib
import importlib.util
import os
import sys
import types
from typing import NamedTuple

import gymnasium
import numpy as np
import pytest

INSTALL = "pip install --no-deps rl-warp-drive==2.7.1"


class Episode(NamedTuple):
    """One episode: `T` steps, `A` agents, taggers first. States and observations have one row more."""

    observation: np.ndarray
    reward: np.ndarray
    done: np.ndarray
    states: dict[str, np.ndarray]

    @property
    def length(self):
        return len(self.reward)


def load(module):
    """A module of rl-warp-drive; without the package a skip, or a failure where the peers are required."""
    if importlib.util.find_spec("example_envs") is None:
        if os.environ.get("ROLLMILL_REQUIRE_PEERS"):
            pytest.fail(f"rl-warp-drive is not installed, which this run requires: {INSTALL}")
        pytest.skip(f"parity with WarpDrive needs its package: {INSTALL}", allow_module_level=True)
    gym = types.ModuleType("gym")
    gym.spaces = gymnasium.spaces
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("gym") is None:
            patch.setitem(sys.modules, "gym", gym)
        return importlib.import_module(module)


def grid_world(**options):
    return load("example_envs.tag_gridworld.tag_gridworld").TagGridWorld(**options)


def continuous(seed, num_taggers, num_runners, **options):
    """With the taggers first among the agents, who are in any order otherwise."""
    module = load("example_envs.tag_continuous.tag_continuous")
    env = module.TagContinuous(num_taggers, num_runners, seed=seed, **options)
    agents = range(num_taggers + num_runners)
    kinds = np.argsort([-env.agent_type[agent] for agent in agents], kind="stable")
    env.skill_levels = [env.skill_levels[agent] for agent in kinds]
    env.step_rewards = [env.step_rewards[agent] for agent in kinds]
    env.agent_type = {agent: int(agent < num_taggers) for agent in agents}
    env.taggers = {agent: True for agent in agents if agent < num_taggers}
    env.runners_at_reset = {agent: True for agent in agents if agent >= num_taggers}
    return env


def play(env, actions):
    """One episode under `actions [T, A]` or `[T, A, 2]`; shorter where it ends."""
    agents = range(env.num_agents)
    seen, paid, done = [env.reset()], [], []
    for choices in actions:
        observation, reward, ends, _ = env.step(dict(enumerate(choices)))
        seen.append(observation)
        paid.append([reward[agent] for agent in agents])
        done.append(bool(ends["__all__"]))
        if done[-1]:
            break
    rows = np.array([[observation[agent] for agent in agents] for observation in seen])
    states = {name: values[: len(seen)] for name, values in env.global_state.items()}
    return Episode(rows, np.array(paid), np.array(done), states)
