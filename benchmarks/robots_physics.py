"""Physics of all robots' tasks beside C MuJoCo, by value.

    python benchmarks/robots_physics.py [Ant ...] [--states 1000] [--visited 500] [--seconds 10] [--trained FOLDER]

Of each model: accelerations without constraints in random states; single steps with constraints, with 4 iterations
in single and 8 in double precision, from states that MuJoCo comes to under random controls, and that trained
policies visit, if robots_learning.py wrote their files to the folder; and in double precision the drift of energy
and momentum in some seconds at 1 kHz without gravity, damping, actuators and constraints. MuJoCo's solver stops
after as many iterations as ours, and in a second comparison once it has converged. Differences are relative to 1
and the greatest number of a state. Each precision is a process of its own, compiled with few optimisations, which
takes a third of the time. Writes results/robots-physics.json, and keeps the models in it that were not asked for.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from measure import options, read_result, some_of, write_result

from rollmill import physics
from rollmill.envs.robots import MODELS, TASKS

KEPT, RESTARTS = 10, 10
"""Steps for which controls are kept; times that the robot starts anew."""

QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Flags of XLA."""

mj: Any = mujoco


def compiled(name: str, *disabled: str, iterations: int = 100) -> Any:
    """Returns MuJoCo's model of a task, whose solver stops by its iterations, and without some parts."""
    model = mj.MjModel.from_xml_string(MODELS[name]())
    model.opt.iterations, model.opt.tolerance = iterations, 1e-12
    for flag in ("ISLAND", *disabled):
        model.opt.disableflags |= int(getattr(mj.mjtDisableBit, f"mjDSBL_{flag}"))
    return model


