"""Losses and gradients of minibatches of several agents.

One sample (row) of a minibatch is one environment step with all its agents, as in `multi_agent`.

Shape letters: `N` rows of a minibatch, or its sequences and their steps, `A` agents of a kind.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from rollmill.algorithms.agents import AgentPolicy
from rollmill.algorithms.hyperparameters import current_config, current_hyperparameters
from rollmill.algorithms.multi_agent import EPS, UNFUSED, AgentLearner, SetRows
from rollmill.algorithms.on_policy import SampleLoss, TrainingSamples
from rollmill.algorithms.roles import numbers_of_role
from rollmill.algorithms.sharing import ParameterSet, set_of
from rollmill.core.types import Memory
from rollmill.dataflow import Batch, MeanGradients, Metrics, Reduce, SequenceGradients
from rollmill.networks import Output


def condition(
    sets: tuple[ParameterSet, ...],
    minibatch: Batch,
    reduce: Reduce,
    *,
    standardise: bool,
    num_rows: int | None = None,
) -> Batch:
    """Sets sample weights so that a mean over rows is a mean over active agents, and standardises advantages.

    Advantages are standardised for each kind, or for each independent agent. If only one agent is active, its
    advantage is not changed, because it would always become zero. The minibatch contains this replica's part of
    `num_rows` rows, by default all rows.
    """
    rows: SetRows = minibatch.samples
    independent = {name for group in sets if group.independent for name in group.names}
    leading = tuple(range(jax.tree.leaves(rows.weight)[0].ndim - 1))
    local = {
        name: _moments(samples.advantage, rows.weight[name], leading if name in independent else None)
        for name, samples in rows.agents.items()
    }
    reduced = reduce(local if standardise else {name: moments.share for name, moments in local.items()})
    agents, share = rows.agents, reduced
    if standardise:
        agents = {
            name: _standardise(samples, reduced[name], counted=num_rows, each=name in independent)
            for name, samples in agents.items()
        }
        share = {name: moments.share for name, moments in reduced.items()}
    weight = {name: active / _share_of_set(sets, name, share) for name, active in rows.weight.items()}
    return minibatch._replace(samples=rows._replace(agents=agents, weight=weight))


class _Moments(NamedTuple):
    """Moments of active agents' advantages in one part of a minibatch, as means over all its agents.

    Averaging equal parts then gives the minibatch's means, and one reduction is enough (Chan et al., 1979): the
    total variance is the mean of the parts' variances plus the variance of their means.
    """

    share: Float[Array, "... #A"]
    """Fraction of agents that are active."""
    mean: Float[Array, "... #A"]
    """Mean advantage of active agents, times their share."""
    variance: Float[Array, "... #A"]
    """Variance around the part's own mean, times the share."""
    square: Float[Array, "... #A"]
    """Square of the part's own mean, times the share."""


def _moments(
    advantage: Float[Array, "*N A"], active: Float[Array, "*N A"], axes: tuple[int, ...] | None
) -> _Moments:
    mean = partial(jnp.mean, axis=axes, keepdims=True)
    share = jnp.maximum(mean(active), EPS)
    local_mean = mean(active * advantage) / share
    variance = mean(active * jnp.square(advantage - local_mean))
    return _Moments(share, share * local_mean, variance, share * jnp.square(local_mean))


def _standardise(
    samples: TrainingSamples, moments: _Moments, *, counted: int | None, each: bool
) -> TrainingSamples:
    """Returns the samples of a kind with standardised advantages, by the moments of the whole minibatch.

    `counted` are its rows. With `each`, each agent is standardised by itself.
    """
    share, mean, variance, square = moments
    mean = mean / share
    deviation = jnp.sqrt(variance / share + jnp.maximum(square / share - jnp.square(mean), 0))
    *rows, agents = samples.advantage.shape
    active = share * ((counted or math.prod(rows)) * (1 if each else agents))
    standardised = (samples.advantage - mean) / (deviation + 1e-8)
    return samples._replace(advantage=jnp.where(active > 1.5, standardised, samples.advantage))


