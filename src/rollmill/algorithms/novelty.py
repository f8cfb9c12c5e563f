"""Rewards exploration by random network distillation.

In Burda et al., "Exploration by Random Network Distillation", ICLR 2019, a predictor learns the outputs of a
random network. Its error is large for rare observations. The error is added as a bonus to the reward of the step
that led to the observation, divided by the standard deviation of the bonus's discounted sums.

Departures from the paper: one critic values the sum of reward and bonus, so the end of an episode also ends the
bonus. Discounted sums restart with each rollout. The predictor learns from all samples, with the policy's
optimiser.

Shape letters: `T` steps, `E` environments of this replica.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Float, PyTree

from rollmill.algorithms.hyperparameters import current_config, current_hyperparameters
from rollmill.algorithms.network_policy import weights_and_rest
from rollmill.algorithms.on_policy import ActorCriticLearner, TrainingSamples, with_rate
from rollmill.algorithms.optimisers import Optimiser, count_planned_update, descend
from rollmill.algorithms.returns import decaying_sum
from rollmill.core.types import Key, Observation
from rollmill.dataflow import Batch, ElementwiseUpdate, Graph, MeanGradients, Metrics, Reduce, Step, Trajectory
from rollmill.envs import RunningStatistics, initial_statistics, scale, update_statistics
from rollmill.networks import NetworkConfig, action_values

FEATURES = 32
"""Number of outputs of the random network."""
NETWORK = NetworkConfig(hidden_sizes=(64, 64), activation="relu")
"""Hidden layers of the random network and of its predictor."""


class Novelty(eqx.Module):
    """State of random network distillation: the random network, its predictor, and statistics of the bonus."""

    target: PyTree[Array]
    predictor: PyTree[Array]
    returns: RunningStatistics
    """Running statistics of discounted sums of errors. Their standard deviation divides the bonus."""


class Distillation(NamedTuple):
    """Random network and predictor of random network distillation, as functions of their weights."""

    make: Callable[[Key], Any]
    static: PyTree
    """The parts of a network that are not weights."""

    def start(self, key: Key) -> Novelty:
        """Returns initial weights of the random network and the predictor, which differ."""
        one, other = (eqx.filter(self.make(each), eqx.is_inexact_array) for each in jax.random.split(key))
        return Novelty(one, other, initial_statistics(jax.ShapeDtypeStruct((), jnp.float32)))

    def error(self, target: PyTree[Array], predictor: PyTree[Array], observation: Observation) -> Float[Array, ""]:
        """Returns the predictor's mean squared error for one normalised observation."""
        wanted = jax.lax.stop_gradient(eqx.combine(target, self.static)(observation))
        return jnp.mean(jnp.square(eqx.combine(predictor, self.static)(observation) - wanted))


def distillation(space: spaces.Space, config: NetworkConfig) -> Distillation:
    """Creates the networks of random network distillation, with the image layout of `config`."""
    of_features = replace(NETWORK, image_layout=config.image_layout)
    make = partial(
        action_values,
        observation_space=space,
        action_space=spaces.Discrete(FEATURES),
        config=of_features,
        duelling=False,
    )
    return Distillation(make, weights_and_rest(make)[1])


def with_novelty(graph: Graph, policy: Any, config: Any, optimiser: Optimiser) -> Graph:
    """Adds an exploration bonus, weighted by `rnd_coef`, to the graph of an on-policy algorithm."""
    distilled = distillation(graph.observation_space, config.network)
    assert isinstance(graph.gradients, MeanGradients)
    of_both = MeanGradients(
        partial(_loss, distilled, graph.gradients.loss),
        lambda learner: (learner.weights.network, _novelty_of(learner).predictor),
    )
    return graph._replace(
        start_learner=partial(_start, distilled, graph.start_learner, optimiser),
        prepare=partial(_prepare, distilled, policy, config, graph.prepare),
        # Wrapped in a lambda, because the compiler fuses only known gradients, and this one has not been tested in
        # a
        # kernel.
        gradients=lambda learner, minibatch: of_both(learner, minibatch),
        update=ElementwiseUpdate(partial(_update, optimiser)),
    )


