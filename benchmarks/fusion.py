"""Gains of vectorisation and fusion of a simulator's steps, one without the other and both, on one GPU.

    python benchmarks/fusion.py [--quick] [--device cpu] [--budget 330] [--sweeps complexity]

After Gleeson, Snider, Yang, Gabel, de Lara and Pekhimenko, "Optimizing Data Collection in Deep Reinforcement
Learning" (arXiv 2207.07736). Random actions are collected from CartPole-v1 and from a simulator of given
complexity (`oscillators.py`) by Gymnasium on the CPU, PyTorch (eager, in CUDA graphs, compiled, both), XLA
(`vmap` and `lax.scan`) and Rollmill's kernels. All do the same arithmetic, which is checked first, reset by
themselves, and write the same numbers into a trajectory; each draws random numbers as its library does. Sides take
turns, and a figure is the median of several times, each that of several rollouts in a row.

Three sweeps: over the number of environments, over the steps that one launch holds, over the simulator's
complexity. A side that cannot run, or has no time left within `--budget` seconds, is recorded as absent with its
reason. Needs torch. Writes results/fusion-study.json (or another `--name`) after each sweep.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory of the same GPU

import argparse
import time
from collections.abc import Sequence

import jax
from fusion_sides import Case, Way
from fusion_simulators import Simulator, cartpole_simulator, oscillators_simulator
from fusion_study import Plan, Study
from measure import one_of, options, some_of
from oscillators import Complexity

FULL = Plan()
QUICK = Plan(16, (1, 16), 16, 16, (1, 4, 16), 4, (2, 8), (1, 4), (1, 8), 8)
SWEEPS = ("environments", "steps", "complexity", "oscillators")
"""The last is the first once more, of Oscillators."""
LAUNCHES = {"few": [(16, 1), (32, 1)], "many": [(32, 1), (64, 2), (128, 4)]}


# --- the sweeps ----------------------------------------------------------------------------------------


def over_environments(study: Study, simulator: Simulator, sizes: Sequence[int], compiled: int) -> None:
    """(a): all sides, a whole rollout in one launch where a side can."""
    plan, works = study.plan, []
    for num_envs in sizes:
        launches = LAUNCHES["few" if num_envs <= 4_096 else "many"]
        ways = [
            Way("XLA", 1),
            Way("XLA", plan.most_compiled),
            *(Way("kernel", plan.num_steps, launch) for launch in launches),
            Way("PyTorch", 1),
            Way("PyTorch, CUDA graph", plan.num_steps),
            Way("torch.compile", compiled),
            Way("torch.compile, CUDA graph", compiled),
        ]
        if num_envs <= plan.most_on_cpu:
            ways.append(Way("Gymnasium", 1))
        works.append((Case(simulator, num_envs, plan.num_steps, study.options.device), ways))
    study.sweep("environments", works)


def over_steps(study: Study, simulator: Simulator) -> None:
    """(b): as many steps in one launch as said, at one number of environments."""
    plan = study.plan
    few = [count for count in plan.fused if count <= plan.most_compiled]
    ways = [
        *(Way("kernel", count, (32, 1)) for count in plan.fused),
        *(Way("XLA", count) for count in few),
        *(Way("XLA, calls", count) for count in plan.fused),
        *(Way("PyTorch, CUDA graph", count) for count in plan.fused),
        *(Way(side, count) for count in few for side in ("torch.compile", "torch.compile, CUDA graph")),
    ]
    study.sweep("steps fused", [(Case(simulator, plan.at, plan.num_steps, study.options.device), ways)])


def over_complexity(study: Study) -> None:
    """(c): state, operations and memory of a step, one after the other, around one simulator."""
    plan, base = study.plan, Complexity()
    axes = {
        "operations": [base._replace(substeps=count) for count in plan.substeps],
        "state": [
            base._replace(oscillators=count, observed=min(count, base.observed)) for count in plan.oscillators
        ],
        "memory": [base._replace(oscillators=plan.wide, observed=count) for count in plan.observed],
    }
    for complexities in axes.values():
        works = []
        for complexity in complexities:
            simulator = oscillators_simulator(complexity)
            if simulator.name in study.checks:
                continue
            study.check(simulator)
            unroll = max(1, min(plan.most_compiled, 64 // complexity.substeps))
            ways = [
                Way("XLA", 1),
                *([Way("XLA", unroll)] if unroll > 1 else []),
                Way("kernel", plan.num_steps, (32, 1)),
                Way("PyTorch", 1),
                Way("PyTorch, CUDA graph", plan.num_steps),
            ]
            if complexity.substeps <= 16:
                ways += [Way("torch.compile", 4), Way("torch.compile, CUDA graph", 4)]
            works.append((Case(simulator, plan.at, plan.num_steps, study.options.device), ways))
        study.sweep("complexity", works)


# --- commands ---------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> None:
    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        raise SystemExit("JAX sees no GPU here; --device cpu runs what can be run without one.")
    plan = QUICK if options.quick else FULL
    study = Study(plan, options)
    cartpole, base = cartpole_simulator(), oscillators_simulator(Complexity())
    study.check(cartpole)
    if "environments" in options.sweeps:
        over_environments(study, cartpole, plan.num_envs, plan.most_compiled)
    if "steps" in options.sweeps:
        over_steps(study, cartpole)
    if "complexity" in options.sweeps:
        over_complexity(study)
    if "oscillators" in options.sweeps:
        over_environments(study, base, [n for n in plan.num_envs if n != 16], 4)
    print(f"{len(study.cases)} measured, {len(study.absent)} absent, {time.monotonic() - study.began:.0f} s")


def main() -> None:
    run(
        options(
            __doc__,
            device=one_of("cuda", "cpu", default="cuda"),
            quick=(False, "small sizes, to see that all runs"),
            budget=(330.0, "seconds after which no case begins"),
            sweeps=some_of(SWEEPS),
            name="fusion-study",
        )
    )


if __name__ == "__main__":
    main()
