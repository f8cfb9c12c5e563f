"""An off-policy algorithm in one file: soft Q-learning (Haarnoja et al., ICML 2017) with discrete actions."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

import rollmill
from rollmill.algorithms import (
    StepCounts,
    adam,
    count_update,
    descend,
    functional_network,
    initial_progress,
    off_policy_graph,
    prepare_off_policy,
    update_target,
)
from rollmill.dataflow import Decision, MeanGradients
from rollmill.networks import Categorical, action_values


@dataclass(frozen=True)
class SoftQConfig(rollmill.DQNConfig):
    """Hyperparameters of soft Q-learning: those of DQN that it uses, and a temperature."""

    tau: float = 0.05
    """Fraction by which the target network follows after each update."""
    temperature: float = 0.5
    """Weight of the policy's entropy beside rewards."""


class SoftQLearner(eqx.Module):
    network: PyTree[Array]
    target: PyTree[Array]
    optimiser: PyTree[Array]
    progress: StepCounts


def soft_q(env: Any, config: SoftQConfig | None = None, **overrides: Any) -> Any:
    """Soft Q-learning as a graph."""
    parts = prepare_off_policy(SoftQConfig, env, config, overrides, params=None, network=None)
    chosen, optimiser = parts.config, adam(parts)
    values = functional_network(
        lambda key: action_values(
            key, parts.env.observation_space, parts.env.action_space, chosen.network, duelling=False
        )
    )

    def sample(weights, key, memory, observation, action_mask):
        return Decision(Categorical(values(weights, observation) / chosen.temperature).sample(key), memory, ())

    def best(weights, key, memory, observation, action_mask):
        return Decision(Categorical(values(weights, observation)).mode(), memory, ())

    def start(key):
        network = values.init(key)
        return SoftQLearner(network, network, optimiser.init(network), initial_progress())

    return off_policy_graph(
        "soft_q",
        parts,
        policy=sample,
        greedy=best,
        start_learner=start,
        weights=lambda learner: learner.network,
        gradients=MeanGradients(partial(loss, values, chosen), lambda learner: learner.network),
        update=partial(update, chosen, optimiser),
        report=lambda learner, batch: {},
    )


def loss(values, config, network, learner, sample, sequence):
    """The loss of a single transition."""
    each = values(network, sample.observation)
    value = jnp.sum(jnp.where(jnp.arange(each.size) == sample.action, each, 0))
    scaled = values(learner.target, sample.next_observation) / config.temperature
    next_value = config.temperature * jax.nn.logsumexp(scaled)
    error = jax.lax.stop_gradient(sample.reward + sample.discount * next_value) - value
    return jnp.square(error), {"losses/td_error": jnp.abs(error)}


def update(config, optimiser, learner, gradients, *, share=1.0):
    network, state = descend(optimiser, learner.network, learner.optimiser, gradients, share=share)
    return SoftQLearner(
        network, update_target(learner.target, network, config.tau), state, count_update(learner.progress)
    )
