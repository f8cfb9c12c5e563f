"""PPO on Craftax as its authors' baselines train it, written anew as the peer of Rollmill's training.

One XLA program over Craftax's environments without auto-reset, as in github.com/MichaelTMatthews/Craftax_Baselines
(`ppo.py` at its defaults; PureJaxRL by Lu et al. before it). Time limits count as terminations, the environment's
state accounts for episodes, and resets are optimistic: every step generates `num_envs / reset_ratio` worlds. Each
environment has one of them within reach, those that finished get different ones as far as there are enough, and
several may use the same world.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from craftax.craftax_env import make_craftax_env_from_name
from one_xla_program import forward, mlp


class Settings(NamedTuple):
    """The authors' defaults."""

    num_envs: int = 1024
    num_steps: int = 64
    epochs: int = 4
    num_minibatches: int = 8
    width: int = 512
    learning_rate: float = 2e-4
    gamma: float = 0.99
    gae_lambda: float = 0.8
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5
    max_grad_norm: float = 1.0
    reset_ratio: int = 16


class Episodes(NamedTuple):
    state: Any
    total: jax.Array
    length: jax.Array


class Carry(NamedTuple):
    weights: Any
    optimiser: Any
    episodes: Episodes
    observation: jax.Array
    key: jax.Array


class Moment(NamedTuple):
    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


