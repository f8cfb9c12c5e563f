"""What learners of several agents share: rollouts to batches, weights of samples, gradients, updates.

Everything of one environment step, of all its agents, is one sample: a row that minibatches are cut from.

An agent that goes out ends its own episode there, as if it had terminated: no value follows, what it is paid
in that step counts, and nothing after it does. Yu et al. (2022) do otherwise in their code: rewards of a team
go on for those who are out, whose critic then sees zeros and the agent's number ("death masking"), and only
the losses leave them out. Here `Environment.active` says that nothing after it counts. Where a centralised
critic sees all observations, those of agents that are out are zeros as well.

Shape letters: `T` steps, `E` environments held here, `N` rows of a minibatch, `A` agents of a kind.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from rollmill.algorithms.agents import AgentPolicy, AgentView, AgentWeights
from rollmill.algorithms.on_policy import SampleLoss, TrainingSamples
from rollmill.algorithms.optimisers import descend, rate_now
from rollmill.algorithms.reports import value_moments
from rollmill.algorithms.returns import Advantages, bootstrap_values, generalised_advantages
from rollmill.algorithms.sharing import ParameterSet, set_of
from rollmill.core.types import Key
from rollmill.dataflow import Batch, MeanGradients, Metrics, Reduce, Step, Trajectory
from rollmill.envs import RunningStatistics, denormalise, initial_statistics, normalise, update_statistics
from rollmill.networks import Output

NOBODY = 1e-9
"""Stands for a share of zero, so that it can be divided by."""


class AgentLearner(eqx.Module):
    """Weights, optimisers and running statistics."""

    weights: AgentWeights
    optimisers: dict[str, PyTree[Array]]
    """The optimiser's state of each parameter set; with a leading axis of agents where each has its own."""
    targets: dict[str, RunningStatistics] | None
    """Kind to statistics of what its critic learns, where values are normalised."""
    returns: dict[str, Float[Array, ""]]
    """Kind to its mean return over the episodes that ended in the last iteration in which any did."""


class SetRows(NamedTuple):
    """What is learned from: leaves `[T, E, ...]` in a batch, `[N, ...]` in a minibatch."""

    view: AgentView
    """Normalised."""
    agents: dict[str, TrainingSamples]
    """Kind to samples with leaves `[..., A, ...]`; their observations are `()`, the view has them."""
    weight: dict[str, Float[Array, "..."]]
    """Kind to `[..., A]`: how much a sample counts; 0 for agents that are out, 1 on the mean over a set."""


def start_learner(
    policy: AgentPolicy, optimiser: optax.GradientTransformation, key: Key, *, normalise_values: bool
) -> AgentLearner:
    """The learner before training."""
    weights = policy.start_weights(key)
    start = {
        group.name: jax.vmap(optimiser.init) if group.independent else optimiser.init for group in policy.sets
    }
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    return AgentLearner(
        weights,
        {name: init(weights.networks[name]) for name, init in start.items()},
        {kind.name: initial_statistics(scalar) for kind in policy.kinds} if normalise_values else None,
        {kind.name: jnp.float32(0) for kind in policy.kinds},
    )


# --- a rollout, once an iteration ---------------------------------------------------------------------


def prepare(
    policy: AgentPolicy,
    learner: AgentLearner,
    trajectory: Trajectory,
    *,
    gamma: float,
    gae_lambda: float,
    reduce: Reduce,
    replicas: int,
) -> tuple[AgentLearner, Batch]:
    """Advantages and targets of a rollout, and statistics for the next one."""
    steps = trajectory.steps
    after = _take_in(learner, steps, reduce=reduce, replicas=replicas)
    said, *rest = _values(policy, learner, trajectory)
    learned = {}
    for name in said:
        value, last_value, final_value = (_raw(learner, name, found[name]) for found in (said, *rest))
        learned[name] = _advantages(
            steps, name, value, last_value, final_value, gamma=gamma, gae_lambda=gae_lambda
        )
    targets, target = _normalised_targets(learner, steps, learned, reduce=reduce, replicas=replicas)
    rows = SetRows(
        view=policy.normalise(learner.weights, steps.observation),
        agents={name: _samples(steps, name, said[name], learned[name].advantage, target[name]) for name in said},
        weight={name: active.astype(jnp.float32) for name, active in steps.observation.active.items()},
    )
    return AgentLearner(after.weights, after.optimisers, targets, after.returns), Batch(rows)


def _samples(
    steps: Step, name: str, value: Float[Array, "T E A"], advantage: Float[Array, "T E A"], target: Any
) -> TrainingSamples:
    mask = steps.action_mask.get(name, ()) if isinstance(steps.action_mask, dict) else ()
    return TrainingSamples((), mask, steps.action[name], steps.extras[name], value, advantage, target, ())


