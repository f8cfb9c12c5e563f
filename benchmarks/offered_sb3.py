"""Stable-Baselines3's PPO on several sides of an environment, in turns in one process; for offered.py.

The argument is a JSON object: the environment, its sides, the seed, the number of copies, and the environment
steps. Hyperparameters are the defaults of Stable-Baselines3, with the same batch for several copies. The greedy
policy is evaluated on the side made for Gymnasium, whatever it was trained on.
"""

import json
import os
import sys
import time
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecMonitor

BATCH = 2_048
STEPPED = 500
"""Steps of all copies without learning, in each turn."""
REACH, SHOVE, LIMIT = 2.0, 0.05, 100


class Sledge(gymnasium.Env):
    """An environment of one's own: shove a sledge to the middle of a line, and keep it there."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._state = np.array([self.np_random.uniform(-1, 1), 0.0], np.float32)
        return self._state, {}

    def step(self, action: Any) -> Any:
        velocity = np.float32(0.98) * self._state[1] + np.float32(SHOVE * (int(action) - 1))
        position = self._state[0] + np.float32(0.1) * velocity
        self._state = np.array([position, velocity], np.float32)
        return self._state, 1.0 - float(abs(position)), bool(abs(position) > REACH), False, {}


def sledge() -> Any:
    """Returns the same environment in JAX, as one of Rollmill."""
    import jax
    import jax.numpy as jnp

    import rollmill

    def reset(key: Any, params: Any) -> Any:
        state = jnp.stack([jax.random.uniform(key, (), minval=-1, maxval=1), 0.0])
        return state, state

    def step(key: Any, state: Any, action: Any, params: Any) -> Any:
        velocity = 0.98 * state[1] + SHOVE * (action - 1)
        position = state[0] + 0.1 * velocity
        state, gone = jnp.stack([position, velocity]), jnp.abs(position) > REACH
        return rollmill.Timestep(state, state, 1.0 - jnp.abs(position), gone, jnp.asarray(False), {})

    spaces = Sledge.observation_space, Sledge.action_space
    return rollmill.time_limit(rollmill.Environment("Sledge-v0", reset, step, *spaces, params={}), LIMIT)


class RollmillVecEnv(VecEnv):
    """A vector of Gymnasium with `autoreset_mode="SameStep"` in the form of Stable-Baselines3."""

    def __init__(self, envs: Any) -> None:
        self.envs, self.actions = envs, None
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> Any:
        observations, _ = self.envs.reset(seed=self._seeds[0])
        self._reset_seeds()
        return observations

    def step_async(self, actions: Any) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        observations, rewards, terminated, truncated, found = self.envs.step(self.actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for copy in np.flatnonzero(terminated | truncated):
            cut = bool(truncated[copy] and not terminated[copy])
            infos[copy] = {"terminal_observation": found["final_obs"][copy], "TimeLimit.truncated": cut}
        return observations, rewards, terminated | truncated, infos

    def close(self) -> None:
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> Any:
        return [getattr(self.envs, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *arguments: Any, indices: Any = None, **options: Any) -> Any:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> Any:
        return [False for _ in self._get_indices(indices)]


def of_gymnasium(environment: str) -> Any:
    """Returns an environment made for Gymnasium."""
    if environment == "cartpole":
        return gymnasium.make("CartPole-v1")
    return gymnasium.wrappers.TimeLimit(Sledge(), LIMIT)


def environments(environment: str, side: str, copies: int) -> VecEnv:
    """Returns what Stable-Baselines3 trains on: one side's copies, each by itself or as one vector."""
    if side == "gymnasium":
        return make_vec_env(lambda: of_gymnasium(environment), n_envs=copies)
    import rollmill

    offered = "CartPole-v1" if environment == "cartpole" else sledge()
    if side == "single":
        return make_vec_env(lambda: rollmill.to_gymnasium(offered), n_envs=copies)
    return VecMonitor(RollmillVecEnv(rollmill.to_gymnasium(offered, copies, autoreset_mode="SameStep")))


class Side:
    """A training of one side, and the times of its turns."""

    def __init__(self, order: dict[str, Any], side: str) -> None:
        self.model = PPO("MlpPolicy", environments(order["environment"], side, order["copies"]),
                         n_steps=BATCH // order["copies"], seed=order["seed"])  # fmt: skip
        self.stepped = environments(order["environment"], side, order["copies"])
        self._actions = np.random.default_rng(order["seed"])
        self._make = lambda: make_vec_env(lambda: of_gymnasium(order["environment"]), n_envs=20)
        self.stepped.reset()
        self.step()  # compiles
        self.training: list[dict[str, float]] = []
        self.stepping: list[dict[str, float]] = []
        self.before = self.greedy()

    def turn(self) -> None:
        """Trains one rollout with its updates, and steps without learning."""
        self.training.append(timed(BATCH, lambda: self.model.learn(BATCH, reset_num_timesteps=False)))
        self.stepping.append(timed(STEPPED * self.stepped.num_envs, self.step))

    def step(self) -> None:
        """Steps all copies by random actions."""
        for _ in range(STEPPED):
            actions = self._actions.integers(self.stepped.action_space.n, size=self.stepped.num_envs)
            self.stepped.step(actions)

    def greedy(self) -> float:
        """Returns the mean return of the greedy policy over 100 episodes."""
        returns, _ = evaluate_policy(self.model, self._make(), 100, return_episode_rewards=True)
        return float(np.mean(returns))

    def result(self) -> dict[str, Any]:
        """Returns the times and the returns."""
        episodes = [episode["r"] for episode in self.model.ep_info_buffer or []]
        return {
            "training": self.training,
            "stepping": self.stepping,
            "before": self.before,
            "last": float(np.mean(episodes)),
            "greedy": self.greedy(),
        }


def timed(steps: int, action: Any) -> dict[str, float]:
    """Returns the wall and CPU seconds of an action that makes so many steps."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return {"steps": steps, "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    sides = {side: Side(order, side) for side in order["sides"]}
    for number in range(order["steps"] // BATCH):
        for side in list(sides)[:: -1 if number % 2 else 1]:
            sides[side].turn()
    versions = {each.__name__: each.__version__ for each in (stable_baselines3, gymnasium, torch, np)}
    results = {name: side.result() for name, side in sides.items()}
    print(json.dumps({**order, "versions": versions, "sides": results}))


if __name__ == "__main__":
    main()
