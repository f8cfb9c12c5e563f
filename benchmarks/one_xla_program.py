"""PPO on CartPole as one XLA program in the least code, as the peer of Rollmill's own program.

As PureJaxRL does it, and lighter: environments draw from a counter-based hash instead of JAX's generator, time
limits count as terminations, nothing is recorded, and no state can be resumed.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Sizes(NamedTuple):
    num_envs: int
    num_steps: int
    epochs: int
    num_minibatches: int


class CartPole(NamedTuple):
    x: jax.Array
    v: jax.Array
    angle: jax.Array
    rate: jax.Array
    age: jax.Array


def hash_uniform(seed):
    seed = seed * jnp.uint32(747796405) + jnp.uint32(2891336453)
    word = ((seed >> ((seed >> 28) + 4)) ^ seed) * jnp.uint32(277803737)
    return seed, (((word >> 22) ^ word) >> 8).astype(jnp.float32) / 2**24


def step_with_reset(state: CartPole, action, seed):
    force = jnp.where(action == 1, 10.0, -10.0)
    cos, sin = jnp.cos(state.angle), jnp.sin(state.angle)
    push = (force + 0.05 * state.rate**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    moved = (
        state.x + 0.02 * state.v,
        state.v + 0.02 * (push - 0.05 * turn * cos / 1.1),
        state.angle + 0.02 * state.rate,
        state.rate + 0.02 * turn,
    )
    age = state.age + 1
    done = (jnp.abs(moved[0]) > 2.4) | (jnp.abs(moved[2]) > 0.2095) | (age >= 500)
    after = []
    for old in moved:
        seed, u = hash_uniform(seed)
        after.append(jnp.where(done, u * 0.1 - 0.05, old))
    return CartPole(*after, jnp.where(done, 0, age)), done, seed


def mlp(key, sizes: Sequence[int], gain: float):
    """Returns orthogonal weights and zero biases of each layer; `gain` is that of the last."""
    keys, layers = jax.random.split(key, len(sizes) - 1), list(pairwise(sizes))
    gains = [2**0.5] * (len(layers) - 1) + [gain]
    return [
        (jax.nn.initializers.orthogonal(g)(k, shape), jnp.zeros(shape[1]))
        for k, shape, g in zip(keys, layers, gains, strict=True)
    ]


def forward(layers, x):
    for weight, bias in layers[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def loss(params, batch):
    observation, action, old_log_prob, advantage, target = batch
    log_probs = jax.nn.log_softmax(forward(params["actor"], observation))
    log_prob = jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0]
    ratio = jnp.exp(log_prob - old_log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
    value_loss = jnp.square(forward(params["critic"], observation)[:, 0] - target).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return -surrogate + 0.5 * value_loss - 0.01 * entropy


def iteration(sizes: Sizes, optimiser, carry, _):
    params, opt_state, state, seed, key = carry

    def collect(carry, _):
        state, seed = carry
        observation = jnp.stack(state[:4], -1)
        log_probs = jax.nn.log_softmax(forward(params["actor"], observation))
        value = forward(params["critic"], observation)[:, 0]
        seed, u = hash_uniform(seed)
        action = (u < jnp.exp(log_probs[:, 1])).astype(jnp.int32)
        log_prob = jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0]
        state, done, seed = step_with_reset(state, action, seed)
        return (state, seed), (observation, action, log_prob, value, done)

    (state, seed), rollout = jax.lax.scan(collect, (state, seed), None, sizes.num_steps)
    observation, action, log_prob, value, done = rollout
    last = forward(params["critic"], jnp.stack(state[:4], -1))[:, 0]

    def gae(carry, now):
        advantage, next_value = carry
        value, done = now
        delta = 1.0 + 0.99 * next_value * (1 - done) - value
        advantage = delta + 0.99 * 0.95 * (1 - done) * advantage
        return (advantage, value), advantage

    inputs = (value, done.astype(jnp.float32))
    _, advantage = jax.lax.scan(gae, (jnp.zeros_like(last), last), inputs, reverse=True, unroll=16)
    batch = (observation, action, log_prob, advantage, advantage + value)
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)

    def minibatch(carry, batch):
        params, opt_state = carry
        updates, opt_state = optimiser.update(jax.grad(loss)(params, batch), opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    def epoch(carry, _):
        params, opt_state, key = carry
        key, now = jax.random.split(key)
        order = jax.random.permutation(now, sizes.num_envs * sizes.num_steps)
        split = lambda leaf: leaf[order].reshape(sizes.num_minibatches, -1, *leaf.shape[1:])
        (params, opt_state), _ = jax.lax.scan(minibatch, (params, opt_state), jax.tree.map(split, flat))
        return (params, opt_state, key), None

    (params, opt_state, key), _ = jax.lax.scan(epoch, (params, opt_state, key), None, sizes.epochs)
    return (params, opt_state, state, seed, key), done.mean()


def one_program_turns(sizes: Sizes, iterations: int) -> Callable[[], float]:
    """Returns a function that trains some more iterations, and returns their environment steps per second."""
    optimiser = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))
    actor, critic = jax.random.split(jax.random.key(0))
    params = {"actor": mlp(actor, (4, 64, 64, 2), 0.01), "critic": mlp(critic, (4, 64, 64, 1), 1.0)}
    key = jax.random.key(1)
    start = jax.random.uniform(key, (4, sizes.num_envs), minval=-0.05, maxval=0.05)
    state = CartPole(*start, jnp.zeros(sizes.num_envs, jnp.int32))
    carry = (params, optimiser.init(params), state, jax.random.bits(key, (sizes.num_envs,), jnp.uint32), key)
    many = jax.jit(lambda carry: jax.lax.scan(partial(iteration, sizes, optimiser), carry, None, iterations))
    many = many.lower(carry).compile()

    def turn() -> float:
        nonlocal carry
        began = time.perf_counter()
        carry, _ = jax.block_until_ready(many(carry))
        return iterations * sizes.num_envs * sizes.num_steps / (time.perf_counter() - began)

    return turn
