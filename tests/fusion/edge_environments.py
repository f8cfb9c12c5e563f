"""Environments whose steps pass through the edges of their types; importing this module registers them."""

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

import rollmill
from rollmill import Environment, Timestep


def number(x) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def invalid_numbers() -> Environment:
    """NaN and infinities inside every step, and none of them outside."""

    def reset(key, params):
        x = jax.random.normal(key, (5,))
        return jnp.tanh(x), (x, jnp.int32(0))

    def step(key, state, action, params):
        x, t = state
        logs, roots = jnp.log(x), jnp.sqrt(x - 0.2)
        ratios = jnp.where(t % 4 == 1, x / (x - x), -1.0 / jnp.where(x > 0, x * 0, x))
        whole = jnp.concatenate([logs, ratios * 1e3]).astype(jnp.int32) // 7
        small = (ratios * 40).astype(jnp.int8).astype(jnp.int32) + roots.astype(jnp.uint8).astype(jnp.int32)
        places = 3 * jnp.argmax(logs) + jnp.argmin(ratios) - jnp.argsort(roots)[2] + jnp.argmax(jnp.isnan(roots))
        extremes = jnp.nan_to_num(jnp.max(logs), nan=0.25) + jnp.nan_to_num(jnp.clip(ratios, -2.0, 2.0)).sum()
        ordered = jnp.nan_to_num(jnp.sort(logs), nan=5.0)
        counted = jnp.stack([places, (jnp.abs(whole) % 97).sum(), small.sum()])
        reward = extremes + number(counted).sum() * 0.01
        following = jnp.nan_to_num(
            0.8 * x + 0.4 * jnp.cos(number(jnp.arange(5) * t + action)), posinf=2.0, neginf=-2.0
        )
        done = jnp.isnan(logs).sum() == 5
        return Timestep(jnp.tanh(ordered), (following, t + 1), reward, done, t >= 15, {})

    return Environment("InvalidNumbers", reset, step, spaces.Box(-1, 1, (5,), np.float32), spaces.Discrete(3))


def growing_angle() -> Environment:
    """An angle that multiplies, of which sine and cosine alone are seen."""

    def seen(angle):
        return jnp.stack([jnp.sin(angle), jnp.cos(angle)])

    def reset(key, params):
        angle = jax.random.uniform(key, minval=0.5, maxval=1.5)
        return seen(angle), (angle, jnp.int32(0))

    def step(key, state, action, params):
        angle, t = state
        angle = -angle * (2.5 + 0.75 * number(action))
        return Timestep(seen(angle), (angle, t + 1), jnp.sin(angle), jnp.asarray(False), t >= 45, {})

    return Environment("GrowingAngle", reset, step, spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3))


def small_registers() -> Environment:
    """Integers of 8, 16 and 32 bits that wrap around, are divided by zero and shifted by all bits and more."""

    def reset(key, params):
        byte, word = jax.random.split(key)
        state = (
            jax.random.bits(byte, (), jnp.uint8),
            jnp.int8(-128),
            jnp.uint16(3),
            jnp.int16(32767),
            jax.random.bits(word, (), jnp.uint32).astype(jnp.int32),
        )
        return jnp.zeros(5), state

    def step(key, state, action, params):
        lax = jax.lax
        a, b, c, d, e = state
        a = a * jnp.uint8(5) + action.astype(jnp.uint8) * jnp.uint8(99)
        b = lax.div(b, (a & jnp.uint8(3)).astype(jnp.int8) - jnp.int8(1)) - jnp.int8(55)
        c = (c << (a & jnp.uint8(31)).astype(jnp.uint16)) ^ lax.div(c, (a & jnp.uint8(1)).astype(jnp.uint16)) | 5
        d = lax.rem(d, b.astype(jnp.int16)) * jnp.int16(301) + jnp.int16(-7) // (d | jnp.int16(1))
        by = (a % jnp.uint8(37)).astype(jnp.int32)
        e = (e << by) + (e >> by) - lax.shift_right_logical(e, by) * 5 + action * 1664525 + 1013904223
        quotient, rest = jnp.divmod(e, jnp.where(b == 0, jnp.int8(9), b).astype(jnp.int32))
        cut_off = lax.rem(e, jnp.int32(-9))
        bits = lax.population_count(a) + lax.clz(c).astype(jnp.uint8) + lax.clz(b).astype(jnp.uint8)
        scales = [(a, 255), (b, 128), (c, 65536), (d, 32768), (bits, 24)]
        observation = jnp.stack([number(x) / scale for x, scale in scales])
        reward = number(quotient % 1000) * 1e-3 + number(rest % 100) * 1e-2 + number(cut_off)
        ended, cut = a == jnp.uint8(77), (c & jnp.uint16(255)) == jnp.uint16(7)
        return Timestep(observation, (a, b, c, d, e), reward, ended, cut, {})

    return Environment("SmallRegisters", reset, step, spaces.Box(-2, 2, (5,), np.float32), spaces.Discrete(4))


ENVIRONMENTS = {
    "InvalidNumbers-v0": invalid_numbers,
    "GrowingAngle-v0": growing_angle,
    "SmallRegisters-v0": small_registers,
}
for name, make in ENVIRONMENTS.items():
    if name not in rollmill.registered():
        rollmill.register(name, make)
