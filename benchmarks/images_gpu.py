"""PPO on images that a GPU computes itself.

    python benchmarks/images_gpu.py [--rounds 3] [--iterations 120]

The network is that of Mnih et al. (2015) with one torso, with 256 environments and 32 steps, on 84 x 84 x 4 bytes.
Speeds are those of the second half of a training, from its metrics.jsonl. Writes results/images-gpu.json.
"""

import tempfile
from pathlib import Path

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from measure import lines_of, options, platform, rate, spread, write_result

import rollmill

FRAMES = np.random.default_rng(0).integers(0, 256, (16, 84, 84, 4), np.uint8)
ENVS, STEPS, EPISODE_STEPS, ACTIONS = 256, 32, 200, 6


class State(eqx.Module):
    """The image that is shown, and the steps of the episode."""

    frame: jax.Array
    steps: jax.Array


def images() -> rollmill.Environment:
    """Returns an environment that shows images in turn; the reward is 1 for the action that the image asks for."""

    def reset(key, params):
        state = State(jax.random.randint(key, (), 0, len(FRAMES)), jnp.int32(0))
        return jnp.asarray(FRAMES)[state.frame], state

    def step(key, state, action, params):
        after = State((state.frame + 1) % len(FRAMES), state.steps + 1)
        reward, ended = jnp.float32(action == state.frame % ACTIONS), after.steps >= EPISODE_STEPS
        return rollmill.Timestep(jnp.asarray(FRAMES)[after.frame], after, reward, ended, jnp.asarray(False), {})

    spaces = gymnasium.spaces.Box(0, 255, FRAMES.shape[1:], np.uint8), gymnasium.spaces.Discrete(ACTIONS)
    return rollmill.Environment("Images", reset, step, *spaces, ())


def speed_of(iterations: int) -> float:
    """Returns the environment steps a second of a training."""
    graph = rollmill.ppo(
        images(),
        total_timesteps=ENVS * STEPS * iterations,
        num_envs=ENVS,
        num_steps=STEPS,
        num_minibatches=4,
        update_epochs=4,
        learning_rate=2.5e-4,
        anneal_lr=False,
        clip_coef=0.1,
        clip_vloss=False,
        ent_coef=0.01,
        normalize_values=False,
        network=rollmill.NetworkConfig(shared_torso=True, hidden_sizes=(512,), activation="relu"),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = rollmill.train(graph, run_dir=Path(folder, "run"), tensorboard=False, quiet=True)
        rows = [row for row in lines_of(run.directory) if "env_steps" in row]
    late = [row for row in rows if row["env_steps"] >= rows[-1]["env_steps"] / 2]
    return rate(late[0], late[-1])


def main() -> None:
    chosen = options(__doc__, rounds=3, iterations=120)
    speeds = spread([speed_of(chosen.iterations) for _ in range(chosen.rounds)])
    print(f"{speeds['median']:,.0f} steps/s", flush=True)
    result = {"device": jax.devices()[0].device_kind, "iterations": chosen.iterations}
    write_result(f"images-{platform()}", {**result, "steps_per_second": {"now": speeds}}, chosen.output)


if __name__ == "__main__":
    main()