def accelerations(model: physics.Model, *before: np.ndarray) -> np.ndarray:
    """Returns our accelerations in many states, given coordinates, velocities, warm starts and controls."""

    def one(q: jax.Array, v: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
        state = physics.initial_state(model, q, v)
        return physics.step(model, replace(state, accelerations=w), u).accelerations

    return np.asarray(jax.jit(jax.vmap(one))(*(jnp.asarray(part, float) for part in before)), float)


def compared(ours: np.ndarray, theirs: np.ndarray, limits: tuple[float, ...]) -> dict[str, Any]:
    """Returns the greatest difference and its quantiles, and the share of states within limits."""
    gaps = np.abs(ours - theirs).max(axis=1) / (1 + np.abs(theirs).max(axis=1))
    shares = {f"within_{limit:g}": float(np.mean(gaps < limit)) for limit in limits}
    return {"states": len(gaps), "greatest": float(gaps.max()), "median": float(np.median(gaps)), **shares}


def unconstrained(name: str, count: int) -> dict[str, Any]:
    """Compares accelerations without constraints in random states."""
    model, random = compiled(name, "CONSTRAINT"), np.random.default_rng(0)
    data, theirs = mj.MjData(model), []
    q = model.qpos0 + 0.5 * random.normal(size=(count, model.nq))
    v, u = 2.0 * random.normal(size=(count, model.nv)), random.uniform(-1, 1, (count, model.nu))
    for number in range(count):
        mj.mj_normalizeQuat(model, q[number])
        data.qpos[:], data.qvel[:], data.ctrl[:] = q[number], v[number], u[number]
        mj.mj_forward(model, data)
        theirs.append(np.array(data.qacc))
    ours = accelerations(physics.load(model), q, v, np.zeros_like(v), u)
    return compared(ours, np.array(theirs), (1e-5, 1e-4))


def constrained(name: str, count: int) -> dict[str, Any]:
    """Compares steps from states that a robot comes to under random controls."""
    model, random = compiled(name), np.random.default_rng(0)
    data = mj.MjData(model)
    limited = model.actuator_ctrllimited.astype(bool)
    low, high = np.where(limited[:, None], model.actuator_ctrlrange, [[-1.0, 1.0]]).T
    before: list[list[np.ndarray]] = [[], [], [], []]
    for number in range(count):
        if number % (count // RESTARTS) == 0:
            mj.mj_resetData(model, data)
            data.qvel[:] = 0.1 * random.normal(size=model.nv)
        if number % KEPT == 0:
            data.ctrl[:] = random.uniform(low, high)
        for seen, now in zip(before, (data.qpos, data.qvel, data.qacc_warmstart, data.ctrl), strict=True):
            seen.append(np.array(now))
        mj.mj_step(model, data)
    return steps_compared(name, [np.array(seen) for seen in before])


def of_trained_policy(name: str, file: Path) -> dict[str, Any]:
    """Compares steps from states that a trained policy visits."""
    saved = np.load(file)
    return steps_compared(
        name, [np.asarray(saved[n], float) for n in ("positions", "velocities", "accelerations", "controls")]
    )


def steps_of_mujoco(model: Any, before: list[np.ndarray]) -> tuple[np.ndarray, list[int], list[int]]:
    """Returns MuJoCo's accelerations, contacts and rows in some states."""
    data, accelerations, contacts, rows = mj.MjData(model), [], [], []
    for q, v, w, u in zip(*before, strict=True):
        mj.mj_resetData(model, data)
        data.qpos[:], data.qvel[:], data.qacc_warmstart[:], data.ctrl[:] = q, v, w, u
        mj.mj_step(model, data)
        accelerations.append(np.array(data.qacc))
        contacts.append(int(data.ncon))
        rows.append(int(data.nefc))
    return np.array(accelerations), contacts, rows


def steps_compared(name: str, before: list[np.ndarray]) -> dict[str, Any]:
    """Compares our steps from some states with MuJoCo's after as many iterations, and with its converged ones."""
    model = compiled(name)
    converged, contacts, rows = steps_of_mujoco(model, before)
    found: dict[str, Any] = {
        "contacts": {"mean": float(np.mean(contacts)), "most": max(contacts)},
        "rows": {"mean": float(np.mean(rows)), "most": max(rows)},
    }
    iterations = 8 if jax.config.read("jax_enable_x64") else 4
    own = physics.load(model, iterations=iterations, line_search_iterations=iterations)
    ours = accelerations(own, *before)
    theirs, _, _ = steps_of_mujoco(compiled(name, iterations=iterations), before)
    found |= {
        "iterations": iterations,
        "both_stopped": compared(ours, theirs, (1e-3,)),
        "mujoco_converged": compared(ours, converged, (1e-3,)),
        "mujoco_stopped_and_converged": compared(theirs, converged, (1e-3,)),
    }
    return found


def drift(name: str, seconds: float) -> dict[str, Any]:
    """Returns how much energy and momentum change without forces; momentum of robots of one free tree."""
    model = compiled(name, "CONSTRAINT", "GRAVITY", "SPRING", "DAMPER", "ACTUATION")
    model.opt.timestep, model.opt.integrator = 0.001, mj.mjtIntegrator.mjINT_EULER
    model.actuator_gainprm[:], model.actuator_biasprm[:] = 0.0, 0.0
    own, random = physics.load(model, sensors=False), np.random.default_rng(0)
    start = physics.initial_state(own, None, 0.5 * random.normal(size=model.nv))
    control, steps = jnp.zeros(model.nu), round(seconds / model.opt.timestep)
    end = jax.jit(lambda s: jax.lax.fori_loop(0, steps, lambda _, s: physics.step(own, s, control), s))(start)
    readings = []
    for state in (start, end):
        data = mj.MjData(model)
        data.qpos[:], data.qvel[:] = np.asarray(state.positions), np.asarray(state.velocities)
        mj.mj_forward(model, data)
        mj.mj_energyVel(model, data)
        mj.mj_subtreeVel(model, data)
        readings.append((data.energy[1], np.concatenate([data.subtree_linvel[0], data.subtree_angmom[0]])))
    (energy, momentum), (energy_after, momentum_after) = readings
    found = {"seconds": seconds, "energy": float(abs(energy_after / energy - 1))}
    if [kind for kind in model.jnt_type if kind == 0] and np.sum(model.body_parentid[1:] == 0) == 1:
        found["momentum"] = float(np.abs(momentum_after - momentum).max() / np.abs(momentum).max())
    return found


def checked(name: str, chosen: Any) -> dict[str, Any]:
    """Returns all comparisons of one model, in this process's precision."""
    found = {
        "unconstrained": unconstrained(name, chosen.states),
        "constrained": constrained(name, chosen.visited),
    }
    if jax.config.read("jax_enable_x64"):
        found["drift"] = drift(name, chosen.seconds)
    file = chosen.trained and chosen.trained / f"robots-visited-{name.lower()}.npz"
    return {**found, "trained": of_trained_policy(name, file)} if file and file.exists() else found


def main() -> None:
    """Starts a process for each model and precision, or is one of them."""
    chosen = options(
        __doc__,
        {"tasks": some_of(TASKS)},
        states=1_000,
        visited=500,
        seconds=10.0,
        processes=os.cpu_count() or 1,
        trained=(Path, "the folder of states that trained policies visit"),
        file=Path,
    )
    if chosen.file:
        (name,) = chosen.tasks
        chosen.file.write_text(json.dumps(checked(name, chosen)))
        return
    result: dict[str, Any] = {name: {} for name in TASKS} | read_result("robots-physics", chosen.output)
    result["mujoco"] = mujoco.__version__

    def run(work: tuple[str, str]) -> None:
        name, precision = work
        file = chosen.output / f".robots-physics-{name}-{precision}.json"
        chosen.output.mkdir(parents=True, exist_ok=True)
        sizes = ["--states", chosen.states, "--visited", chosen.visited, "--seconds", chosen.seconds]
        sizes += ["--trained", chosen.trained] if chosen.trained else []
        is_double = str(int(precision == "float64"))
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": is_double, "XLA_FLAGS": QUICKLY}
        command = [sys.executable, __file__, name, *map(str, sizes), "--file", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name} {precision}: {done.stderr[-1000:]}", flush=True)
            return
        result[name][precision] = json.loads(file.read_text())
        file.unlink()
        print(name, precision, json.dumps(result[name][precision]), flush=True)
        write_result("robots-physics", result, chosen.output)

    with ThreadPoolExecutor(chosen.processes) as pool:
        work = [(name, precision) for name in chosen.tasks for precision in ("float32", "float64")]
        list(pool.map(run, work))


if __name__ == "__main__":
    main()
