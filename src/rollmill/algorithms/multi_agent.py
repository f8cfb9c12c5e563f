"""Shared parts of multi-agent learners: batches, sample weights and updates.

One sample (row) of a batch is one environment step with all its agents.

When an agent becomes inactive, its episode ends as if it were terminated. The reward of that step counts, later
rewards do not, and no value is bootstrapped. The code of Yu et al. (2022) differs: inactive agents still receive
team rewards, their critic sees zeros and the agent's index ("death masking"), and only the losses exclude them. If
a centralised critic sees all observations, the observations of inactive agents are zeros.

Shape letters: `T` steps, `E` environments of this replica, `N` rows of a minibatch, or its sequences and their
steps, `A` agents of a kind.
"""

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from rollmill.algorithms.agent_views import AgentView
from rollmill.algorithms.agents import AgentPolicy, AgentWeights
from rollmill.algorithms.hyperparameters import (
    Number,
    as_data,
    current_config,
    current_hyperparameters,
    follows_schedules,
)
from rollmill.algorithms.on_policy import IMAGES_AT_ONCE, TrainingSamples, beginnings, is_missing, over_steps
from rollmill.algorithms.opponent_pool import (
    KindsWithOpponents,
    OpponentPool,
    next_opponents,
    no_opponents,
    start_pool,
)
from rollmill.algorithms.optimisers import (
    Annealing,
    Optimiser,
    count_planned_update,
    descend,
    no_updates,
    rate_now,
)
from rollmill.algorithms.reports import value_moments
from rollmill.algorithms.returns import Advantages, bootstrap_values, generalised_advantages
from rollmill.algorithms.roles import numbers_of_role
from rollmill.algorithms.sharing import ParameterSet
from rollmill.core.types import Key
from rollmill.dataflow import Batch, Hyperparameters, Metrics, Reduce, Step, Trajectory
from rollmill.envs import RunningStatistics, denormalise, initial_statistics, normalise, update_statistics

EPS = 1e-9
"""Smallest share of active agents, as a divisor."""
UNFUSED = "kernels do not support several agents with recurrent networks"


class AgentLearner(eqx.Module):
    """Learner state of a multi-agent algorithm: weights, optimiser states and running statistics."""

    weights: AgentWeights
    optimisers: dict[str, PyTree[Array]]
    """Optimiser state of each parameter set, with a leading axis of agents for independent ones."""
    targets: dict[str, RunningStatistics] | None
    """Statistics of each kind's value targets, or None if values are not normalised."""
    returns: dict[str, Float[Array, ""]]
    """Mean return of each kind over the episodes of the last iteration in which any ended."""
    hyperparameters: Hyperparameters = eqx.field(default_factory=dict)
    """Hyperparameters that the fragments read."""
    progress: Annealing | None = None
    """Number of updates so far, or None if no hyperparameter other than a learning rate follows a schedule."""
    pool: OpponentPool | None = None
    """Pool of earlier weights that serve as opponents, or None without a pool."""

    @property
    def updates_done(self) -> Float[Array, ""]:
        """Number of updates that the learner has made so far."""
        assert self.progress is not None
        return self.progress.updates


class SetRows(NamedTuple):
    """Samples of all agents: leaves `[T, E, ...]` in a batch, `[N, ...]` or `[N, T, ...]` in a minibatch."""

    view: AgentView
    """Normalised observations of all agents."""
    agents: dict[str, TrainingSamples]
    """Samples of each kind, leaves `[..., A, ...]`. Their observations are `()`, as the view has them."""
    weight: dict[str, Float[Array, "..."]]
    """Weights of each kind's samples, `[..., A]`: 0 for inactive agents, with a mean of 1 over a set."""
    begins: PyTree[Bool[Array, "..."]] = ()
    """Whether an episode begins with this row, so that memories are reset. `()` for policies without memory."""


