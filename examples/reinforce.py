r"""REINFORCE with a learned baseline (Williams, 1992), with a network of Rollmill and Adam.

    rollmill train reinforce-baseline CartPole-v1 --import examples/reinforce.py --num-seeds 4
    rollmill sweep reinforce-baseline CartPole-v1 --import examples/reinforce.py --over learning-rate=1e-3,3e-3

The critic is the baseline, and learns the discounted return. The algorithm takes all spaces for which Rollmill has
networks, action masks included, but no network with memory. The learner holds the numbers in `numbers`, so that
trials of a sweep that differ in them share one program. The weights of the entropy and of the baseline's loss may
follow a schedule, as in `--ent-coef linear:0.01:0`.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import rollmill
from rollmill.algorithms import (
    Optimiser,
    ScheduledNonNegative,
    bootstrap_values,
    clip_to_space,
    clipped_descent,
    count_planned_update,
    current_config,
    current_hyperparameters,
    descend,
    environment_functions,
    functional_network,
    generalised_advantages,
    graph_settings,
    no_updates,
    numbers_to_hold,
    schedule_evaluator,
    schedule_metrics,
)
from rollmill.dataflow import Batch, Decision, Graph, Loops, MeanGradients, PolicyOutputs


@dataclass(frozen=True)
class ReinforceConfig:
    """Hyperparameters of REINFORCE with a baseline. Each is an option of the command."""

    total_timesteps: int = 200_000
    """Environment steps of the training."""
    num_envs: int = 32
    """Environments that run side by side."""
    num_steps: int = 64
    """Steps of a rollout."""
    learning_rate: float = 3e-3
    """Learning rate of Adam."""
    gamma: float = 0.99
    """Discount factor."""
    vf_coef: ScheduledNonNegative = 0.5
    """Weight of the baseline's loss."""
    ent_coef: ScheduledNonNegative = 0.0
    """Weight of the policy's entropy."""
    network: rollmill.NetworkConfig = rollmill.NetworkConfig()
    """Settings of the network."""


class Learner(eqx.Module):
    """What training changes."""

    weights: Any
    optimiser: Any
    hyperparameters: Any
    progress: Any
    """Number of updates so far, which schedules follow."""

    @property
    def updates_done(self):
        """Number of updates so far, as one number."""
        return self.progress.updates


def build(env, config):  # noqa: C901 - a function for each part of the graph
    """REINFORCE with a learned baseline."""
    functions = environment_functions(env, num_envs=config.num_envs)
    network = functional_network(
        lambda key: rollmill.actor_critic(key, env.observation_space, env.action_space, config.network)
    )
    loops = Loops(
        iterations=-(-config.total_timesteps // (config.num_envs * config.num_steps)),  # rounded up
        num_envs=config.num_envs,
        num_steps=config.num_steps,
        epochs=1,
        num_minibatches=1,
        num_shards=4,  # up to 4 learners
        minibatch_items="samples",
    )
    numbers = numbers_to_hold(config, loops)
    adam = Optimiser(
        lambda held: clipped_descent(
            optax.scale_by_adam(), learning_rate=(numbers | held)["learning_rate"], max_grad_norm=0.5
        )
    )

    def distribution(weights, memory, observation, action_mask):
        return network(weights, observation, memory, action_mask).distribution

    def value(weights, memory, observation):
        return network(weights, observation, memory).value

    def decide(weights, key, memory, observation, action_mask):
        action = distribution(weights, memory, observation, action_mask).sample(key)
        return Decision(action, memory, ())

    def decide_greedily(weights, key, memory, observation, action_mask):
        return Decision(distribution(weights, memory, observation, action_mask).mode(), memory, ())

    def step(key, state, action):
        return functions.step(key, state, clip_to_space(env.action_space, action))  # a Gaussian may exceed a Box

    def estimate(config, weights, steps, last_observation):
        """Returns and advantages of a single environment. Leaves of `steps` are `[T, ...]`."""
        of_many = jax.vmap(partial(value, weights, ()))
        values = of_many(steps.observation)
        last, final = value(weights, (), last_observation), of_many(steps.final_observation)
        next_values = bootstrap_values(values, last, final, steps.terminated, steps.truncated)
        done = steps.terminated | steps.truncated
        # With `gae_lambda=1`, an advantage is the whole return minus the baseline.
        return generalised_advantages(steps.reward, values, next_values, done, gamma=config.gamma, gae_lambda=1.0)

    def prepare(learner, trajectory, *, reduce, replicas):
        """Computes the batch of an iteration: leaves `[T, E, ...]`."""
        steps, now = trajectory.steps, current_config(config, current_hyperparameters(learner))
        of_one = partial(estimate, now, learner.weights)
        estimates = jax.vmap(of_one, in_axes=(1, 0), out_axes=1)(steps, trajectory.observation)
        samples = {name: getattr(steps, name) for name in ("observation", "action", "action_mask")}
        return learner, Batch({**samples, "advantage": estimates.advantage, "target": estimates.target})

    def loss(weights, learner, sample, sequence):
        """Computes the loss of a single sample, and metrics of it."""
        output = network(weights, sample["observation"], (), sample["action_mask"])
        policy_loss = -output.distribution.log_prob(sample["action"]) * sample["advantage"]
        value_loss = jnp.square(output.value - sample["target"])
        entropy = output.distribution.entropy()
        now = current_config(config, current_hyperparameters(learner))
        metrics = {"losses/policy": policy_loss, "losses/value": value_loss, "losses/entropy": entropy}
        return policy_loss + now.vf_coef * value_loss - now.ent_coef * entropy, metrics

    def update(learner, gradients, *, share=1.0):
        weights, state = descend(
            adam, learner.weights, learner.optimiser, gradients, learner.hyperparameters, share=share
        )
        progress = count_planned_update(learner.progress, share)
        return replace(learner, weights=weights, optimiser=state, progress=progress)

    def start_learner(key):
        weights = network.init(key)
        return Learner(weights, adam.init(weights), jax.tree.map(jnp.float32, numbers), no_updates())

    return Graph(
        settings=graph_settings("reinforce-baseline", env, config),
        observation_space=env.observation_space,
        action_space=env.action_space,
        loops=loops,
        environment=step,
        policy=decide,
        gradients=MeanGradients(loss, lambda learner: learner.weights),
        update=update,
        start_environment=functions.start,
        start_memory=lambda: (),
        start_learner=start_learner,
        action_mask=functions.action_mask,
        weights=lambda learner: learner.weights,
        prepare=prepare,
        condition=lambda minibatch, reduce: minibatch,
        greedy=decide_greedily,
        outputs=PolicyOutputs(distribution=distribution, value=value),
        report=lambda learner, batch: schedule_metrics(learner),
        evaluate_schedules=schedule_evaluator(numbers),
        hyperparameters=numbers,
    )


reinforce = rollmill.register_algorithm("reinforce-baseline", build, ReinforceConfig)
