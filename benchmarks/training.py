"""Training on small environments: Rollmill, fused and by XLA, beside its peers, in one run.

    python benchmarks/training.py cpu --rejax .rejax/bin/python     # make benchmark-training
    python benchmarks/training.py gpu

PPO trains on CartPole-v1 with 64-64 actor and critic. Its peers are the least code that trains PPO in one XLA
program (one_xla_program.py) and, with `--rejax`, Rejax 0.1.3 in an environment of its own. Figures are environment
steps per second of whole training iterations, without compilation and evaluations; ratios are of medians.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from measure import (
    REJAX,
    foreign,
    in_turns,
    one_of,
    options,
    ratios,
    require,
    spreads,
    training_turns,
    write_result,
)
from one_xla_program import Sizes, one_program_turns

import rollmill
from rollmill.programs.compiled import lower

REPEATS = 3
"""Timed turns of a side in each round."""
FUSED = "rollmill, fusion=full"
SIZES = {"cpu": [Sizes(2048, 32, 4, 4)], "gpu": [Sizes(4096, 32, 4, 4), Sizes(4096, 128, 4, 4)]}


def rejax_side(python: str, settings: dict[str, Any]) -> list[float]:
    order = {"algorithm": "PPO", "settings": settings, "repeats": REPEATS}
    return foreign(python, "rejax_side.py", order)["figures"]


def own_side(graph: Any, iterations: int, **how: Any) -> list[float]:
    """Trains on from turn to turn; the first compiles."""
    turn = training_turns(lower(graph, **how), graph.loops.batch_size, iterations)
    return [turn() for _ in range(REPEATS + 1)][1:]


def compare(sides: dict[str, Callable[[], list[float]]], rounds: int, title: str) -> dict[str, Any]:
    """Returns the figures of all sides, and the ratios of the first to the others."""
    turns = in_turns(sides, rounds)
    figures = spreads({name: [rate for each in runs for rate in each] for name, runs in turns.items()})
    over = ratios(figures, next(iter(sides)))
    print(f"{title}: " + ", ".join(f"{name} {figure['median']:,.0f} steps/s" for name, figure in figures.items()))
    print("  " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in over.items()), flush=True)
    return {"steps_per_second": figures, "ratios": over}


def ppo(sizes: Sizes, chosen: Any, unroll: int | None) -> dict[str, Any]:
    iterations, steps = 10, sizes.num_envs * sizes.num_steps
    graph = rollmill.ppo(
        rollmill.make("CartPole-v1"),
        total_timesteps=steps * iterations * (REPEATS + 1),
        num_envs=sizes.num_envs,
        num_steps=sizes.num_steps,
        update_epochs=sizes.epochs,
        num_minibatches=sizes.num_minibatches,
        learning_rate=2.5e-4,
    )
    own = lambda fusion: partial(own_side, graph, iterations, unroll=unroll, fusion=fusion)

    def least() -> list[float]:
        turn = one_program_turns(sizes, iterations)
        return [turn() for _ in range(REPEATS + 1)][1:]

    sides = {FUSED: own("full"), "rollmill": own("off"), "one_xla_program": least}
    if chosen.rejax:
        settings = {"env": "CartPole-v1", "num_envs": sizes.num_envs, "num_steps": sizes.num_steps}
        settings |= {"num_epochs": sizes.epochs, "num_minibatches": sizes.num_minibatches, "learning_rate": 2.5e-4}
        settings |= {"agent_kwargs": {"activation": "tanh", "hidden_layer_sizes": (64, 64)}}
        settings |= {"total_timesteps": steps * iterations}
        sides["rejax"] = partial(rejax_side, chosen.rejax, settings)
    return {"sizes": sizes._asdict(), "unroll": unroll, **compare(sides, chosen.rounds, str(sizes))}


def main() -> None:
    chosen = options(
        __doc__,
        {"machine": one_of("cpu", "gpu")},
        rejax=(str, REJAX),
        rounds=3,
        unroll=([int], "of PPO; default: the choice of Rollmill"),
    )
    require(chosen.machine)
    unrolls = chosen.unroll or [None]
    rows = [ppo(sizes, chosen, unroll) for sizes in SIZES[chosen.machine] for unroll in unrolls]
    write_result(f"training-{chosen.machine}", {"rows": rows}, chosen.output)


if __name__ == "__main__":
    main()