def start_learner(
    policy: AgentPolicy,
    optimiser: Optimiser,
    numbers: Mapping[str, float],
    key: Key,
    *,
    normalise_values: bool,
    pool_size: int = 0,
    opponents: KindsWithOpponents | None = None,
) -> AgentLearner:
    """Returns the initial learner state of a multi-agent algorithm.

    The pool of opponents, if there are any, has room for `pool_size` earlier weights.
    """
    weights, held = policy.start_weights(key), as_data(numbers)
    pool = None
    if opponents is not None:
        pool_key = jax.random.fold_in(key, len(policy.sets))
        pool = start_pool(weights.networks, opponents, pool_key, size=pool_size)
        weights = replace(weights, opponents=no_opponents(weights.networks, opponents))
    begin = optimiser.init
    start = {group.name: jax.vmap(begin) if group.independent else begin for group in policy.sets}
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    return AgentLearner(
        weights,
        {name: init(weights.networks[name]) for name, init in start.items()},
        {kind.name: initial_statistics(scalar) for kind in policy.kinds} if normalise_values else None,
        {kind.name: jnp.float32(0) for kind in policy.kinds},
        held,
        no_updates() if follows_schedules(numbers) else None,
        pool,
    )


# --- a rollout, once an iteration ---------------------------------------------------------------------


def prepare(
    policy: AgentPolicy,
    config: Any,
    opponents: KindsWithOpponents | None,
    learner: AgentLearner,
    trajectory: Trajectory,
    *,
    reduce: Reduce,
    replicas: int,
) -> tuple[AgentLearner, Batch]:
    """Computes all agents' advantages and targets, and updates running statistics for the next rollout.

    It uses `gamma`, `gae_lambda`, `frozen`, `pool_every` and `pool_share` of `config`. Agents that acted with
    earlier weights are ignored.
    """
    steps, held = trajectory.steps, current_hyperparameters(learner)
    learns = _learning(learner, steps)
    fixed = {name for group in policy.sets if group.name in config.frozen for name in group.names}
    updated = _update_statistics(learner, steps, fixed, reduce=reduce, replicas=replicas)
    values, last_values, final_values = _values(policy, learner, trajectory)
    advantages = {}
    for name in values:
        raw_values = [_raw(learner, name, by_kind[name]) for by_kind in (values, last_values, final_values)]
        own = current_config(config, numbers_of_role(held, "gammas", name))
        advantages[name] = _advantages(steps, name, *raw_values, gamma=own.gamma, gae_lambda=own.gae_lambda)
    statistics, targets = _normalise_targets(learner, learns, advantages, reduce=reduce, replicas=replicas)
    rows = SetRows(
        view=policy.normalise(learner.weights, steps.observation),
        agents={
            name: _samples(steps, name, values[name], advantages[name].advantage, targets[name]) for name in values
        },
        weight={name: active.astype(jnp.float32) for name, active in learns.items()},
        begins=beginnings(steps.terminated | steps.truncated) if policy.recurrent else (),
    )
    updated = _with_next_opponents(updated, current_config(config, held), opponents)
    return replace(updated, targets=statistics), Batch(rows, trajectory.start_memory)


def _learning(learner: AgentLearner, steps: Step) -> dict[str, Bool[Array, "T E A"]]:
    """Returns the agents of each kind that learn from a rollout: active agents that use the newest weights."""
    opponents = learner.weights.opponents
    playing = {} if opponents is None else opponents.playing
    active = steps.observation.active
    return {name: each & ~playing[name] if name in playing else each for name, each in active.items()}


def _with_next_opponents(learner: AgentLearner, config: Any, opponents: KindsWithOpponents | None) -> AgentLearner:
    weights = learner.weights
    if opponents is None or learner.pool is None or weights.opponents is None:
        return learner
    pool, drawn = next_opponents(
        learner.pool,
        weights.networks,
        weights.opponents,
        opponents,
        every=config.pool_every,
        share=config.pool_share,
    )
    return replace(learner, pool=pool, weights=replace(weights, opponents=drawn))


def _samples(
    steps: Step, name: str, value: Float[Array, "T E A"], advantage: Float[Array, "T E A"], target: Any
) -> TrainingSamples:
    mask = steps.action_mask.get(name, ()) if isinstance(steps.action_mask, dict) else ()
    return TrainingSamples((), mask, steps.action[name], steps.extras.log_prob[name], value, advantage, target, ())


