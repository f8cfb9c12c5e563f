"""Writes docs/figures/robots-NAME.gif, small pictures of the robots' tasks at play.

    python scripts/robot_pictures.py [NAME ...] [--runs FOLDER] [--steps 150]

Policies are those of the runs FOLDER/robots-NAME; a robot without a run moves by random actions, each of which it
keeps for a while. MuJoCo's renderer has to be installed.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rollmill
from rollmill.envs.robots import TASKS
from rollmill.pictures import resized, write_frames

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
HEIGHT, WIDTH, FPS = 150, 200, 15
MAX_BYTES = 150_000
KEPT, REACH = 12, 0.6
"""Steps for which a random action is kept, and its bound."""


def by_run(run: Path, steps: int) -> np.ndarray:
    """Returns the pictures of a policy that was trained."""
    return rollmill.render(run, max_steps=steps, seed=1)


def by_chance(name: str, steps: int) -> Iterator[np.ndarray]:
    """Yields the pictures of a robot under random actions."""
    env: Any = TASKS[name]()
    step, random = jax.jit(env.step), np.random.default_rng(0)
    _, state = env.reset(jax.random.key(2), env.params)
    for count in range(steps):
        if count % KEPT == 0:
            action = jnp.asarray(random.uniform(-REACH, REACH, env.action_space.shape), jnp.float32)
        yield env.draw(state, env.params)
        timestep = step(jax.random.key(0), state, action, env.params)
        state = timestep.state
        if bool(timestep.terminated):
            return


def main() -> None:
    """Writes the pictures of the tasks that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(TASKS))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--steps", type=int, default=150)
    chosen = parser.parse_args()
    for name in chosen.names:
        run = chosen.runs / f"robots-{name}"
        pictures = by_run(run, chosen.steps) if run.exists() else list(by_chance(name, chosen.steps))
        path = FIGURES / f"robots-{name}.gif"
        for every in (4, 5, 6, 8, 10):  # fewer frames where they are too large
            frames = [resized(picture, HEIGHT, WIDTH) for picture in pictures[::every]]
            write_frames(path, frames, fps=FPS)
            if path.stat().st_size <= MAX_BYTES:
                break
        size, played = path.stat().st_size // 1000, run if run.exists() else "random actions"
        print(f"{path.name}: {len(frames)} frames, {size} kB, {played}")


if __name__ == "__main__":
    main()
