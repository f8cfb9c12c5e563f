"""Trains DQN beyond 2^31 environment steps, where 32 bits end, and checks that it continues to learn.

    python benchmarks/long_counts.py            # on a GPU: 2^31 + 2^24 steps of CartPole, a few minutes
    python benchmarks/long_counts.py --small    # anywhere: begins with counts just below the limits

The small form trains for a while, moves all counts to just below 2^31 and below the limit of a ring's numbers,
and continues beyond both. Writes results/long-counts.json, or long-counts-small.json, and fails if a check does.
"""

import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from measure import advance, options, write_result

import rollmill
from rollmill.dataflow import Graph, State
from rollmill.dataflow.replay import FALL_BACK_AT
from rollmill.programs.compiled import lower
from rollmill.programs.evaluation.compiled import evaluate

LIMIT = 2**31
"""Environment steps at which 32 bits with a sign end."""

END_EPSILON = 0.05


class Form(NamedTuple):
    """Sizes of a training."""

    num_envs: int
    num_steps: int
    gradient_steps: int
    batch_size: int
    capacity: int
    """Steps of each environment in the memory."""
    before: int
    """Iterations before the counts reach the limit, or are moved to it."""
    after: int
    """Iterations beyond the limit."""
    moved: bool
    """Whether counts are moved to the limit."""

    @property
    def steps_each(self) -> int:
        return self.num_envs * self.num_steps


WHOLE = Form(2**16, 16, gradient_steps=16, batch_size=4096, capacity=48, before=2048, after=16, moved=False)
SMALL = Form(64, 16, gradient_steps=4, batch_size=64, capacity=64, before=24, after=12, moved=True)


def run(form: Form) -> dict[str, Any]:
    """Trains, and returns figures and checks."""
    graph = dqn_of(form)
    program, began = lower(graph), time.perf_counter()
    state, _ = advance(program, program.start(), 0, form.before)
    if form.moved:
        state = moved_to_limit(graph, state, form)
    at_limit = jax.device_get(state.learner)
    state, rows = advance(program, state, form.before, form.before + form.after)
    rows = [{name: float(value) for name, value in row.items()} for row in rows]
    seconds = time.perf_counter() - began
    learner = jax.device_get(state.learner)
    played = lambda learner: evaluate(graph, graph.weights(learner), episodes=100, seed=1).returns.mean()
    returns = [float(played(one)) for one in (at_limit, learner)]
    figures = figures_of(graph, at_limit, learner, rows) | {"ring_steps": int(state.rings.steps.max())}
    return {
        "form": form._asdict(),
        "seconds": seconds,
        "steps_per_second": (form.before + form.after) * form.steps_each / seconds,
        **figures,
        "greedy_return_at_limit": returns[0],
        "greedy_return_at_end": returns[1],
        "checks": checks_of(form, figures, returns),
    }


def dqn_of(form: Form) -> Graph:
    """DQN on CartPole, with exploration that ends long before the limit."""
    return rollmill.dqn(
        "CartPole-v1",
        total_timesteps=LIMIT + form.after * form.steps_each,
        num_envs=form.num_envs,
        num_steps=form.num_steps,
        gradient_steps=form.gradient_steps,
        batch_size=form.batch_size,
        buffer_size=form.num_envs * form.capacity,
        learning_starts=2 * form.steps_each,
        exploration_fraction=0.1,
        end_epsilon=END_EPSILON,
        target_interval=100,
        learning_rate=5e-4,
        anneal_lr=False,
        max_grad_norm=float("inf"),
        tau=1.0,
        n_step=1,
        network=rollmill.NetworkConfig(activation="relu", hidden_sizes=(64, 64)),
    )