def _normalise_targets(
    learner: AgentLearner,
    learns: dict[str, Bool[Array, "T E A"]],
    advantages: dict[str, Advantages],
    *,
    reduce: Reduce,
    replicas: int,
) -> tuple[dict[str, RunningStatistics] | None, dict[str, Float[Array, "T E A"]]]:
    """Updates the statistics of targets with a rollout, and returns them with the normalised targets."""
    raw = {name: by_kind.target for name, by_kind in advantages.items()}
    if learner.targets is None:
        return None, raw
    update = partial(update_statistics, reduce=reduce, replicas=replicas)
    statistics = {name: update(s, raw[name], where=learns[name]) for name, s in learner.targets.items()}
    return statistics, {name: normalise(statistics[name], target, clip=math.inf) for name, target in raw.items()}


def _update_statistics(
    learner: AgentLearner, steps: Step, fixed: Container[str], *, reduce: Reduce, replicas: int
) -> AgentLearner:
    """Updates the learner's statistics of observations, and its returns, with a rollout.

    The statistics of `fixed` agent kinds do not change, so that frozen policies act as before.
    """
    weights, view = learner.weights, steps.observation
    update = partial(update_statistics, reduce=reduce, replicas=replicas)
    agents, central = weights.agents, weights.central
    if agents is not None:
        agents = {
            name: s if name in fixed else update(s, view.agents[name], where=view.active[name])
            for name, s in agents.items()
        }
    if central is not None:
        central = update(central, view.central)
    returns = _returns(learner.returns, steps, reduce)
    return replace(learner, weights=replace(weights, agents=agents, central=central), returns=returns)


def _returns(previous: dict[str, Array], steps: Step, reduce: Reduce) -> dict[str, Float[Array, ""]]:
    """Returns the mean returns of the episodes that ended in a rollout, or the previous means if none ended."""
    ended = (steps.terminated | steps.truncated).astype(jnp.float32)
    sums = {name: jnp.mean(ended * steps.info["agent_returns"][name]) for name in previous}
    sums, count = reduce((sums, jnp.mean(ended)))
    mean = {name: sums[name] / jnp.maximum(count, EPS) for name in previous}
    return {name: jnp.where(count > 0, mean[name], previous[name]) for name in previous}


