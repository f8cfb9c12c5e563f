"""Writes docs/figures/robots-NAME.gif, small pictures of the robots' tasks at play.

    python scripts/robot_pictures.py [NAME ...] [--runs FOLDER] [--steps 150]

Policies are those of the runs FOLDER/robots-NAME. A robot without a run moves under random controls or by simple
laws, and C MuJoCo steps it, so that nothing is compiled. MuJoCo's renderer has to be installed.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import mujoco
import numpy as np

import rollmill
from rollmill.envs.robots import (
    TASKS,
    ant,
    anymal,
    ball_balance,
    cartpole,
    franka_cabinet,
    hand_model,
    humanoid,
    ingenuity,
    quadcopter,
)
from rollmill.envs.robots.pictures import robot_of
from rollmill.pictures import resize, write_frames

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
HEIGHT, WIDTH, FPS = 150, 200, 15
MAX_BYTES = 150_000
EVERY, KEPT = 4, 15
"""Steps for each frame, and for which random controls are kept."""


class Motion(NamedTuple):
    """How a robot is moved that has no policy."""

    text: str
    substeps: int
    control: Callable[[Any, int], np.ndarray]
    """Of MuJoCo's state and the step."""
    lowest: float = -1.0
    """Height of the first body at which its pictures end."""


def motions() -> dict[str, Motion]:
    """Returns the motion of each task."""
    hover = np.concatenate([np.zeros(8), np.full(4, 0.62)])
    sway = np.concatenate([np.full(8, 0.1), np.full(4, 0.03)])
    lift = np.array([0.0, 0.0, 1.35, 0.0, 0.0, 1.35])
    pose = np.array(franka_cabinet.POSE)
    return {
        "Ant": Motion(ant.model_text(), ant.SUBSTEPS, by_chance(0.0, 0.7), 0.31),
        "Anymal": Motion(anymal.model_text(), anymal.SUBSTEPS, trotting),
        "BallBalance": Motion(ball_balance.model_text(), ball_balance.SUBSTEPS, balancing),
        "Cartpole": Motion(cartpole.MODEL, cartpole.SUBSTEPS, by_chance(0.0, 0.02)),
        "FrankaCabinet": Motion(franka_cabinet.model_text(), franka_cabinet.SUBSTEPS, by_chance(pose, 0.5)),
        "ShadowHand": Motion(hand_model.model_text(), hand_model.SUBSTEPS, grasping),
        "Humanoid": Motion(humanoid.model_text(), humanoid.SUBSTEPS, by_chance(0.0, 0.3), 0.8),
        "Ingenuity": Motion(ingenuity.MODEL, ingenuity.SUBSTEPS, by_chance(lift, 0.05), 0.5),
        "Quadcopter": Motion(quadcopter.model_text(), quadcopter.SUBSTEPS, by_chance(hover, sway), 0.3),
    }


def by_chance(middle: Any, reach: Any) -> Callable[[Any, int], np.ndarray]:
    """Returns random controls around others, each of which is kept for a while."""

    def control(data: Any, count: int) -> np.ndarray:
        random = np.random.default_rng(count // KEPT)
        return middle + reach * random.uniform(-1, 1, len(data.ctrl))

    return control


def grasping(data: Any, count: int) -> np.ndarray:
    """Returns targets of the hand's servos: fingers that bend and stretch one after the other."""
    low, high = np.array([actuator.ctrlrange for actuator in map(data.model.actuator, range(data.model.nu))]).T
    phases = np.array([joint.startswith(("MF", "LF")) for joint in hand_model.SERVOS])
    bent = np.array(
        [not joint.startswith("WR") and not joint.endswith(("J3", "J4")) for joint in hand_model.SERVOS]
    )
    share = 0.25 + 0.2 * np.sin(count / 12 + np.pi * phases)
    return np.where(bent, low + share * (high - low), np.clip(0.0, low, high))


def trotting(data: Any, count: int) -> np.ndarray:
    """Returns angles of the joints with which the quadruped walks: legs across from each other swing together."""
    angles = np.array(anymal.DEFAULTS).reshape(4, 3)
    for own, (leg, (front, _)) in zip(angles, anymal.LEGS.items(), strict=True):
        phase = 2 * np.pi * 1.8 * count * anymal.TIME_STEP + (0 if leg in ("LF", "RH") else np.pi)
        raised = 0.5 * max(0.0, np.sin(phase))
        own[1:] += 0.25 * np.cos(phase) + 0.5 * front * raised, -front * raised
    return angles.reshape(12)


def balancing(data: Any, count: int) -> np.ndarray:
    """Returns angles of the knees that lower the tray where the ball is not."""
    towards = np.array([[np.cos(angle), np.sin(angle)] for angle in ball_balance.ANGLES])
    return np.clip(0.6 * towards @ (data.qpos[13:15] + 0.6 * data.qvel[12:14]), -0.5, 0.5)


def by_run(run: Path, steps: int) -> list[np.ndarray]:
    """Returns the pictures of a policy that was trained."""
    return list(rollmill.render(run, max_steps=steps, seed=1))[::EVERY]


def without_run(name: str, steps: int) -> list[np.ndarray]:
    """Returns the pictures of a robot that has no policy."""
    env: Any = TASKS[name]()
    draw: Callable[..., Any] = env.draw
    _, state = env.reset(jax.random.key(2), env.params)
    robot, motion = robot_of(state.inner), motions()[name]
    compiled = mujoco.MjModel.from_xml_string(motion.text)
    data: Any = mujoco.MjData(compiled)
    data.qpos[:], data.qvel[:] = np.asarray(robot.positions), np.asarray(robot.velocities)
    pictures: list[np.ndarray] = []
    for count in range(steps):
        data.ctrl[:] = motion.control(data, count)
        if count % EVERY == 0:
            shown = replace(robot, positions=np.array(data.qpos))
            inner = shown if state.inner is robot else replace(state.inner, robot=shown)
            pictures.append(resize(draw(replace(state, inner=inner), env.params), HEIGHT, WIDTH))
        mujoco.mj_step(compiled, data, nstep=motion.substeps)
        if data.xpos[1, 2] < motion.lowest:
            break
    return pictures


def main() -> None:
    """Writes the pictures of the tasks that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(TASKS))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--steps", type=int, default=150)
    chosen = parser.parse_args()
    for name in chosen.names:
        run = chosen.runs / f"robots-{name}"
        pictures = by_run(run, chosen.steps) if run.exists() else without_run(name, chosen.steps)
        path = FIGURES / f"robots-{name}.gif"
        for skipped in (1, 2, 3):  # fewer frames where they are too large
            frames = [resize(picture, HEIGHT, WIDTH) for picture in pictures[::skipped]]
            write_frames(path, frames, fps=FPS)
            if path.stat().st_size <= MAX_BYTES:
                break
        size, played = path.stat().st_size // 1000, run if run.exists() else "no policy"
        print(f"{path.name}: {len(frames)} frames, {size} kB, {played}")


if __name__ == "__main__":
    main()
