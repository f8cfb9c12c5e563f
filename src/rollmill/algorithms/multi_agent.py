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
from rollmill.algorithms.on_policy import SampleLoss, Samples
from rollmill.algorithms.optimisers import descend
from rollmill.algorithms.returns import Advantages, bootstrap_values, generalised_advantages
from rollmill.algorithms.sharing import ParameterSet, set_of
from rollmill.core.types import Key
from rollmill.dataflow import Batch, Metrics, Reduce, Step, Trajectory
from rollmill.envs import Statistics, denormalise, initial_statistics, normalise, update_statistics
from rollmill.networks import Output


class AgentLearner(eqx.Module):
    """Weights, optimisers and running statistics."""

    weights: AgentWeights
    optimisers: dict[str, PyTree[Array]]
    """Of each parameter set; with a leading axis of agents where each has its own."""
    targets: dict[str, Statistics] | None
    """Kind to statistics of what its critic learns, where values are normalised."""
    returns: dict[str, Float[Array, ""]]
    """Kind to its mean return over the episodes that ended in the last iteration in which any did."""


class Rows(NamedTuple):
    """What is learned from: leaves `[T, E, ...]` in a batch, `[N, ...]` in a minibatch."""

    view: AgentView
    """Normalised."""
    agents: dict[str, Samples]
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
    said, last, final = _values(policy, learner, trajectory)
    agents, weight = {}, {}
    targets = dict(learner.targets or {})
    for kind in policy.kinds:
        name = kind.name
        value, last_value, final_value = (_raw(learner, name, found[name]) for found in (said, last, final))
        advantage, target = _advantages(
            steps, name, value, last_value, final_value, gamma=gamma, gae_lambda=gae_lambda
        )
        active = steps.observation.active[name]
        if targets:
            targets[name] = update_statistics(
                targets[name], target, where=active, reduce=reduce, replicas=replicas
            )
            target = normalise(targets[name], target, clip=math.inf)
        mask = steps.action_mask.get(name, ()) if isinstance(steps.action_mask, dict) else ()
        log_prob = steps.extras[name]
        agents[name] = Samples((), mask, steps.action[name], log_prob, said[name], advantage, target, ())
        weight[name] = active.astype(jnp.float32)
    rows = Rows(policy.normalise(learner.weights, steps.observation), agents, weight)
    return AgentLearner(after.weights, after.optimisers, targets or None, after.returns), Batch(rows)


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


# --- a minibatch --------------------------------------------------------------------------------------


def condition(sets: tuple[ParameterSet, ...], minibatch: Batch, reduce: Reduce, *, standardise: bool) -> Batch:
    """Weights such that a mean over rows is a mean over active agents; advantages standardised over these.

    Advantages are standardised for each kind, or for each agent where each has its own parameters.
    """
    rows: Rows = minibatch.samples
    alone = {kind.name for group in sets if group.independent for kind in group.kinds}

    def means(values: dict[str, Float[Array, "N A"]]) -> dict[str, Float[Array, "1 #A"]]:
        each = {name: jnp.mean(x, 0 if name in alone else (0, 1), keepdims=True) for name, x in values.items()}
        return reduce(each)

    share = {name: jnp.maximum(found, 1e-9) for name, found in means(rows.weight).items()}
    weight = {name: found / _share_of_set(sets, name, share) for name, found in rows.weight.items()}
    agents = rows.agents
    if standardise:
        over_active = lambda x: {n: m / share[n] for n, m in means({n: x[n] * rows.weight[n] for n in x}).items()}
        advantage = {name: samples.advantage for name, samples in agents.items()}
        centred = {name: advantage[name] - mean for name, mean in over_active(advantage).items()}
        variance = over_active({name: jnp.square(x) for name, x in centred.items()})
        agents = {
            name: samples._replace(advantage=centred[name] / (jnp.sqrt(variance[name]) + 1e-8))
            for name, samples in agents.items()
        }
    return minibatch._replace(samples=Rows(rows.view, agents, weight))


def _share_of_set(sets: tuple[ParameterSet, ...], name: str, share: dict[str, Array]) -> Float[Array, "1 #A"]:
    """The part of samples in which agents are active, over all kinds of the set that a kind belongs to."""
    group = set_of(sets, name)
    parts = [kind.count / group.size * share[kind.name] for kind in group.kinds]
    return sum(parts[1:], start=parts[0])


def mean_gradients(
    policy: AgentPolicy, loss: SampleLoss, learner: AgentLearner, minibatch: Batch
) -> tuple[dict[str, PyTree[Array]], Metrics]:
    """Of the sum over parameter sets of the mean losses of their active agents."""

    def mean_loss(networks):
        losses, metrics = jax.vmap(partial(_row_loss, policy, loss, networks))(minibatch.samples)
        return jnp.mean(losses), jax.tree.map(jnp.mean, metrics)

    (total, metrics), slopes = jax.value_and_grad(mean_loss, has_aux=True)(learner.weights.networks)
    returns = {f"returns/{name}": found for name, found in learner.returns.items()}
    return slopes, {"losses/total": total, **metrics, **returns}


def _row_loss(
    policy: AgentPolicy, loss: SampleLoss, networks: dict[str, PyTree[Array]], row: Rows
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
