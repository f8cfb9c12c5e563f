"""Several seeds in one program: kernels of all seeds at once, beside XLA's `vmap` and one seed.

    python benchmarks/seeds.py [--seeds 16] [--num-envs 64] [--num-steps 64] [--rounds 3]

All sides are programs of one process, in turns, and train PPO on CartPole-v1 with a shared torso of 64 x 64.
Steps a second count those of all seeds. The return of a side's last turn stands beside its speed. The weights of
a seed are compared with those that it has alone, with kernels. Writes results/seeds-gpu.json or seeds-cpu.json.
"""

import time
from typing import Any

import jax
import numpy as np
from measure import advance, in_turns, options, platform, ratios, spreads, write_result

import rollmill
from rollmill.programs.compiled import CompiledProgram, lower
from rollmill.record.leaves import to_host


def main() -> None:
    """Measures all sides, and writes the result."""
    chosen = options(__doc__, seeds=16, num_envs=64, num_steps=64, rounds=3, seconds=4.0)
    batch = chosen.num_envs * chosen.num_steps
    graph = rollmill.ppo(
        "CartPole-v1",
        num_envs=chosen.num_envs,
        num_steps=chosen.num_steps,
        total_timesteps=batch * 100_000,
        anneal_lr=False,
        network=rollmill.NetworkConfig(shared_torso=True),
    )
    seeds = tuple(range(chosen.seeds))
    programs = {
        "one seed, XLA": (lower(graph, fusion="off"), 1),
        "one seed, kernels": (lower(graph, fusion="full"), 1),
        "all seeds, XLA": (lower(graph, fusion="off", seeds=seeds), chosen.seeds),
        "all seeds, kernels": (lower(graph, fusion="full", seeds=seeds), chosen.seeds),
    }
    for name, (program, _) in programs.items():
        print(f"{name}: compiled in {program.compile_seconds:.1f} s; {'; '.join(program.notes)}", flush=True)
    difference = difference_alone(graph, programs["all seeds, kernels"][0], chosen.seeds - 1)
    sides = {name: Side(program, batch * count, chosen.seconds) for name, (program, count) in programs.items()}
    speeds = spreads(in_turns(sides, chosen.rounds, warm_up=1))
    result = {
        "sizes": {"seeds": chosen.seeds, "num_envs": chosen.num_envs, "num_steps": chosen.num_steps},
        "device": jax.devices()[0].device_kind,
        "notes": {name: program.notes for name, (program, _) in programs.items()},
        "compile_seconds": {name: program.compile_seconds for name, (program, _) in programs.items()},
        "difference_of_a_seed_from_itself_alone": difference,
        "steps_per_second": speeds,
        "ratios": ratios(speeds, "all seeds, kernels"),
        "return_at_the_end": {name: side.last_return for name, side in sides.items()},
        "steps_of_each_seed": {name: side.iterations * batch for name, side in sides.items()},
    }
    print(result["ratios"], result["return_at_the_end"], difference, flush=True)
    write_result(f"seeds-{platform()}", result, chosen.output)


def difference_alone(graph: Any, program: CompiledProgram, seed: int) -> float:
    """Returns the largest relative difference of any weight from the seed's own training, after ten iterations."""
    launches = program.launches
    alone = lower(graph, fusion="full", seeds=(seed,), launches=launches)
    ours, own = (to_host(advance(each, each.start(), 0, 10)[0].learner) for each in (program, alone))
    pairs = [(ours[name][seed], own[name]) for name in own if np.issubdtype(own[name].dtype, np.floating)]
    return max(float(np.max(np.abs(a - b)) / (np.max(np.abs(b)) + 1e-12)) for a, b in pairs)


class Side:
    """A training that goes on for some seconds each time."""

    def __init__(self, program: CompiledProgram, steps: int, seconds: float) -> None:
        self._program, self._steps, self._seconds = program, steps, seconds
        self._state, self.iterations = program.start(), 0
        self.last_return: float | None = None
        self._turn = 50

    def __call__(self) -> float:
        """Trains on, and returns the environment steps of all seeds a second."""
        began, done = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < self._seconds:
            self._state, rows = advance(self._program, self._state, self.iterations, self.iterations + self._turn)
            self.iterations += self._turn
            done += self._turn
            if elapsed < self._seconds / 20:
                self._turn *= 2
        ended = [float(np.sum(row["episodes/ended"])) for row in rows]
        returns = [float(np.sum(row["episodes/return_sum"])) for row in rows]
        self.last_return = sum(returns) / sum(ended) if sum(ended) else None
        return done * self._steps / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
