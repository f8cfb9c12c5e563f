"""Compiles the steps of an evaluation into a kernel."""

import jax
import jax.numpy as jnp

from rollmill.core.errors import CannotFuse
from rollmill.core.types import Key
from rollmill.dataflow import Graph, Step, Weights
from rollmill.fusion import Backend, estimate_pressure, fused_collect, lower_rollout, many_products
from rollmill.programs.evaluation.episodes import CHUNK, OUTCOME, Advance, Playing, with_outcome

MAX_COMPILE_SECONDS = 60
"""Maximum seconds to compile a kernel for evaluations, which are short, so that a kernel saves little time."""


def fused_steps(graph: Graph, backend: Backend, episodes: int) -> Advance:
    """Compiles the steps of an evaluation of `episodes` episodes into a rollout kernel.

    Raises `CannotFuse` if policy or environment cannot be part of a kernel.
    """
    graph = graph._replace(loops=graph.loops._replace(num_steps=CHUNK), compute_values=_outcome)
    step = lower_rollout(graph)
    pressure = estimate_pressure(step.program)
    if reason := many_products(pressure):
        raise CannotFuse(reason)
    if (seconds := backend.compile_seconds(pressure)) > MAX_COMPILE_SECONDS:
        raise CannotFuse(
            f"compiling a kernel for evaluations would take about {seconds:,.0f} s, more than the limit of "
            f"{MAX_COMPILE_SECONDS} s"
        )
    # Uses the smallest blocks, because there are few episodes, and each block runs on a separate multiprocessor.
    launch = min(backend.rollouts.launches(episodes, pressure.num_operations))
    run = backend.rollouts.run(launch)

    def advance(weights: Weights, now: Playing, key: Key) -> Playing:
        collector, trajectory = fused_collect(graph, weights, now.collector, key, run=run, step=step)
        steps = trajectory.steps
        ended = steps.terminated | steps.truncated
        ends, first = ended.any(axis=0) & ~now.done, jnp.argmax(ended, axis=0)
        at_end = lambda leaf: jnp.take_along_axis(leaf, first[None], axis=0)[0]
        return with_outcome(now, ends, jax.tree.map(at_end, steps.info))._replace(collector=collector)

    return advance


def _outcome(weights: Weights, step: Step) -> Step:
    """Keeps the parts of a step that say how an episode ends. A kernel writes nothing else."""
    empty = ("observation", "action_mask", "action", "extras", "reward", "final_observation", "final_memory")
    info = {name: step.info[name] for name in OUTCOME if name in step.info}
    return step._replace(**dict.fromkeys(empty, ()), info=info)
