"""Stable-Baselines3's PPO on CartPole-v1 of one side, in a process of its own; for offered.py.

The argument is a JSON object: the side, the seed, the number of copies, and the environment steps. Hyperparameters
are the defaults of Stable-Baselines3, with the same batch for several copies. The greedy policy is evaluated on
Gymnasium's CartPole-v1, whatever it was trained on.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecMonitor

ENV = "CartPole-v1"
BATCH = 2_048


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


def environment(side: str, copies: int) -> Any:
    """Returns what Stable-Baselines3 trains on: one side's environments, each by itself or as one vector."""
    if side == "gymnasium":
        return make_vec_env(ENV, n_envs=copies)
    import rollmill

    if side == "single":
        return make_vec_env(lambda: rollmill.to_gymnasium(ENV), n_envs=copies)
    return VecMonitor(RollmillVecEnv(rollmill.to_gymnasium(ENV, copies, autoreset_mode="SameStep")))


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    copies = order["copies"]
    model = PPO("MlpPolicy", environment(order["side"], copies), n_steps=BATCH // copies, seed=order["seed"])
    model.env.reset()  # compiles
    began = time.perf_counter()
    model.learn(order["steps"])
    seconds = time.perf_counter() - began
    episodes = [episode["r"] for episode in model.ep_info_buffer or []]
    returns, _ = evaluate_policy(model, make_vec_env(ENV, n_envs=20), 100, return_episode_rewards=True)
    done = {
        "steps_per_second": model.num_timesteps / seconds,
        "env_steps": model.num_timesteps,
        "last_100_episodes": float(np.mean(episodes)),
        "greedy_return": float(np.mean(returns)),
    }
    print(json.dumps({**order, **done}))


if __name__ == "__main__":
    main()
