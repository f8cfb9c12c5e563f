"""Trains PPO on images by Rollmill or by Stable-Baselines3, and prints what it did as JSON.

One argument, a JSON object: `side`, which is `rollmill` or `sb3`, `num_envs`, `num_steps`, `num_minibatches`,
`epochs`, `iterations` and `warm_up`, the iterations that are not timed. Runs in a Python that has the package of
that name. Both sides train one network on the same environment, and both are asked afterwards for their work.
"""

import json
import math
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

SHAPE = (84, 84, 4)
"""Rows, columns and channels: four gray frames, as Atari's usual wrappers stack them."""

ACTIONS = 6
EPISODE_STEPS = 200
LEARNING_RATE = 2.5e-4
CLIP = 0.1
ENTROPY = 0.01

Order = dict[str, Any]
Done = dict[str, Any]


class Images(gymnasium.Env):
    """Costs next to nothing, and notes when its steps happen.

    Shows sixteen random images in turn; the reward is 1 for the action that the image's number asks for.
    """

    observation_space = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gymnasium.spaces.Discrete(ACTIONS)
    metadata = {"render_modes": []}

    def __init__(self, times: list[float] | None = None):
        self._frames = np.random.default_rng(0).integers(0, 256, (16, *SHAPE), np.uint8)
        self._times = times
        self._steps = 0

    def reset(self, *, seed=None, options=None):
        """Begins an episode with any of the images."""
        super().reset(seed=seed)
        self._episode_steps = 0
        self._frame = int(self.np_random.integers(len(self._frames)))
        return self._frames[self._frame], {}

    def step(self, action):
        """Shows the next image."""
        if self._times is not None:
            self._times.append(time.perf_counter())
        reward = float(action == self._frame % ACTIONS)
        self._episode_steps += 1
        self._frame = (self._frame + 1) % len(self._frames)
        ended = self._episode_steps == EPISODE_STEPS
        return self._frames[self._frame], reward, ended, False, {}


def main() -> None:
    order = json.loads(sys.argv[1])
    times: list[float] = []
    done = {"rollmill": with_rollmill, "sb3": with_sb3}[order["side"]](order, times)
    measured = {"steps_per_second": timed(order, times), "env_steps": len(times)}
    print(json.dumps({**done, **measured, "cpu_seconds": time.process_time(), "peak_bytes": peak_bytes()}))


def timed(order: Order, times: list[float]) -> float:
    """Environment steps a second between the first steps of the first timed and the last iteration."""
    batch = order["num_envs"] * order["num_steps"]
    first, last = batch * order["warm_up"], batch * (order["iterations"] - 1)
    return (last - first) / (times[last] - times[first])


def peak_bytes() -> int:
    """The largest memory that this process has held in RAM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def with_rollmill(order: Order, times: list[float]) -> Done:
    import jax

    import rollmill

    algorithm = rollmill.ppo(
        rollmill.from_gymnasium(lambda: Images(times)),
        total_timesteps=order["num_envs"] * order["num_steps"] * order["iterations"],
        num_envs=order["num_envs"],
        num_steps=order["num_steps"],
        num_minibatches=order["num_minibatches"],
        update_epochs=order["epochs"],
        learning_rate=LEARNING_RATE,
        anneal_lr=False,
        clip_coef=CLIP,
        clip_vloss=False,
        normalize_values=False,
        ent_coef=ENTROPY,
        network=rollmill.NetworkConfig(shared_torso=True, hidden_sizes=(512,), activation="relu"),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = rollmill.train(algorithm, run_dir=Path(folder) / "run", tensorboard=False, quiet=True)
        state = last_state(run.directory)
    weights = [size for name, (size, _) in state.items() if name.startswith("learner.weights.network")]
    (updates,) = (whole for name, (_, whole) in state.items() if name.endswith(".count"))
    return {
        "parameters": sum(weights),
        "gradient_steps": updates,
        "version": version("rollmill"),
        "engine": f"jax {jax.__version__}",
        "threads": len(os.sched_getaffinity(0)),
    }


def last_state(run_dir: Path) -> dict[str, tuple[int, int]]:
    """The size of each array of a run's last checkpoint, and its first four bytes as a whole number."""
    (folder,) = sorted(run_dir.glob("checkpoints/*"), key=lambda each: int(each.name))[-1:]
    content = (folder / "state.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    arrays = {name: each for name, each in json.loads(content[8:begin]).items() if name != "__metadata__"}
    first = lambda each: int.from_bytes(content[begin + each["data_offsets"][0] :][:4], "little")
    return {name: (math.prod(each["shape"]), first(each)) for name, each in arrays.items()}


def with_sb3(order: Order, times: list[float]) -> Done:
    import stable_baselines3
    import torch
    from stable_baselines3.common.vec_env import DummyVecEnv

    model = stable_baselines3.PPO(
        "CnnPolicy",
        DummyVecEnv([lambda: Images(times)] * order["num_envs"]),
        n_steps=order["num_steps"],
        batch_size=order["num_envs"] * order["num_steps"] // order["num_minibatches"],
        n_epochs=order["epochs"],
        learning_rate=LEARNING_RATE,
        clip_range=CLIP,
        ent_coef=ENTROPY,
        device="cpu",
        seed=0,
    )
    model.learn(order["num_envs"] * order["num_steps"] * order["iterations"])
    state = model.policy.optimizer.state_dict()["state"].values()
    return {
        "parameters": sum(weights.numel() for weights in model.policy.parameters()),
        "gradient_steps": max(int(each["step"]) for each in state),
        "version": stable_baselines3.__version__,
        "engine": f"torch {torch.__version__}",
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