def moved_to_limit(graph: Graph, state: State, form: Form) -> State:
    """Returns the state as after nearly 2^31 steps, with numbers of the rings that fall back soon after."""
    half = form.after // 2
    multiple = lambda number: number // form.capacity * form.capacity
    numbers = multiple(FALL_BACK_AT - half * form.num_steps) - multiple(int(state.rings.steps[0]))
    words = state.rings.outcomes.words
    slots = jax.lax.bitcast_convert_type(words[..., -1], jnp.int32) + numbers
    words = words.at[..., -1].set(jax.lax.bitcast_convert_type(slots, jnp.uint32))
    rings = state.rings
    return eqx.tree_at(
        lambda s: (
            *(s.learner.progress.env_steps, s.learner.progress.updates),
            *(s.rings.steps, s.rings.oldest, s.rings.slots, s.rings.outcomes.words),
        ),
        state,
        (
            jnp.asarray(LIMIT - half * form.steps_each, jnp.uint32),
            jnp.asarray(LIMIT - half * form.gradient_steps, jnp.uint32),
            *(rings.steps + numbers, rings.oldest + numbers, rings.slots + numbers, words),
        ),
    )


def figures_of(graph: Graph, at_limit: Any, learner: Any, rows: list[dict[str, float]]) -> dict[str, Any]:
    """What the counts and the metrics say beyond the limit."""
    counted = lambda progress: int(progress.env_step_wraps) * 2**32 + int(progress.env_steps)
    change = max(
        float(np.abs(new - old).max())
        for new, old in zip(jax.tree.leaves(learner.network), jax.tree.leaves(at_limit.network), strict=True)
    )
    return {
        "env_steps": counted(learner.progress),
        "env_steps_counted_after": counted(learner.progress) - counted(at_limit.progress),
        "updates_counted_after": int(learner.progress.updates) - int(at_limit.progress.updates),
        "adam_updates_after": int(learner.optimiser[1].count) - int(at_limit.optimiser[1].count),
        "largest_change_of_a_weight": change,
        "epsilon": [row["exploration/epsilon"] for row in rows],
        "epochs": [row["epochs"] for row in rows],
        "fill": [row["replay/fill"] for row in rows],
        "losses": [row["losses/total"] for row in rows],
        "episodes": sum(row["episodes/ended"] for row in rows),
        "policy_epsilon": float(graph.weights(learner).epsilon),
    }


def checks_of(form: Form, figures: dict[str, Any], returns: list[float]) -> dict[str, bool]:
    """Returns whether learning went on beyond the limit as before."""
    updates = form.after * form.gradient_steps
    return {
        "steps are counted": figures["env_steps"] > LIMIT
        and figures["env_steps_counted_after"] == form.after * form.steps_each,
        "updates are counted": figures["updates_counted_after"] == figures["adam_updates_after"] == updates,
        "every iteration learns": set(figures["epochs"]) == {1.0},
        "exploration stays at its end": np.allclose([*figures["epsilon"], figures["policy_epsilon"]], END_EPSILON),
        "weights change": figures["largest_change_of_a_weight"] > 1e-6,
        "losses are finite, and not zero": bool(
            np.isfinite(figures["losses"]).all() and min(figures["losses"]) > 0
        ),
        "numbers of the rings fall back": figures["ring_steps"] < FALL_BACK_AT - form.num_steps * form.after,
        "the memory is full": 0.5 < min(figures["fill"]) <= max(figures["fill"]) <= 1,
        "episodes end": figures["episodes"] > 0,
        "the policy is no worse": form.moved or returns[1] >= min(400.0, 0.8 * returns[0]),
    }


def main() -> None:
    chosen = options(__doc__, small=(False, "begin just below the limits"))
    result = run(SMALL if chosen.small else WHOLE)
    write_result("long-counts-small" if chosen.small else "long-counts", result, chosen.output)
    for name, holds in result["checks"].items():
        print(f"{'yes' if holds else 'NO '}  {name}")
    if not all(result["checks"].values()):
        raise SystemExit("a check failed")


if __name__ == "__main__":
    main()