def _share_of_set(sets: tuple[ParameterSet, ...], name: str, share: dict[str, Array]) -> Float[Array, "... #A"]:
    """Returns the fraction of active agents over all kinds in the parameter set of a kind."""
    group = set_of(sets, name)
    parts = [kind.count / group.size * share[kind.name] for kind in group.kinds]
    return sum(parts[1:], start=parts[0])


def mean_gradients(policy: AgentPolicy, loss: SampleLoss, config: Any) -> MeanGradients | SequenceGradients:
    """Returns the fragment `gradients`, for the mean loss of active agents, summed over parameter sets.

    The loss is for one agent in one environment step.
    """
    network = lambda learner: learner.weights.networks
    if not policy.recurrent:
        return MeanGradients(partial(_row_loss, policy, loss, config), network)
    return SequenceGradients(
        partial(_recurrent_step, policy, loss, config),
        loss=lambda learner, row, constants, loss_and_metrics: loss_and_metrics,
        network=network,
        start_memory=lambda memory: memory,
        unfused_reason=UNFUSED,
    )


def _row_loss(
    policy: AgentPolicy,
    loss: SampleLoss,
    config: Any,
    networks: dict[str, PyTree[Array]],
    learner: AgentLearner,
    row: SetRows,
    sequence: PyTree[Array],
) -> tuple[Float[Array, ""], Metrics]:
    """Computes the loss and the metrics of ONE environment step, for agents without a memory."""
    masks = _masks(row)
    distributions = policy.distributions(networks, row.view.agents, (), masks)
    values = policy.values(networks, row.view, ())
    outputs = {name: Output(distributions[name], values[name], ()) for name in values}
    return _loss_of_outputs(policy, loss, config, learner, row, outputs)


def _recurrent_step(
    policy: AgentPolicy,
    loss: SampleLoss,
    config: Any,
    networks: dict[str, PyTree[Array]],
    learner: AgentLearner,
    memory: Memory,
    row: SetRows,
) -> tuple[Memory, tuple[Float[Array, ""], Metrics]]:
    """Returns the memories of all agents after ONE environment step, and the loss and metrics of the step."""
    memory = jax.tree.map(partial(jnp.where, row.begins), policy.start_memory(), memory)
    outputs = policy.advance(networks, row.view, memory, _masks(row))
    after = {name: output.memory for name, output in outputs.items()}
    return after, _loss_of_outputs(policy, loss, config, learner, row, outputs)


def _masks(row: SetRows) -> dict[str, PyTree]:
    return {name: samples.action_mask for name, samples in row.agents.items()}


def _loss_of_outputs(
    policy: AgentPolicy,
    loss: SampleLoss,
    config: Any,
    learner: AgentLearner,
    row: SetRows,
    outputs: dict[str, Output],
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the loss and the metrics of ONE environment step.

    Metrics are means over parameter sets, followed by the metrics of each set if there are several. The learner
    holds the returns of each kind, which are equal for all steps.
    """
    held = current_hyperparameters(learner)

    def of_kind(name: str) -> tuple[Float[Array, ""], Metrics]:
        own = current_config(config, numbers_of_role(held, "ent_coefs", name))
        agent_loss = lambda sample, output: loss(own, sample, output)
        losses = jax.vmap(agent_loss)(row.agents[name], outputs[name])
        return jax.tree.map(partial(jnp.vdot, row.weight[name]), losses)

    total, set_metrics = jnp.float32(0), {}
    for group in policy.sets:
        sums = jax.tree.map(lambda *parts: sum(parts), *(of_kind(name) for name in group.names))
        set_loss, set_metrics[group.name] = jax.tree.map(lambda x, size=group.size: x / size, sums)
        # Losses of independent agents are summed, because each agent's weights get the gradient of only its own
        # loss.
        total = total + (sums[0] if group.independent else set_loss)
    over_sets = jax.tree.map(lambda *metrics: sum(metrics) / len(metrics), *set_metrics.values())
    over_sets |= {f"returns/{name}": value for name, value in learner.returns.items()}
    if len(set_metrics) == 1:
        return total, over_sets
    by_set = {f"{metric}/{name}": x for name, metrics in set_metrics.items() for metric, x in metrics.items()}
    return total, {**over_sets, **by_set}
