"""Machines, markets and other systems as users write them."""

import jax
import jax.numpy as jnp
import numpy as np
from user_environments import after, task

from rollmill import Environment

lax, random = jax.lax, jax.random


def quadrotor() -> Environment:
    """A quadrotor with a quaternion, seven combinations of thrust and torque, and two substeps."""
    inertia = jnp.array([0.1, 0.12, 0.2])

    def product(q, r):
        w, v, s, u = q[0], q[1:], r[0], r[1:]
        return jnp.concatenate([(w * s - jnp.dot(v, u))[None], w * u + s * v + jnp.cross(v, u)])

    def rotation(q):
        w, x, y, z = q
        return jnp.array(
            [
                [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
                [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
                [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
            ]
        )

    def reset(key, params):
        q = random.normal(key, (4,)) * 0.1 + jnp.array([1.0, 0, 0, 0])
        state = (jnp.zeros(3), jnp.zeros(3), q / jnp.linalg.norm(q), jnp.zeros(3), jnp.int32(0))
        return jnp.concatenate(state[:4]), state

    def step(key, state, action, params):
        x, v, q, w, time = state
        thrust = 9.81 + jnp.array([0.0, 3, -3, 0, 0, 0, 0])[action]
        torque = jnp.array(
            [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0.1, 0, 0], [-0.1, 0, 0], [0, 0.1, 0], [0, -0.1, 0.05]]
        )[action]
        for _ in range(2):
            a = rotation(q) @ jnp.array([0, 0, 1.0]) * thrust - jnp.array([0, 0, 9.81])
            v, x = v + 0.01 * a, x + 0.01 * v
            w = w + 0.01 * (torque - jnp.cross(w, inertia * w)) / inertia
            q = q + 0.005 * product(q, jnp.concatenate([jnp.zeros(1), w]))
            q = q / jnp.linalg.norm(q)
        roll = jnp.arctan2(2 * (q[0] * q[1] + q[2] * q[3]), 1 - 2 * (q[1] ** 2 + q[2] ** 2))
        pitch = jnp.arcsin(jnp.clip(2 * (q[0] * q[2] - q[3] * q[1]), -1, 1))
        reward = 1 - jnp.linalg.norm(x) - 0.1 * jnp.hypot(roll, pitch)
        state = (x, v, q, w, time + 1)
        return after(
            jnp.concatenate(state[:4]),
            state,
            reward,
            (jnp.abs(roll) > 1) | (jnp.linalg.norm(x) > 2),
            late=time >= 100,
        )

    return task("Quadrotor", 13, 7, reset, step)


def lorenz() -> Environment:
    """The Lorenz system, pushed along an axis, by Runge and Kutta's method in a scan."""

    def field(x, u):
        return jnp.stack([10 * (x[1] - x[0]), x[0] * (28 - x[2]) - x[1] + u, x[0] * x[1] - 8 / 3 * x[2]])

    def reset(key, params):
        x = random.uniform(key, (3,), minval=-5.0, maxval=5.0)
        return x, (x, jnp.int32(0))

    def step(key, state, action, params):
        x, time = state
        u = (action - 2).astype(jnp.float32) * 10

        def rk4(x, _):
            h = 0.005
            a = field(x, u)
            b = field(x + h / 2 * a, u)
            c = field(x + h / 2 * b, u)
            d = field(x + h * c, u)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
            return x, jnp.abs(x[0])

        x, path = lax.scan(rk4, x, length=2)
        return after(x, (x, time + 1), -jnp.tanh(path.mean() / 10), ~jnp.isfinite(x).all(), late=time >= 50)

    return task("Lorenz", 3, 5, reset, step)


def portfolio() -> Environment:
    """Chooses one of four assets with correlated, heavy-tailed returns, and pays costs that bend."""
    factor = jnp.linalg.cholesky(0.02 * jnp.eye(4) + 0.01)
    knots, curve = jnp.array([0.0, 0.5, 1.0, 2.0]), jnp.array([0.0, 0.001, 0.004, 0.02])

    def reset(key, params):
        prices = jnp.exp(0.1 * random.normal(key, (8, 4)))
        state = (prices, jnp.full(4, 0.25), jnp.float32(1.0), jnp.int32(0))
        return seen(state), state

    def seen(state):
        prices, weights, wealth, _ = state
        returns = jnp.diff(jnp.log(prices), axis=0)
        return jnp.concatenate(
            [returns.mean(0), returns.std(0, ddof=1), jnp.median(returns, axis=0), weights, wealth[None]]
        )

    def step(key, state, action, params):
        prices, weights, wealth, time = state
        target = jax.nn.softmax(jnp.where(jnp.arange(4) == action, 2.0, 0.0))
        cost = jnp.interp(jnp.abs(target - weights).sum(), knots, curve)
        moves = factor @ random.normal(key, (4,)) + 0.01 * random.t(jax.random.fold_in(key, 1), 5.0, (4,))
        new = prices[-1] * jnp.exp(0.1 * moves)
        growth = jnp.vdot(target, new / prices[-1]) - cost
        weights = target * new / prices[-1] / jnp.vdot(target, new / prices[-1])
        state = (jnp.concatenate([prices[1:], new[None]]), weights, wealth * growth, time + 1)
        return after(seen(state), state, jnp.log(growth), wealth * growth < 0.5, late=time >= 40)

    return task("Portfolio", 17, 5, reset, step)


def factory() -> Environment:
    """A factory in which the earliest of four events happens, and one machine is sped up."""
    rates = jnp.array([1.0, 1.5, 0.7, 2.0])

    def reset(key, params):
        clocks = random.exponential(key, (4,)) / rates
        state = (jnp.zeros(3, jnp.int32), clocks, jnp.float32(0.0))
        return seen(state), state

    def seen(state):
        stock, clocks, now = state
        return jnp.concatenate([stock.astype(jnp.float32), clocks - clocks.min(), (now % 1.0)[None]])

    def step(key, state, action, params):
        stock, clocks, now = state
        event = jnp.argmin(clocks)
        now = clocks[event]

        def arrive(s):
            return s.at[0].add(1), 0.0

        def cut(s):
            can = s[0] > 0
            return s.at[0].add(jnp.where(can, -1, 0)).at[1].add(can), 0.1 * can

        def weld(s):
            can = s[1] >= 2
            return s.at[1].add(jnp.where(can, -2, 0)).at[2].add(can), 0.3 * can

        def sell(s):
            sold = jnp.minimum(s[2], 3)
            return s.at[2].add(-sold), sold * 1.0

        stock, reward = lax.switch(event, [arrive, cut, weld, sell], stock)
        speed = jnp.where(jnp.arange(4) == action, 2.0, 1.0)
        clocks = clocks.at[event].set(now + random.exponential(key) / (rates[event] * speed[event]))
        over = jnp.any(stock > 8)
        state = (jnp.minimum(stock, 9), clocks, now)
        return after(seen(state), state, reward - 1.0 * over, over, late=now > 30)

    return task("Factory", 8, 4, reset, step)


def boids() -> Environment:
    """A flock of six birds, of which one is steered."""
    n = 6

    def reset(key, params):
        state = (
            random.uniform(key, (n, 2)),
            random.normal(jax.random.fold_in(key, 3), (n, 2)) * 0.05,
            jnp.int32(0),
        )
        return seen(state), state

    def seen(state):
        return jnp.concatenate([state[0].reshape(-1), state[1].reshape(-1)])

    def step(key, state, action, params):
        x, v, time = state
        gap = x[None] - x[:, None]
        far = jnp.linalg.norm(gap + 1e-6, axis=-1) + 10 * jnp.eye(n)
        weight = jax.nn.softmax(-far, axis=1)
        align = jnp.einsum("ij,jk->ik", weight, v) - v
        apart = -(gap / far[..., None] ** 3 * (far < 0.2)[..., None]).sum(1) * 1e-4
        angle = action * (2 * jnp.pi / 8)
        push = jnp.zeros((n, 2)).at[0].set(0.01 * jnp.stack([jnp.cos(angle), jnp.sin(angle)]))
        v = v + 0.3 * align + 0.02 * jnp.einsum("ij,ijk->ik", weight, gap) + apart + push
        v = v * jnp.minimum(1.0, 0.1 / jnp.maximum(jnp.linalg.norm(v, axis=1, keepdims=True), 1e-3))
        x = (x + v) % 1.0
        spread = jnp.var(x, axis=0).sum()
        state = (x, v, time + 1)
        return after(seen(state), state, -spread, False, late=time >= 40)

    return task("Boids", 4 * n, 8, reset, step)


def knapsack() -> Environment:
    """Packs items one by one. The reward is relative to the best packing, by dynamic programming."""

    def best(weights, values, room):
        def item(table, pair):
            weight, value = pair
            shifted = jnp.where(
                jnp.arange(21) >= weight, table[jnp.maximum(jnp.arange(21) - weight, 0)] + value, -jnp.inf
            )
            return jnp.maximum(table, shifted), None

        table, _ = lax.scan(item, jnp.zeros(21), (weights, values))
        return table[room]

    def reset(key, params):
        a, b = random.split(key)
        state = (
            random.randint(a, (6,), 1, 9),
            random.uniform(b, (6,)),
            jnp.int32(20),
            jnp.zeros(6, bool),
            jnp.float32(0),
        )
        return seen(state), state

    def seen(state):
        weights, values, room, taken, _ = state
        return jnp.concatenate([weights / 9, values, taken * 1.0, room[None] / 20])

    def step(key, state, action, params):
        weights, values, room, taken, worth = state
        fits = (weights[action] <= room) & ~taken[action]
        room = room - jnp.where(fits, weights[action], 0)
        taken, worth = taken.at[action].set(taken[action] | fits), worth + jnp.where(fits, values[action], 0.0)
        done = ~fits | jnp.all(taken | (weights > room))
        reward = jnp.where(done, worth / best(weights, values, 20), 0.0)
        state = (weights, values, room, taken, worth)
        return after(seen(state), state, reward, done)

    return task("Knapsack", 19, 6, reset, step)


def parser() -> Environment:
    """Writes a text that a state machine accepts, and sees its hash."""
    table = jnp.array([[1, 0, 3, 3], [1, 2, 3, 0], [3, 2, 0, 3], [3, 3, 3, 3]], jnp.int8)

    def digest(text):
        def one(h, c):
            h = (h ^ c.astype(jnp.uint32)) * jnp.uint32(16777619)
            return h, h >> 24

        return lax.scan(one, jnp.uint32(2166136261), text)

    def seen(text, at):
        final, parts = digest(text)
        return jnp.concatenate(
            [
                text.astype(jnp.float32),
                parts.astype(jnp.float32) / 256,
                (final % 7).astype(jnp.float32)[None],
                at[None].astype(jnp.float32),
            ]
        )

    def reset(key, params):
        text = random.randint(key, (12,), 0, 4, jnp.int8)
        return seen(text, jnp.int32(0)), (text, jnp.int32(0))

    def step(key, state, action, params):
        text, at = state
        text = text.at[at].set(action.astype(jnp.int8))
        final, path = lax.scan(lambda s, c: (table[s, c],) * 2, jnp.int8(0), text)
        mode = jnp.argmax(jnp.bincount(path, length=4))
        reward = jnp.where(final == 2, 1.0, 0.0) - 0.1 * (mode == 3) + 0.01 * jnp.searchsorted(jnp.sort(text), 2)
        return after(seen(text, at + 1), (text, (at + 1) % 12), reward, at == 11)

    return task("Parser", 26, 4, reset, step)


def reach() -> Environment:
    """An arm of three links that follows damped least squares, by automatic differentiation."""
    lengths = jnp.array([1.0, 0.8, 0.5])

    def tip(q):
        angle = jnp.cumsum(q)
        return jnp.stack([jnp.sum(lengths * jnp.cos(angle)), jnp.sum(lengths * jnp.sin(angle))])

    def reset(key, params):
        a, b = random.split(key)
        state = (
            random.uniform(a, (3,), minval=-1.0, maxval=1.0),
            random.uniform(b, (2,), minval=0.5, maxval=1.5),
            jnp.int32(0),
        )
        return seen(state), state

    def seen(state):
        q, goal, _ = state
        return jnp.concatenate([q, goal, tip(q), jax.grad(lambda q: jnp.sum((tip(q) - goal) ** 2))(q)])

    def step(key, state, action, params):
        q, goal, time = state
        j = jax.jacfwd(tip)(q)
        gap = jnp.stack(
            [jnp.array([0.1, 0.0]), jnp.array([-0.1, 0.0]), jnp.array([0.0, 0.1]), jnp.array([0.0, -0.1])]
        )[action]
        q = q + j.T @ jnp.linalg.solve(j @ j.T + 0.01 * jnp.eye(2), gap)
        q = (q + jnp.pi) % (2 * jnp.pi) - jnp.pi
        far = jnp.linalg.norm(tip(q) - goal)
        manipulability = jnp.sqrt(jnp.maximum(jnp.linalg.det(j @ j.T), 0.0))
        state = (q, goal, time + 1)
        return after(seen(state), state, -far + 0.1 * manipulability, far < 0.1, late=time >= 50)

    return task("Reach", 10, 4, reset, step)


def rumours() -> Environment:
    """A rumour spreads along the links of a graph, unless somebody is silenced."""
    links = np.random.default_rng(0).random((10, 10)) < 0.3

    def reset(key, params):
        state = (jax.nn.one_hot(random.randint(key, (), 0, 10), 10, dtype=jnp.int32), jnp.int32(0))
        return state[0].astype(jnp.float32), state

    def step(key, state, action, params):
        knows, time = state
        hears = jnp.asarray(links).astype(jnp.int32) @ knows
        chance = 1 - 0.7 ** hears.astype(jnp.float32)
        spread = random.bernoulli(key, chance) | (knows > 0)
        silent = jnp.where(jnp.arange(10) == action, 0, spread.astype(jnp.int32))
        ranked = jnp.argsort(-hears)
        reward = -silent.mean() + 0.05 * (ranked[0] == action)
        return after(silent.astype(jnp.float32), (silent, time + 1), reward, silent.sum() == 0, late=time >= 25)

    return task("Rumours", 10, 10, reset, step)


def thermostat() -> Environment:
    """Heats a room with a smoothed memory of the power."""

    def reset(key, params):
        state = (jnp.float32(15.0) + random.normal(key), jnp.zeros(4), jnp.int32(0))
        return seen(state), state

    def seen(state):
        temperature, history, time = state
        phase = 2 * jnp.pi * time / 24
        return jnp.concatenate([jnp.stack([temperature / 20, jnp.sin(phase), jnp.cos(phase)]), history])

    def step(key, state, action, params):
        temperature, history, time = state
        outside = 10 + 8 * jnp.sin(2 * jnp.pi * (time - 6) / 24) + random.laplace(key)
        power = jnp.power(2.0, action) - 1
        temperature = outside + (temperature - outside) * jnp.exp(-0.1) + power
        history = jnp.convolve(jnp.concatenate([history, power[None]]), jnp.array([0.6, 0.3, 0.1]), mode="valid")
        history = jnp.concatenate([history, power[None]])
        comfort = -jnp.square(jnp.maximum(jnp.abs(temperature - 21) - 1, 0))
        reward = jnp.logaddexp(comfort, -5.0) - 0.05 * power
        state = (temperature, history, time + 1)
        return after(seen(state), state, reward, jnp.abs(temperature - 21) > 25, late=time >= 72)

    return task("Thermostat", 7, 3, reset, step)


SYSTEMS = {
    "quadrotor": quadrotor,
    "lorenz": lorenz,
    "portfolio": portfolio,
    "factory": factory,
    "boids": boids,
    "knapsack": knapsack,
    "parser": parser,
    "reach": reach,
    "rumours": rumours,
    "thermostat": thermostat,
}