def outputs(weights: dict, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns log-probabilities of the actions, and the value."""
    logits, value = forward(weights["actor"], observation), forward(weights["critic"], observation)
    return jax.nn.log_softmax(logits), value[:, 0]


def log_prob_of(log_probs: jax.Array, action: jax.Array) -> jax.Array:
    return jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0]


def worlds_for(key: jax.Array, done: jax.Array, num_worlds: int) -> jax.Array:
    """Returns for each environment the index of the world that it gets if it is done."""
    nearest = jnp.arange(num_worlds).repeat(done.size // num_worlds)
    by_chance = jax.random.choice(key, done.size, (num_worlds,), replace=False, p=done.astype(jnp.float32))
    chosen = jnp.where(done.sum() < num_worlds, jnp.argsort(done)[-num_worlds:], by_chance)
    return nearest.at[chosen].set(jnp.arange(num_worlds))


def step_and_reset(env: Any, settings: Settings, key: jax.Array, episodes: Episodes, action: jax.Array) -> tuple:
    params, num_worlds = env.default_params, settings.num_envs // settings.reset_ratio
    step_key, reset_key, world_key = jax.random.split(key, 3)
    step = jax.vmap(env.step, (0, 0, 0, None))
    keys = jax.random.split(step_key, settings.num_envs)
    observation, state, reward, done, info = step(keys, episodes.state, action, params)
    fresh = jax.vmap(env.reset, (0, None))(jax.random.split(reset_key, num_worlds), params)
    world = worlds_for(world_key, done, num_worlds)

    def select(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(done.reshape(-1, *[1] * (old.ndim - 1)), new[world], old)

    observation, state = jax.tree.map(select, fresh, (observation, state))
    total, length = episodes.total + reward, episodes.length + 1
    info = {**info, "return": total, "length": length}
    return observation, Episodes(state, total * (1 - done), length * (1 - done)), reward, done, info


def advantages_of(settings: Settings, rollout: Moment, last_value: jax.Array) -> jax.Array:
    def earlier(carry: tuple, now: Moment) -> tuple:
        advantage, next_value = carry
        continues = 1.0 - now.done
        delta = now.reward + settings.gamma * next_value * continues - now.value
        advantage = delta + settings.gamma * settings.gae_lambda * continues * advantage
        return (advantage, now.value), advantage

    start = (jnp.zeros_like(last_value), last_value)
    return jax.lax.scan(earlier, start, rollout, reverse=True, unroll=16)[1]


def loss(settings: Settings, weights: dict, batch: tuple) -> jax.Array:
    moment, advantage, target = batch
    log_probs, value = outputs(weights, moment.observation)
    ratio = jnp.exp(log_prob_of(log_probs, moment.action) - moment.log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped_ratio = jnp.clip(ratio, 1 - settings.clip, 1 + settings.clip)
    policy_loss = -jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()
    clipped = moment.value + jnp.clip(value - moment.value, -settings.clip, settings.clip)
    value_loss = 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(clipped - target)).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return policy_loss + settings.value * value_loss - settings.entropy * entropy


def iteration(env: Any, settings: Settings, optimiser: Any, carry: Carry, _: None) -> tuple[Carry, dict]:
    def collect(carry: Carry, _: None) -> tuple[Carry, tuple[Moment, dict]]:
        key, action_key, step_key = jax.random.split(carry.key, 3)
        log_probs, value = outputs(carry.weights, carry.observation)
        action = jax.random.categorical(action_key, log_probs)
        observation, episodes, reward, done, info = step_and_reset(env, settings, step_key, carry.episodes, action)
        log_prob = log_prob_of(log_probs, action)
        moment = Moment(carry.observation, action, log_prob, value, reward, done.astype(jnp.float32))
        return carry._replace(episodes=episodes, observation=observation, key=key), (moment, info)

    carry, (rollout, info) = jax.lax.scan(collect, carry, None, settings.num_steps)
    _, last_value = outputs(carry.weights, carry.observation)
    advantage = advantages_of(settings, rollout, last_value)
    samples = (rollout, advantage, advantage + rollout.value)
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), samples)

    def minibatch(learner: tuple, batch: tuple) -> tuple[tuple, None]:
        weights, state = learner
        updates, state = optimiser.update(jax.grad(partial(loss, settings))(weights, batch), state, weights)
        return (optax.apply_updates(weights, updates), state), None

    def epoch(learner: tuple, key: jax.Array) -> tuple[tuple, None]:
        order = jax.random.permutation(key, settings.num_envs * settings.num_steps)
        split = lambda leaf: leaf[order].reshape(settings.num_minibatches, -1, *leaf.shape[1:])
        return jax.lax.scan(minibatch, learner, jax.tree.map(split, rows))[0], None

    key, epochs_key = jax.random.split(carry.key)
    learner = (carry.weights, carry.optimiser)
    (weights, state), _ = jax.lax.scan(epoch, learner, jax.random.split(epochs_key, settings.epochs))
    ended = {name: (leaf * rollout.done).sum() for name, leaf in info.items()}
    return carry._replace(weights=weights, optimiser=state, key=key), {**ended, "ended": rollout.done.sum()}


class Peer(NamedTuple):
    """A compiled training. `run(carry)` does `iterations_per_call` iterations, and returns sums of metrics."""

    run: Any
    start: Carry


def build(
    name: str, settings: Settings, *, iterations_per_call: int, planned_iterations: int, seed: int = 0
) -> Peer:
    """Compiles the training of an environment. The learning rate falls to zero over the planned iterations."""
    env = make_craftax_env_from_name(name, False)
    updates = planned_iterations * settings.epochs * settings.num_minibatches
    rate = optax.linear_schedule(settings.learning_rate, 0.0, updates)
    optimiser = optax.chain(optax.clip_by_global_norm(settings.max_grad_norm), optax.adam(rate, eps=1e-5))

    @jax.jit
    def start(key: jax.Array) -> Carry:
        network_key, reset_key, key = jax.random.split(key, 3)
        keys = jax.random.split(reset_key, settings.num_envs)
        observation, state = jax.vmap(env.reset, (0, None))(keys, env.default_params)
        inputs, actions = observation.shape[-1], env.action_space(env.default_params).n
        actor, critic = jax.random.split(network_key)
        hidden = (inputs, *[settings.width] * 3)
        weights = {"actor": mlp(actor, (*hidden, actions), 0.01), "critic": mlp(critic, (*hidden, 1), 1.0)}
        zeros = jnp.zeros(settings.num_envs)
        episodes = Episodes(state, zeros, zeros.astype(jnp.int32))
        strong = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), episodes)
        return Carry(weights, optimiser.init(weights), strong, observation, key)

    def run(carry: Carry) -> tuple[Carry, dict]:
        step = partial(iteration, env, settings, optimiser)
        carry, metrics = jax.lax.scan(step, carry, None, iterations_per_call)
        return carry, jax.tree.map(jnp.sum, metrics)

    carry = start(jax.random.key(seed))
    return Peer(jax.jit(run).lower(carry).compile(), carry)
