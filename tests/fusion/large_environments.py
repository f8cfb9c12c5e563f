"""Environments whose state holds large arrays, which a step mostly indexes: a map, cards, a queue, a diary."""

import jax
import jax.numpy as jnp
from user_environments import after, task

lax, random = jax.lax, jax.random


def mine(length=50):
    """Digs ore in a map of 64 x 64; rocks fall, and a new map is drawn for each episode."""
    side, seen = 64, 3
    moves = jnp.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])

    def view(state):
        ground, at, ore, _ = state
        window = lax.dynamic_slice(ground, jnp.clip(at - seen // 2, 0, side - seen), (seen, seen))
        shown = [(window == kind).reshape(-1).astype(jnp.float32) for kind in (1, 2)]
        return jnp.concatenate([*shown, at / side, ore[None] / 10.0])

    def reset(key, params):
        drawn = random.uniform(key, (side, side))
        ground = jnp.where(drawn < 0.4, 1, jnp.where(drawn < 0.5, 2, 0)).astype(jnp.int8)
        at = jnp.array([side // 2, side // 2])
        state = (ground.at[at[0], at[1]].set(0), at, jnp.int32(0), jnp.int32(0))
        return view(state), state

    def step(key, state, action, params):
        ground, at, ore, time = state
        ahead = jnp.clip(at + moves[action], 0, side - 1)
        kind = ground[ahead[0], ahead[1]]
        at = jnp.where(kind == 0, ahead, at)
        ground = ground.at[ahead[0], ahead[1]].set(0)
        falls = random.randint(key, (2,), 0, side)
        is_free = (ground[falls[0], falls[1]] == 0) & jnp.any(falls != at)
        ground = ground.at[falls[0], falls[1]].add(is_free.astype(jnp.int8))
        gained = kind == 2
        state = (ground, at, ore + gained, time + 1)
        return after(view(state), state, gained, time + 1 >= length)

    return task("Mine", 2 * seen * seen + 3, 5, reset, step)


def cards(length=40):
    """Guesses whether the next of 2,000 cards is higher; the deck is shuffled while it is drawn from."""
    count = 2_000

    def view(state):
        deck, at, _ = state
        return jnp.stack([deck[at - 1] / count, at / count])

    def reset(key, params):
        deck = jnp.arange(count)
        first = random.randint(key, (), 0, count)
        state = (deck.at[0].set(deck[first]).at[first].set(0), jnp.int32(1), jnp.int32(0))
        return view(state), state

    def step(key, state, action, params):
        deck, at, right = state
        other = random.randint(key, (), at, count)
        drawn, last = deck[other], deck[at - 1]
        deck = deck.at[other].set(deck[at]).at[at].set(drawn)
        is_right = (drawn > last) == (action == 1)
        state = (deck, at + 1, right + is_right)
        return after(view(state), state, is_right, at + 1 >= length)

    return task("Cards", 2, 2, reset, step)


def queue(length=60):
    """Serves jobs of a ring of 3,000; the shortest is looked for among all that wait, where asked for."""
    room = 3_000

    def view(state):
        sizes, head, tail, _ = state
        waiting = jnp.maximum(tail - head, 0)
        return jnp.stack([sizes[head % room], sizes[(head + 1) % room], waiting / 10.0])

    def reset(key, params):
        sizes = jnp.zeros(room).at[:4].set(random.exponential(key, (4,)))
        state = (sizes, jnp.int32(0), jnp.int32(4), jnp.int32(0))
        return view(state), state

    def step(key, state, action, params):
        sizes, head, tail, time = state
        place = jnp.arange(room)
        waits = jnp.where(place < tail, sizes, jnp.inf)
        shortest = jnp.where(action == 2, jnp.argmin(jnp.where(place >= head, waits, jnp.inf)), head)
        reward = -sizes[shortest] - 0.01 * jnp.sum(jnp.where((place >= head) & (place < tail), 1.0, 0.0))
        sizes = sizes.at[shortest].set(sizes[head])
        comes = random.bernoulli(key, 0.7)
        sizes = sizes.at[tail].set(jnp.where(comes, random.exponential(random.fold_in(key, 1)), sizes[tail]))
        state = (sizes, head + (action > 0), tail + comes, time + 1)
        return after(view(state), state, reward, (time >= length) | (state[1] >= state[2]))

    return task("Queue", 3, 3, reset, step)


def diary(length=30):
    """Fades a page of 40 x 40 in every step, and writes and erases squares of it."""
    side = 40

    def view(state):
        page, at, _ = state
        return jnp.stack([page[at[0], at[1]], page[0, at[1]], jnp.max(page) / 10.0])

    def reset(key, params):
        rows = jnp.arange(side)[:, None] * jnp.ones((1, side))
        state = (jnp.where(rows > 20, 0.5, rows / side), random.randint(key, (2,), 0, side), jnp.int32(0))
        return view(state), state

    def step(key, state, action, params):
        page, at, time = state
        page = page * 0.9
        wide = lax.dynamic_update_slice(page, jnp.ones((3, 3)), (at[0], at[1]))
        page = lax.cond(action == 1, lambda: wide, lambda: page.at[at[0], at[1]].set(2.0))
        page = jnp.where(action == 2, jnp.where(page > 0.9, 0.0, page), page)
        state = (page, random.randint(key, (2,), 0, side), time + 1)
        return after(view(state), state, page[at[0], at[1]], time + 1 >= length)

    return task("Diary", 3, 3, reset, step)


LARGE = {"mine": mine, "cards": cards, "queue": queue, "diary": diary}
