"""Q-learning from whole sequences, by an algorithm that is not part of the package."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

import rollmill
from rollmill.dataflow import MeanGradients, SequenceReplay


@dataclass(frozen=True)
class SequencesConfig:
    num_envs: int = 4
    num_steps: int = 4
    num_shards: int = 4
    total_timesteps: int = 1024
    batch_size: int = 8
    learning_starts: int = 64
    gradient_steps: int = 2
    rollouts: int = 6


def build(env, config):
    """DQN that learns from the mean error over the steps of a sequence."""
    sizes = {name: value for name, value in vars(config).items() if name != "rollouts"}
    graph = rollmill.dqn(env, **sizes, buffer_size=4096, network=rollmill.NetworkConfig(hidden_sizes=(4,)))
    store = SequenceReplay(config.rollouts, config.num_steps, config.batch_size, config.learning_starts)
    gradients = MeanGradients(partial(loss, graph), lambda learner: learner.network)
    return graph._replace(replay=store, gradients=gradients, condition=lambda minibatch, reduce: minibatch)


def loss(graph, weights, learner, sample, sequence):
    """The mean squared one-step error of ONE sequence."""
    values = lambda weights: (
        lambda observation: graph.outputs.q_values(graph.weights(learner)._replace(network=weights), observation)
    )
    steps = sample.steps
    taken = jax.vmap(values(weights))(steps.observation)
    after = jnp.concatenate([steps.observation[1:], sample.observation[None]])
    ended = (steps.terminated | steps.truncated).reshape(-1, *[1] * (after.ndim - 1))
    best = jax.vmap(values(learner.target))(jnp.where(ended, steps.final_observation, after)).max(axis=-1)
    wanted = steps.reward + 0.99 * jnp.where(steps.terminated, 0, best)
    errors = jnp.take_along_axis(taken, steps.action[:, None].astype(jnp.int32), axis=-1)[:, 0] - wanted
    return jnp.mean(errors**2), {"losses/q": jnp.mean(errors**2)}


rollmill.register_algorithm("sequences", build, SequencesConfig)
