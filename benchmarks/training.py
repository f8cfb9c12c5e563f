"""PPO training on CartPole-v1, 64-64 actor and critic: Rollmill, fused and by XLA, beside its peers, in one run.

    python benchmarks/training.py cpu --rejax .rejax/bin/python     # make benchmark-training
    python benchmarks/training.py gpu

Sides take turns, so that a machine whose speed drifts slows all of them alike; figures are
environment steps per second of whole training iterations, compilation left out, and ratios are of
medians. On CPU the peer is Rejax 0.1.3 in its own environment; on a GPU, and on CPU besides, the
least code that trains PPO in one XLA program (one_xla_program.py).
"""

import argparse
import time
from pathlib import Path

import jax
from measure import RESULTS, rejax_figures, spread, write_result
from one_xla_program import Sizes, steps_per_second

import rollmill
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead


def rollmill_steps_per_second(
    sizes: Sizes, *, iterations: int, repeats: int, unroll: int | None = None, fusion: str = "off"
) -> list[float]:
    algorithm = rollmill.ppo(
        rollmill.make("CartPole-v1"),
        total_timesteps=sizes.num_envs * sizes.num_steps * iterations * (repeats + 1),
        num_envs=sizes.num_envs,
        num_steps=sizes.num_steps,
        update_epochs=sizes.epochs,
        num_minibatches=sizes.num_minibatches,
        learning_rate=2.5e-4,
    )
    program = lower(algorithm, unroll=unroll, fusion=fusion)
    state, figures = program.start(), []
    for repeat in range(repeats + 1):
        began = time.perf_counter()
        for window in dispatch_ahead(program, state, first=repeat * iterations, until=(repeat + 1) * iterations):
            state = window.after
        jax.block_until_ready(state)
        figures.append(iterations * algorithm.loops.batch_size / (time.perf_counter() - began))
    return figures[1:]


def rejax_steps_per_second(python: str, sizes: Sizes, *, iterations: int, repeats: int) -> list[float]:
    settings = {
        "env": "CartPole-v1",
        "num_envs": sizes.num_envs,
        "num_steps": sizes.num_steps,
        "num_epochs": sizes.epochs,
        "num_minibatches": sizes.num_minibatches,
        "total_timesteps": sizes.num_envs * sizes.num_steps * iterations,
        "learning_rate": 2.5e-4,
        "agent_kwargs": {"activation": "tanh", "hidden_layer_sizes": (64, 64)},
    }
    return rejax_figures(python, "PPO", settings, repeats=repeats)


def compare(sizes: Sizes, *, iterations: int, rounds: int, rejax: str | None, unroll: int | None) -> dict:
    fused = "rollmill, fusion=full"
    sides = {fused: [], "rollmill": [], "one_xla_program": []} | ({"rejax": []} if rejax else {})
    for _ in range(rounds):
        how = {"iterations": iterations, "repeats": 3, "unroll": unroll}
        sides[fused] += rollmill_steps_per_second(sizes, **how, fusion="full")
        sides["rollmill"] += rollmill_steps_per_second(sizes, **how)
        sides["one_xla_program"] += steps_per_second(sizes, iterations=iterations, repeats=3)
        if rejax:
            sides["rejax"] += rejax_steps_per_second(rejax, sizes, iterations=iterations, repeats=3)
    figures = {name: spread(runs) for name, runs in sides.items()}
    own = figures[fused]["median"]
    ratios = {f"{fused} / {name}": own / figures[name]["median"] for name in sides if name != fused}
    print(f"{sizes}: " + ", ".join(f"{name} {f['median']:,.0f} steps/s" for name, f in figures.items()))
    print("  " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()), flush=True)
    return {"sizes": sizes._asdict(), "unroll": unroll, "steps_per_second": figures, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", choices=("cpu", "gpu"))
    parser.add_argument("--rejax", help="a Python with rejax==0.1.3 and gymnax==0.0.9")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unroll", type=int, nargs="+", default=[None], help="left out: what Rollmill chooses")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    on_cpu = options.machine == "cpu"
    if jax.default_backend() != options.machine:
        raise SystemExit(f"JAX runs on {jax.default_backend()}, not on {options.machine}.")
    sizes = [Sizes(2048, 32, 4, 4)] if on_cpu else [Sizes(4096, 32, 4, 4), Sizes(4096, 128, 4, 4)]
    rows = [
        compare(s, iterations=10, rounds=options.rounds, rejax=options.rejax, unroll=unroll)
        for s in sizes
        for unroll in options.unroll
    ]
    write_result(f"training-{options.machine}", {"rows": rows}, directory=options.output)


if __name__ == "__main__":
    main()