def _normalised_targets(
    learner: AgentLearner, steps: Step, learned: dict[str, Advantages], *, reduce: Reduce, replicas: int
) -> tuple[dict[str, RunningStatistics] | None, dict[str, Float[Array, "T E A"]]]:
    """Statistics of targets, advanced by a rollout, and the targets as critics learn them."""
    raw = {name: found.target for name, found in learned.items()}
    if learner.targets is None:
        return None, raw
    advance = partial(update_statistics, reduce=reduce, replicas=replicas)
    active = steps.observation.active
    after = {name: advance(s, raw[name], where=active[name]) for name, s in learner.targets.items()}
    return after, {name: normalise(after[name], target, clip=math.inf) for name, target in raw.items()}


def _take_in(learner: AgentLearner, steps: Step, *, reduce: Reduce, replicas: int) -> AgentLearner:
    """The learner with the statistics of what is seen, and the returns, advanced by a rollout."""
    weights, view = learner.weights, steps.observation
    update = partial(update_statistics, reduce=reduce, replicas=replicas)
    agents, central = weights.agents, weights.central
    if agents is not None:
        agents = {name: update(s, view.agents[name], where=view.active[name]) for name, s in agents.items()}
    if central is not None:
        central = update(central, view.central)
    returns = _returns(learner.returns, steps, reduce)
    return AgentLearner(
        AgentWeights(weights.networks, agents, central), learner.optimisers, learner.targets, returns
    )


def _returns(before: dict[str, Array], steps: Step, reduce: Reduce) -> dict[str, Float[Array, ""]]:
    ended = (steps.terminated | steps.truncated).astype(jnp.float32)
    sums = {name: jnp.mean(ended * steps.info["agent_returns"][name]) for name in before}
    sums, count = reduce((sums, jnp.mean(ended)))
    return {name: jnp.where(count > 0, sums[name] / jnp.maximum(count, 1e-9), before[name]) for name in before}


def _values(policy: AgentPolicy, learner: AgentLearner, trajectory: Trajectory):
    """What critics say of views `[T, E]`, of where the next rollout goes on `[E]`, of final views `[T, E]`.

    The last are computed only in iterations in which an episode was truncated.
    """
    steps, weights = trajectory.steps, learner.weights
    of_each = jax.vmap(lambda view: policy.values(weights.networks, policy.normalise(weights, view)))
    of_all = jax.vmap(of_each)
    value = of_all(steps.observation)
    final_value = jax.lax.cond(
        jnp.any(steps.truncated),
        lambda: of_all(steps.final_observation),
        lambda: jax.tree.map(jnp.zeros_like, value),
    )
    return value, of_each(trajectory.observation), final_value


def _raw(learner: AgentLearner, name: str, value: Float[Array, "..."]) -> Float[Array, "..."]:
    """In the unit of rewards, of what a critic said."""
    return value if learner.targets is None else denormalise(learner.targets[name], value)


def _advantages(
    steps: Step,
    name: str,
    value: Float[Array, "T E A"],
    last_value: Float[Array, "E A"],
    final_value: Float[Array, "T E A"],
    *,
    gamma: float,
    gae_lambda: float,
) -> Advantages:
    """Of each agent of a kind, `[T, E, A]`; its episode ends where it goes out."""
    active, stays = steps.observation.active[name], steps.final_observation.active[name]
    terminated = steps.terminated[..., None] | ~active | ~stays
    truncated = jnp.broadcast_to(steps.truncated[..., None], active.shape)
    bootstrap = _over_columns(bootstrap_values, (1, 0, 1, 1, 1))
    next_value = bootstrap(value, last_value, final_value, terminated, truncated)
    estimate = _over_columns(partial(generalised_advantages, gamma=gamma, gae_lambda=gae_lambda), 1)
    return estimate(steps.reward[name], value, next_value, terminated | truncated)


def _over_columns(function: Any, in_axes: Any) -> Any:
    """Lifts a function of `[T]` to `[T, E, A]`."""
    lift = partial(jax.vmap, in_axes=in_axes, out_axes=1)
    return lift(lift(function))


def report(schedule: optax.Schedule, learner: AgentLearner, batch: Batch) -> Metrics:
    """The learning rate that an iteration begins with, and moments of the values of active agents of all kinds."""
    rows: SetRows = batch.samples
    together = lambda leaves: jnp.concatenate([leaf.ravel() for leaf in leaves])
    value, target, weight = map(
        together,
        (
            [samples.value for samples in rows.agents.values()],
            [samples.target for samples in rows.agents.values()],
            [rows.weight[name] for name in rows.agents],
        ),
    )
    optimiser = next(iter(learner.optimisers.values()))
    return {"learning_rate": rate_now(schedule, optimiser), **value_moments(value, target, weight)}


# --- a minibatch --------------------------------------------------------------------------------------


