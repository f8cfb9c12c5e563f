"""Games and puzzles as users write them."""

import jax
import jax.numpy as jnp
import numpy as np
from user_environments import after, task

from rollmill import Environment

lax, random = jax.lax, jax.random


def snake() -> Environment:
    """Snake on 8 × 8 cells. Food appears on a free cell."""
    n, most = 8, 20

    def seen(state):
        body, length, food, _, _ = state
        held = jnp.arange(most) < length
        grid = jnp.zeros(n * n).at[jnp.where(held, body, n * n)].set(1.0, mode="drop").at[body[0]].set(2.0)
        return grid.at[food].add(-1.0)

    def place(key, body, length):
        free = jnp.ones(n * n).at[jnp.where(jnp.arange(most) < length, body, n * n)].set(0.0, mode="drop")
        return random.choice(key, n * n, p=free / free.sum())

    def reset(key, params):
        body = jnp.full(most, n * n // 2 + n // 2, jnp.int32)
        state = (body, jnp.int32(2), place(key, body, 2).astype(jnp.int32), jnp.int32(0), jnp.int32(0))
        return seen(state), state

    def step(key, state, action, params):
        body, length, food, facing, time = state
        facing = jnp.where((action + 2) % 4 == facing, facing, action)
        y, x = jnp.divmod(body[0], n)
        y, x = y + jnp.array([-1, 0, 1, 0])[facing], x + jnp.array([0, 1, 0, -1])[facing]
        outside = (y < 0) | (y >= n) | (x < 0) | (x >= n)
        head = jnp.clip(y, 0, n - 1) * n + jnp.clip(x, 0, n - 1)
        bites = jnp.any((body[:-1] == head) & (jnp.arange(most - 1) < length - 1))
        eats = head == food
        body = jnp.roll(body, 1).at[0].set(head)
        length = jnp.minimum(length + eats, most)
        food = lax.cond(eats, lambda: place(key, body, length).astype(jnp.int32), lambda: food)
        state = (body, length, food, facing, time + 1)
        return after(
            seen(state), state, jnp.where(eats, 1.0, 0.0) - (outside | bites), outside | bites, late=time > 60
        )

    return task("Snake", n * n, 4, reset, step)


def twenty_forty_eight() -> Environment:
    """2048 on 4 × 4 cells, by exponents of two."""

    def slide(row):
        row = row[jnp.argsort(row == 0, stable=True)]
        out, points = jnp.zeros(5, jnp.int32), jnp.int32(0)

        def body(i, carry):
            out, at, can, points = carry
            value = row[i]
            merges = can & (value > 0) & (out[at - 1] == value)
            moves = (value > 0) & ~merges
            out = jnp.where(merges, out.at[at - 1].add(1), jnp.where(moves, out.at[at].set(value), out))
            return out, at + moves, moves | (can & (value == 0)), points + jnp.where(merges, 1 << (value + 1), 0)

        out, _, _, points = lax.fori_loop(0, 4, body, (out, jnp.int32(0), jnp.bool_(False), points))
        return out[:4], points

    def spawn(key, board):
        where, what = random.split(key)
        empty = (board == 0).reshape(-1)
        rank = random.randint(where, (), 0, jnp.maximum(empty.sum(), 1))
        cell = jnp.argmax(jnp.cumsum(empty) > rank)
        new = jnp.where(random.uniform(what) < 0.9, 1, 2)
        flat = board.reshape(-1)
        return jnp.where(empty.any(), flat.at[cell].set(new), flat).reshape(4, 4)

    def reset(key, params):
        board = spawn(key, jnp.zeros((4, 4), jnp.int32))
        return board.astype(jnp.float32).reshape(-1), board

    def step(key, board, action, params):
        turned = lax.switch(
            action,
            [lambda b: b, lambda b: jnp.rot90(b), lambda b: jnp.rot90(b, 2), lambda b: jnp.rot90(b, 3)],
            board,
        )
        moved, points = jax.vmap(slide)(turned)
        back = lax.switch(
            action,
            [lambda b: b, lambda b: jnp.rot90(b, 3), lambda b: jnp.rot90(b, 2), lambda b: jnp.rot90(b)],
            moved,
        )
        changed = jnp.any(back != board)
        new = jnp.where(changed, spawn(key, back), back)
        stuck = ~(new == 0).any() & ~(new[1:] == new[:-1]).any() & ~(new[:, 1:] == new[:, :-1]).any()
        return after(new.astype(jnp.float32).reshape(-1), new, jnp.log1p(points.sum().astype(jnp.float32)), stuck)

    return task("TwentyFortyEight", 16, 4, reset, step)


def minesweeper() -> Environment:
    """Minesweeper on 6 × 6 cells with five mines, and an opening that spreads."""
    n, mines = 6, 5

    def counts(mine):
        padded = jnp.pad(mine.astype(jnp.int32), 1)
        return sum(padded[i : i + n, j : j + n] for i in range(3) for j in range(3)) - mine

    def seen(mine, shown):
        return jnp.where(shown, counts(mine), -1).astype(jnp.float32).reshape(-1)

    def reset(key, params):
        mine = jnp.zeros(n * n, bool).at[random.permutation(key, n * n)[:mines]].set(True).reshape(n, n)
        state = (mine, jnp.zeros((n, n), bool))
        return seen(*state), state

    def step(key, state, action, params):
        mine, shown = state
        y, x = action // n, action % n
        hit, zero = mine[y, x], counts(mine) == 0
        opened = shown.at[y, x].set(True)

        def grow(_, opened):
            source = jnp.pad(opened & zero, 1)
            near = jnp.zeros((n, n), bool)
            for i in range(3):
                for j in range(3):
                    near |= lax.dynamic_slice(source, (i, j), (n, n))
            return opened | (near & ~mine)

        opened = lax.fori_loop(0, n, grow, opened)
        won = jnp.all(opened | mine)
        reward = jnp.where(hit, -1.0, (opened.sum() - shown.sum()) / (n * n)) + won
        return after(seen(mine, opened), (mine, opened), reward, hit | won)

    return task("Minesweeper", n * n, n * n, reset, step)


def poker() -> Environment:
    """Draw poker: replaces up to three of five cards, then compares with another hand."""

    def value(hand):
        ranks, suits = jnp.sort(hand % 13), hand // 13
        counts = jnp.sort(jnp.bincount(ranks, length=13))[::-1]
        flush, straight = jnp.all(suits == suits[0]), jnp.all(jnp.diff(ranks) == 1)
        kinds = [
            flush & straight,
            counts[0] == 4,
            (counts[0] == 3) & (counts[1] == 2),
            flush,
            straight,
            counts[0] == 3,
            (counts[0] == 2) & (counts[1] == 2),
            counts[0] == 2,
        ]
        return jnp.select(kinds, [jnp.int32(i) for i in (8, 7, 6, 5, 4, 3, 2, 1)], jnp.int32(0)) * 16 + ranks[-1]

    def seen(cards, left):
        hand = cards[:5]
        return jnp.concatenate(
            [
                jax.nn.one_hot(hand % 13, 13).sum(0),
                jax.nn.one_hot(hand // 13, 4).sum(0),
                (value(hand) / 16)[None],
                left[None].astype(jnp.float32),
            ]
        )

    def reset(key, params):
        cards = random.permutation(key, 52)
        return seen(cards, jnp.int32(3)), (cards, jnp.int32(5), jnp.int32(3))

    def step(key, state, action, params):
        cards, at, left = state
        swaps = action < 5
        cards = jnp.where(swaps, cards.at[jnp.minimum(action, 4)].set(cards[at]), cards)
        at, left = at + swaps, left - 1
        done = ~swaps | (left == 0)
        other = value(cards[20:25])
        reward = jnp.where(done, jnp.sign(value(cards[:5]) - other).astype(jnp.float32), 0.0)
        return after(seen(cards, left), (cards, at, left), reward, done)

    return task("Poker", 19, 6, reset, step)


def falling_blocks() -> Environment:
    """Blocks of four kinds fall on a board of 10 × 6 cells. Full rows disappear."""
    rows, columns = 10, 6
    shapes = jnp.array([[[1, 1], [1, 1]], [[1, 0], [1, 0]], [[1, 1], [0, 0]], [[1, 0], [1, 1]]], jnp.int8)

    def seen(board, kind):
        heights = rows - jnp.where(board.any(0), jnp.argmax(board, axis=0), rows)
        return jnp.concatenate(
            [board.astype(jnp.float32).reshape(-1), heights.astype(jnp.float32), jax.nn.one_hot(kind, 4)]
        )

    def reset(key, params):
        state = (jnp.zeros((rows, columns), jnp.int8), random.randint(key, (), 0, 4))
        return seen(*state), state

    def step(key, state, action, params):
        board, kind = state
        shape = shapes[kind]
        padded = jnp.pad(board, ((0, 2), (0, 1)), constant_values=1).at[:, columns].set(1)

        def hits(y):
            return jnp.any((lax.dynamic_slice(padded, (y, action), (2, 2)) & shape) > 0)

        bottom = jnp.any(shape[1] > 0)
        limit = jnp.where(bottom, rows - 2, rows - 1)
        y = lax.while_loop(lambda y: (y < limit) & ~hits(y + 1), lambda y: y + 1, jnp.int32(0))
        lost = hits(y)
        placed = lax.dynamic_update_slice(
            padded, lax.dynamic_slice(padded, (y, action), (2, 2)) | shape, (y, action)
        )[:rows, :columns]
        full = placed.all(axis=1)
        order = jnp.argsort(~full, stable=True)
        cleared = jnp.where(jnp.sort(full)[::-1][:, None], 0, placed[order]).astype(jnp.int8)
        state = (cleared, random.randint(key, (), 0, 4))
        return after(seen(*state), state, full.sum().astype(jnp.float32) - lost, lost)

    return task("FallingBlocks", rows * columns + columns + 4, columns - 1, reset, step)


def knights() -> Environment:
    """A knight's tour on 5 × 5 cells, kept as the bits of one integer."""
    moves = np.array([(1, 2), (2, 1), (-1, 2), (-2, 1), (1, -2), (2, -1), (-1, -2), (-2, -1)])

    def bits(mask):
        return (mask[:, None] >> jnp.arange(25, dtype=jnp.uint32)[None] & 1).astype(jnp.float32).reshape(-1)

    def seen(state):
        at, visited = state
        return jnp.concatenate([jax.nn.one_hot(at, 25), bits(visited[None])])

    def reset(key, params):
        at = random.randint(key, (), 0, 25)
        state = (at, jnp.uint32(1) << at.astype(jnp.uint32))
        return seen(state), state

    def step(key, state, action, params):
        at, visited = state
        to = jnp.stack(jnp.divmod(at, 5)) + jnp.asarray(moves)[action]
        ok = jnp.all((to >= 0) & (to < 5))
        new = jnp.where(ok, to @ jnp.array([5, 1]), at)
        flag = jnp.uint32(1) << new.astype(jnp.uint32)
        fresh = ok & ((visited & flag) == 0)
        visited = visited | flag
        count = lax.population_count(visited)
        state = (new, visited)
        leading = lax.clz(visited).astype(jnp.float32) / 32
        return after(seen(state), state, fresh * 1.0 - 0.1 + leading * 0.01, ~fresh | (count == 25))

    return task("Knights", 50, 8, reset, step)


def life() -> Environment:
    """Conway's game of life on a torus, in which each step flips one cell."""
    n = 8

    def reset(key, params):
        board = random.bernoulli(key, 0.35, (n, n))
        return board.reshape(-1).astype(jnp.float32), (board, jnp.int32(0))

    def step(key, state, action, params):
        board, time = state
        board = board.reshape(-1).at[action].set(~board.reshape(-1)[action]).reshape(n, n)
        count = sum(
            jnp.roll(board, (i, j), (0, 1)).astype(jnp.uint8)
            for i in (-1, 0, 1)
            for j in (-1, 0, 1)
            if (i, j) != (0, 0)
        )
        board = (count == 3) | (board & (count == 2))
        return after(
            board.reshape(-1).astype(jnp.float32), (board, time + 1), board.mean(), ~board.any(), late=time >= 30
        )

    return task("Life", n * n, n * n, reset, step)


def battleship() -> Environment:
    """Finds a ship of three cells on 7 × 7 cells."""
    n = 7

    def reset(key, params):
        a, b, c = random.split(key, 3)
        across = random.bernoulli(a)
        y, x = random.randint(b, (), 0, n), random.randint(c, (), 0, n - 3)
        line = jnp.zeros((n, n), bool)
        ship = line.at[y, x + jnp.arange(3)].set(True)
        ship = jnp.where(across, ship, ship.T)
        state = (ship, jnp.zeros((n, n), jnp.int8), jnp.int32(0))
        return seen(state), state

    def seen(state):
        return state[1].reshape(-1).astype(jnp.float32)

    def step(key, state, action, params):
        ship, shots, time = state
        y, x = jnp.unravel_index(action, (n, n))
        again, hit = shots[y, x] != 0, ship[y, x]
        shots = shots.at[y, x].set(jnp.where(hit, 2, 1).astype(jnp.int8))
        sunk = jnp.all(~ship | (shots == 2))
        ys, xs = jnp.nonzero(ship, size=3, fill_value=0)
        near = jnp.min(jnp.abs(ys - y) + jnp.abs(xs - x))
        state = (ship, shots, time + 1)
        return after(seen(state), state, hit * 1.0 - 0.1 * again - 0.01 * near, sunk, late=time >= 30)

    return task("Battleship", n * n, n * n, reset, step)


GAMES_OF_USERS = {
    "snake": snake,
    "twenty_forty_eight": twenty_forty_eight,
    "minesweeper": minesweeper,
    "poker": poker,
    "falling_blocks": falling_blocks,
    "knights": knights,
    "life": life,
    "battleship": battleship,
}