def _values(policy: AgentPolicy, learner: AgentLearner, trajectory: Trajectory):
    """Returns critics' values of views `[T, E]`, of the last view `[E]`, and of final views `[T, E]`.

    Values of the rollout itself are already known if critics have a memory. Values of final views are computed
    only in iterations in which an episode was truncated, unless `compact_step` has added them.
    """
    steps, weights = trajectory.steps, learner.weights
    values = lambda memory, view: policy.values(weights.networks, policy.normalise(weights, view), memory)
    values_e = jax.vmap(values)
    num_agents = sum(kind.count for kind in policy.kinds)
    at_once = max(1, IMAGES_AT_ONCE // num_agents) if policy.is_large else None
    values_te = partial(over_steps, values_e, steps.final_memory, at_once=at_once)
    known = steps.extras.value
    value = values_te(steps.observation) if is_missing(known) else known
    last_value = values_e(trajectory.memory, trajectory.observation)
    if not is_missing(steps.extras.final_value):
        return value, last_value, steps.extras.final_value
    final_value = jax.lax.cond(
        jnp.any(steps.truncated),
        lambda: values_te(steps.final_observation),
        lambda: jax.tree.map(jnp.zeros_like, value),
    )
    return value, last_value, final_value


def _raw(learner: AgentLearner, name: str, value: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns a critic's value in the unit of rewards."""
    return value if learner.targets is None else denormalise(learner.targets[name], value)


def _advantages(
    steps: Step,
    name: str,
    value: Float[Array, "T E A"],
    last_value: Float[Array, "E A"],
    final_value: Float[Array, "T E A"],
    *,
    gamma: Number,
    gae_lambda: Number,
) -> Advantages:
    """Returns the advantages and targets of a kind's agents, `[T, E, A]`.

    An agent's episode ends when the agent becomes inactive.
    """
    active, stays_active = steps.observation.active[name], steps.final_observation.active[name]
    terminated = steps.terminated[..., None] | ~active | ~stays_active
    truncated = jnp.broadcast_to(steps.truncated[..., None], active.shape)
    bootstrap = _over_columns(bootstrap_values, (1, 0, 1, 1, 1))
    next_value = bootstrap(value, last_value, final_value, terminated, truncated)
    estimate = _over_columns(partial(generalised_advantages, gamma=gamma, gae_lambda=gae_lambda), 1)
    return estimate(steps.reward[name], value, next_value, terminated | truncated)


def _over_columns(function: Any, in_axes: Any) -> Any:
    """Lifts a function of `[T]` to `[T, E, A]`."""
    lift = partial(jax.vmap, in_axes=in_axes, out_axes=1)
    return lift(lift(function))


def report(
    trained: tuple[ParameterSet, ...],
    schedule: Callable[[Hyperparameters], optax.Schedule],
    learner: AgentLearner,
    batch: Batch,
) -> Metrics:
    """Returns the metrics of an iteration: learning rates at its beginning, and moments of active agents' values.

    The learning rate belongs to the first trained parameter set. Sets with rates of their own report them
    separately.
    """
    rows: SetRows = batch.samples
    concatenated = lambda leaves: jnp.concatenate([leaf.ravel() for leaf in leaves])
    value, target, weight = map(
        concatenated,
        (
            [samples.value for samples in rows.agents.values()],
            [samples.target for samples in rows.agents.values()],
            [rows.weight[name] for name in rows.agents],
        ),
    )
    held = learner.hyperparameters
    rate = lambda numbers, name: rate_now(schedule(numbers), learner.optimisers[name])
    own = {group.name: numbers_of_role(held, "learning_rates", group.name) for group in trained}
    rates = {f"learning_rate/{name}": rate(now, name) for name, now in own.items() if now is not held}
    return {"learning_rate": rate(held, trained[0].name), **rates, **value_moments(value, target, weight)}


# --- an update ----------------------------------------------------------------------------------------


def update(
    trained: tuple[ParameterSet, ...],
    optimiser: Optimiser,
    learner: AgentLearner,
    gradients: dict[str, PyTree[Array]],
    *,
    share: float = 1.0,
) -> AgentLearner:
    """Makes one optimiser step for each trained parameter set, with the set's own learning rate if it has one.

    `share` is the fraction of a minibatch that the gradients come from.
    """
    weights, held = learner.weights, current_hyperparameters(learner)
    networks, optimisers = dict(weights.networks), dict(learner.optimisers)
    for group in trained:
        name, now = group.name, numbers_of_role(held, "learning_rates", group.name)
        step = partial(descend, optimiser, hyperparameters=now, share=share)
        step = jax.vmap(step) if group.independent else step
        stepped, optimisers[name] = step(weights.networks[name], learner.optimisers[name], gradients[name])
        networks[name] = _unless_idle(learner, group, gradients[name], weights.networks[name], stepped)
    updated = replace(weights, networks=networks)
    progress = None if learner.progress is None else count_planned_update(learner.progress, share)
    return replace(learner, weights=updated, optimisers=optimisers, progress=progress)


def _unless_idle(
    learner: AgentLearner,
    group: ParameterSet,
    gradients: PyTree[Array],
    before: PyTree[Array],
    after: PyTree[Array],
) -> PyTree[Array]:
    """Returns the weights before a step if all agents of the set acted with earlier weights, else after it.

    The gradients of such a set are exactly zero, but the momentum of Adam would still change its weights. The
    gradients show this even if the update runs in another replica than the pool.
    """
    played = learner.pool.played if learner.pool is not None else {}
    if not all(name in played for name in group.names):
        return after
    idle = jnp.all(jnp.stack([jnp.all(leaf == 0) for leaf in jax.tree.leaves(gradients)]))
    return jax.tree.map(lambda old, new: jnp.where(idle, old, new), before, after)
