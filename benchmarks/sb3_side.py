"""Trains PPO of Stable-Baselines3 to a return. Runs in a Python that has stable-baselines3 2.7.

One argument, a JSON object: `environment`, `settings` of `PPO`, `num_envs`, `seed`, `total_timesteps`, and when to
stop: `every` so many steps the policy plays `episodes` with its most likely action, and a mean of at least
`threshold` ends the training. Prints the steps, the return, and
the CPU seconds that evaluations took.
"""

import json
import sys
import time

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy


def linear(first: float):
    """Returns the schedule that falls to zero over the planned steps."""
    return lambda remaining: remaining * first


class UntilReturn(BaseCallback):
    """Evaluates the policy at regular steps, and stops the training at the threshold."""

    def __init__(self, order, envs) -> None:
        super().__init__()
        self.order, self.envs, self.due, self.seconds, self.result = order, envs, order["every"], 0.0, None

    def _on_step(self) -> bool:
        if self.num_timesteps < self.due:
            return True
        self.due += self.order["every"]
        began = time.process_time()
        self.result, _ = evaluate_policy(self.model, self.envs, self.order["episodes"], deterministic=True)
        self.seconds += time.process_time() - began
        return self.result < self.order["threshold"]


def main() -> None:
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)  # the fastest for networks of this size
    settings = dict(order["settings"])
    for name in ("learning_rate", "clip_range"):
        if isinstance(settings.get(name), str):
            settings[name] = linear(float(settings[name].removeprefix("lin_")))
    training = make_vec_env(order["environment"], order["num_envs"], seed=order["seed"])
    evaluated = make_vec_env(order["environment"], order["num_envs"], seed=order["seed"] + 1_000)
    until = UntilReturn(order, evaluated)
    model = PPO("MlpPolicy", training, seed=order["seed"], device="cpu", **settings)
    model.learn(order["total_timesteps"], callback=until)
    print(json.dumps({"steps": until.num_timesteps, "return": until.result, "evaluations": until.seconds}))


if __name__ == "__main__":
    main()