def _novelty_of(learner: ActorCriticLearner) -> Novelty:
    assert learner.novelty is not None
    return learner.novelty


def _start(
    distilled: Distillation, start: Callable[[Key], ActorCriticLearner], optimiser: Optimiser, key: Key
) -> ActorCriticLearner:
    learner, novelty = start(key), distilled.start(jax.random.fold_in(key, 1))
    return replace(
        learner, novelty=novelty, optimiser=optimiser.init((learner.weights.network, novelty.predictor))
    )


def _prepare(
    distilled: Distillation,
    policy: Any,
    config: Any,
    prepare: Callable[..., tuple[ActorCriticLearner, Batch]],
    learner: ActorCriticLearner,
    trajectory: Trajectory,
    *,
    reduce: Reduce,
    replicas: int,
) -> tuple[ActorCriticLearner, Batch]:
    """Adds the bonus to the rewards of a rollout, and updates its statistics for the next rollout."""
    now, steps, novelty = (
        current_config(config, current_hyperparameters(learner)),
        trajectory.steps,
        _novelty_of(learner),
    )
    seen = policy.normalise(learner.weights, _observations_reached(trajectory))
    error = partial(distilled.error, novelty.target, novelty.predictor)
    errors = jax.vmap(jax.vmap(error))(seen)
    decay = jnp.full_like(errors, now.gamma)
    sums = jax.vmap(decaying_sum, in_axes=1, out_axes=1)(errors, decay)
    returns = update_statistics(novelty.returns, sums, reduce=reduce, replicas=replicas)
    reward = steps.reward + now.rnd_coef * scale(returns, errors)
    learner = replace(learner, novelty=replace(novelty, returns=returns))
    rewarded = trajectory._replace(steps=steps._replace(reward=reward))
    return prepare(learner, rewarded, reduce=reduce, replicas=replicas)


def _observations_reached(trajectory: Trajectory) -> PyTree[Float[Array, "T E ..."]]:
    """Returns the observation after each step, before any reset."""
    steps: Step = trajectory.steps
    done = steps.terminated | steps.truncated

    def after(seen: Array, last: Array, final: Array) -> Array:
        following = jnp.concatenate([seen[1:], last[None]])
        return jnp.where(done.reshape(*done.shape, *(1,) * (seen.ndim - 2)), final, following)

    return jax.tree.map(after, steps.observation, trajectory.observation, steps.final_observation)


def _loss(
    distilled: Distillation,
    loss: Callable[..., tuple[Float[Array, ""], Metrics]],
    networks: tuple[PyTree[Array], PyTree[Array]],
    learner: ActorCriticLearner,
    sample: TrainingSamples,
    memory: PyTree[Array],
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the algorithm's loss of ONE sample plus the predictor's error."""
    network, predictor = networks
    total, metrics = loss(network, learner, sample, memory)
    error = distilled.error(_novelty_of(learner).target, predictor, sample.observation)
    return total + error, {**metrics, "losses/novelty": error}


def _update(
    optimiser: Optimiser, learner: ActorCriticLearner, gradients: PyTree[Array], *, share: float = 1.0
) -> ActorCriticLearner:
    """Makes one optimiser step for policy and predictor, as `on_policy.update` does."""
    novelty, progress = _novelty_of(learner), learner.progress
    networks = (learner.weights.network, novelty.predictor)
    held = with_rate(learner, current_hyperparameters(learner))
    (network, predictor), state = descend(optimiser, networks, learner.optimiser, gradients, held, share=share)
    return replace(
        learner,
        weights=replace(learner.weights, network=network),
        novelty=replace(novelty, predictor=predictor),
        optimiser=state,
        progress=None if progress is None else count_planned_update(progress, share),
    )
