"""PPO on images that a GPU computes itself: these sources beside earlier ones, in turns.

    python benchmarks/image_versions.py BEFORE [--rounds 3] [--iterations 120]

BEFORE is a folder with the sources of another version (its `src`). Both sides train the network of Mnih et al.
(2015) with one torso, by 256 environments and 32 steps, on 84 x 84 x 4 bytes, and have to report equal numbers of
environment steps. Speeds are those of the second half of a training, from its metrics.jsonl. Writes
results/images-gpu.json.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
from measure import HERE, check_equal_work, in_turns, options, platform, ratios, spreads, write_result

TRAINING = """
import json, math, sys
from pathlib import Path

import equinox as eqx, gymnasium, jax, jax.numpy as jnp, numpy as np
import rollmill
from rollmill.core.types import Environment, Timestep

FRAMES = np.random.default_rng(0).integers(0, 256, (16, 84, 84, 4), np.uint8)
iterations, directory = int(sys.argv[1]), Path(sys.argv[2])

class State(eqx.Module):
    frame: jax.Array
    steps: jax.Array

def reset(key, params):
    state = State(jax.random.randint(key, (), 0, 16), jnp.int32(0))
    return jnp.asarray(FRAMES)[state.frame], state

def step(key, state, action, params):
    after = State((state.frame + 1) % 16, state.steps + 1)
    reward = jnp.float32(action == state.frame % 6)
    return Timestep(jnp.asarray(FRAMES)[after.frame], after, reward, after.steps >= 200, jnp.asarray(False), {})

images = Environment(
    "Images", reset, step, gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8), gymnasium.spaces.Discrete(6), ()
)
settings = dict(
    total_timesteps=256 * 32 * iterations, num_envs=256, num_steps=32, num_minibatches=4, update_epochs=4,
    learning_rate=2.5e-4, anneal_lr=False, clip_coef=0.1, clip_vloss=False, ent_coef=0.01,
    network=rollmill.NetworkConfig(shared_torso=True, hidden_sizes=(512,), activation="relu"),
)
if "normalize_values" in rollmill.PPOConfig.__dataclass_fields__:
    settings["normalize_values"] = False
algorithm = rollmill.ppo(images, **settings)
rollmill.train(algorithm, run_dir=directory, tensorboard=False, quiet=True)
rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
rows = [row for row in rows if "env_steps" in row]
late = [row for row in rows if row["env_steps"] >= rows[-1]["env_steps"] / 2]
rate = (late[-1]["env_steps"] - late[0]["env_steps"]) / (late[-1]["seconds"] - late[0]["seconds"])
print(json.dumps({"steps_per_second": rate, "env_steps": rows[-1]["env_steps"]}))
"""


def main() -> None:
    """Trains by both sides in turns, and writes the result."""
    chosen = options(__doc__, {"before": Path}, rounds=3, iterations=120)
    sources = {"now": HERE.parent, "before": chosen.before}
    sides = {name: lambda folder=folder: trained(folder, chosen.iterations) for name, folder in sources.items()}
    runs = in_turns(sides, chosen.rounds)
    check_equal_work({name: each[0]["env_steps"] for name, each in runs.items()})
    speeds = spreads({name: [one["steps_per_second"] for one in each] for name, each in runs.items()})
    result = {
        "before": os.environ.get("ROLLMILL_BEFORE"),
        "device": jax.devices()[0].device_kind,
        "iterations": chosen.iterations,
        "steps_per_second": speeds,
        "ratios": ratios(speeds, "now"),
        "runs": runs,
    }
    print(json.dumps(result, indent=1))
    write_result(f"images-{platform()}", result, directory=chosen.output)


def trained(source: Path, iterations: int) -> dict[str, Any]:
    """Returns what a training by the sources has printed."""
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join([str(source / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-c", TRAINING, str(iterations), f"{folder}/run"]
        environment = {**os.environ, "PYTHONPATH": paths, "ROLLMILL_TYPE_CHECKS": "0"}
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    print(source.name, figures, flush=True)
    return figures


if __name__ == "__main__":
    main()