def condition(sets: tuple[ParameterSet, ...], minibatch: Batch, reduce: Reduce, *, standardise: bool) -> Batch:
    """Weights such that a mean over rows is a mean over active agents; advantages standardised over these.

    Advantages are standardised for each kind, or for each agent where each has its own parameters.
    """
    rows: SetRows = minibatch.samples
    alone = {name for group in sets if group.independent for name in group.names}
    own = {
        name: _moments(samples.advantage, rows.weight[name], (0,) if name in alone else (0, 1))
        for name, samples in rows.agents.items()
    }
    found = reduce(own if standardise else {name: moments.share for name, moments in own.items()})
    agents, share = rows.agents, found
    if standardise:
        agents = {name: _standardised(samples, found[name]) for name, samples in agents.items()}
        share = {name: moments.share for name, moments in found.items()}
    weight = {name: active / _share_of_set(sets, name, share) for name, active in rows.weight.items()}
    return minibatch._replace(samples=SetRows(rows.view, agents, weight))


class _Moments(NamedTuple):
    """Of the advantages of active agents in one part of a minibatch; each is a mean over all agents of the part.

    So means over equal parts are those of the whole, and one reduction is enough (Chan et al., 1979): the whole's
    variance is the mean of the parts' variances and the variance of their means.
    """

    share: Float[Array, "1 #A"]
    """Agents that are active."""
    mean: Float[Array, "1 #A"]
    variance: Float[Array, "1 #A"]
    """Around the part's own mean."""
    square: Float[Array, "1 #A"]
    """Of the part's own mean."""


def _moments(advantage: Float[Array, "N A"], active: Float[Array, "N A"], axes: tuple[int, ...]) -> _Moments:
    mean = partial(jnp.mean, axis=axes, keepdims=True)
    share = jnp.maximum(mean(active), NOBODY)
    own = mean(active * advantage) / share
    return _Moments(share, share * own, mean(active * jnp.square(advantage - own)), share * jnp.square(own))


def _standardised(samples: TrainingSamples, moments: _Moments) -> TrainingSamples:
    share, mean, variance, square = moments
    mean = mean / share
    deviation = jnp.sqrt(variance / share + jnp.maximum(square / share - jnp.square(mean), 0))
    return samples._replace(advantage=(samples.advantage - mean) / (deviation + 1e-8))


def _share_of_set(sets: tuple[ParameterSet, ...], name: str, share: dict[str, Array]) -> Float[Array, "1 #A"]:
    """The part of samples in which agents are active, over all kinds of the set that a kind belongs to."""
    group = set_of(sets, name)
    parts = [kind.count / group.size * share[kind.name] for kind in group.kinds]
    return sum(parts[1:], start=parts[0])


def mean_gradients(
    policy: AgentPolicy, loss: SampleLoss, learner: AgentLearner, minibatch: Batch
) -> tuple[dict[str, PyTree[Array]], Metrics]:
    """Of the sum over parameter sets of the mean losses of their active agents."""
    of_row = lambda networks, learner, row, sequence: _row_loss(policy, loss, networks, row)
    slopes, metrics = MeanGradients(of_row, lambda learner: learner.weights.networks)(learner, minibatch)
    return slopes, {**metrics, **{f"returns/{name}": found for name, found in learner.returns.items()}}


def _row_loss(
    policy: AgentPolicy, loss: SampleLoss, networks: dict[str, PyTree[Array]], row: SetRows
) -> tuple[Float[Array, ""], Metrics]:
    """Of ONE environment step; metrics are means over parameter sets, and where there are several, of each."""
    masks = {name: samples.action_mask for name, samples in row.agents.items()}
    distributions = policy.distributions(networks, row.view.agents, masks)
    values = policy.values(networks, row.view)

    def of_kind(name: str) -> tuple[Float[Array, ""], Metrics]:
        say = lambda sample, distribution, value: loss(sample, Output(distribution, value, ()))
        found = jax.vmap(say)(row.agents[name], distributions[name], values[name])
        return jax.tree.map(partial(jnp.vdot, row.weight[name]), found)

    total, each = jnp.float32(0), {}
    for group in policy.sets:
        sums = jax.tree.map(lambda *parts: sum(parts), *(of_kind(name) for name in group.names))
        set_loss, each[group.name] = jax.tree.map(lambda x, size=group.size: x / size, sums)
        total = total + (sums[0] if group.independent else set_loss)
    over_sets = jax.tree.map(lambda *found: sum(found) / len(found), *each.values())
    if len(each) == 1:
        return total, over_sets
    apart = {f"{metric}/{name}": x for name, metrics in each.items() for metric, x in metrics.items()}
    return total, {**over_sets, **apart}


def update(
    sets: tuple[ParameterSet, ...],
    optimiser: optax.GradientTransformation,
    learner: AgentLearner,
    slopes: dict[str, PyTree[Array]],
    *,
    share: float = 1.0,
) -> AgentLearner:
    """One step of each parameter set's optimiser; `share` is the part of a minibatch that the gradients are of."""
    weights, networks, optimisers = learner.weights, {}, {}
    for group in sets:
        name, step = group.name, partial(descend, optimiser, share=share)
        step = jax.vmap(step) if group.independent else step
        networks[name], optimisers[name] = step(weights.networks[name], learner.optimisers[name], slopes[name])
    after = AgentWeights(networks, weights.agents, weights.central)
    return AgentLearner(after, optimisers, learner.targets, learner.returns)
