"""Environments as users write them: whatever of `jax.numpy`, `jax.random` and `jax.lax` says the rules."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollmill import Environment, Timestep

lax, random = jax.lax, jax.random


def task(name: str, features: int, actions: int, reset: Callable, step: Callable) -> Environment:
    """An environment of `features` numbers and some actions."""
    seen = spaces.Box(-np.inf, np.inf, (features,), np.float32)
    return Environment(name, reset, step, seen, spaces.Discrete(actions))


def after(observation, state, reward, done, *, late=False) -> Timestep:
    flag = lambda value: jnp.asarray(value, bool)
    return Timestep(observation, state, jnp.asarray(reward, jnp.float32), flag(done), flag(late), {})


# --- cards, words, queues: integers and indices --------------------------------------------------------------


def deck() -> Environment:
    """Blackjack from one shuffled deck of 52 cards: stand, hit, or double."""
    values = jnp.minimum(jnp.arange(52) % 13 + 1, 10)

    def total(cards, count):
        held = jnp.where(jnp.arange(cards.size) < count, cards, 0)
        plain = held.sum()
        return jnp.where((held == 1).any() & (plain <= 11), plain + 10, plain)

    def seen(state):
        cards, at, hand, count, bank, _ = state
        shown = jnp.where(jnp.arange(12) < count, hand, 0).astype(jnp.float32)
        return jnp.concatenate([shown, jnp.stack([bank, at, total(hand, count)]).astype(jnp.float32) / 10])

    def reset(key, params):
        cards = values[random.permutation(key, 52)]
        hand = jnp.zeros(12, jnp.int32).at[:2].set(cards[:2])
        state = (cards, jnp.int32(3), hand, jnp.int32(2), cards[2], jnp.int32(0))
        return seen(state), state

    def step(key, state, action, params):
        cards, at, hand, count, bank, rounds = state
        hits = action > 0
        hand = jnp.where(hits, hand.at[count].set(cards[at]), hand)
        count, at = count + hits, at + hits
        own = total(hand, count)

        def draw(carry):
            at, sum_ = carry
            return at + 1, sum_ + cards[at]

        _, banks = lax.while_loop(lambda carry: carry[1] < 17, draw, (at, bank))
        ended = (own > 21) | (action != 1) | (count >= 11)
        won = jnp.where(own > 21, -1.0, jnp.sign(own - jnp.where(banks > 21, 0, banks)))
        reward = jnp.where(ended, won * jnp.where(action == 2, 2.0, 1.0), 0.0)
        state = (cards, at, hand, count, bank, rounds + 1)
        return after(seen(state), state, reward, ended)

    return task("Deck", 15, 3, reset, step)


def tokens() -> Environment:
    """Writes a sentence token by token: rewarded by a table of bigrams, and by what was not written yet."""
    vocabulary, length = 24, 16
    bigrams = random.normal(random.key(7), (vocabulary, vocabulary))

    def seen(text, at):
        counts = jnp.bincount(jnp.where(jnp.arange(length) < at, text, vocabulary), length=vocabulary + 1)
        last = jax.nn.one_hot(text[jnp.maximum(at - 1, 0)], vocabulary)
        return jnp.concatenate([last, counts[:vocabulary].astype(jnp.float32)])

    def reset(key, params):
        text = jnp.zeros(length, jnp.uint8).at[0].set(random.randint(key, (), 0, vocabulary).astype(jnp.uint8))
        return seen(text, 1), (text, jnp.int32(1))

    def step(key, state, action, params):
        text, at = state
        is_new = ~jnp.any((text == action) & (jnp.arange(length) < at))
        reward = jax.nn.log_softmax(bigrams[text[at - 1]])[action] + is_new
        text = text.at[at].set(action.astype(text.dtype))
        done = (at + 1 >= length) | (action == 0)
        return after(seen(text, at + 1), (text, at + 1), reward, done)

    return task("Tokens", 2 * vocabulary, vocabulary, reset, step)


def elevator() -> Environment:
    """An elevator of eight floors: people queue in rings, and leave where they want to."""
    floors, room, queue = 8, 4, 6

    def seen(state):
        goals, lengths, at, cabin, _ = state
        wanted = jnp.zeros(floors).at[jnp.maximum(cabin, 0)].add(cabin >= 0)
        return jnp.concatenate([jax.nn.one_hot(at, floors), lengths.astype(jnp.float32), wanted])

    def reset(key, params):
        state = (
            random.randint(key, (floors, queue), 0, floors, jnp.int8),
            jnp.zeros(floors, jnp.int32),
            jnp.int32(0),
            jnp.full(room, -1, jnp.int32),
            jnp.int32(0),
        )
        return seen(state), state

    def step(key, state, action, params):
        goals, lengths, at, cabin, time = state
        comes, where, goal = random.split(key, 3)
        floor = random.randint(where, (), 0, floors)
        fits = random.bernoulli(comes, 0.4) & (lengths[floor] < queue)
        new = goals.at[floor, lengths[floor]].set(random.randint(goal, (), 0, floors).astype(jnp.int8))
        goals = jnp.where(fits, new, goals)
        lengths = lengths.at[floor].add(fits)
        at = jnp.clip(at + jnp.array([-1, 0, 1])[action], 0, floors - 1)
        leaves = (cabin == at) & (action == 1)
        cabin = jnp.where(leaves, -1, cabin)

        def enter(n, carry):
            cabin, goals, lengths = carry
            free = jnp.argmin(cabin)
            enters = (cabin[free] < 0) & (lengths[at] > 0) & (action == 1)
            cabin = jnp.where(enters, cabin.at[free].set(goals[at, 0].astype(jnp.int32)), cabin)
            moved = goals.at[at].set(jnp.roll(goals[at], -1))
            return cabin, jnp.where(enters, moved, goals), lengths.at[at].add(-enters.astype(jnp.int32))

        cabin, goals, lengths = lax.fori_loop(0, room, enter, (cabin, goals, lengths))
        state = (goals, lengths, at, cabin, time + 1)
        reward = leaves.sum() - 0.05 * (lengths.sum() + (cabin >= 0).sum())
        return after(seen(state), state, reward, False, late=time + 1 >= 60)

    return task("Elevator", 3 * floors, 3, reset, step)


def order_book() -> Environment:
    """A limit order book of 16 prices: market orders eat levels from the best one on, limit orders queue."""
    levels = 16

    def mid(bids, asks):
        best_bid = levels - 1 - jnp.argmax(jnp.flip(bids > 0))
        return best_bid, jnp.argmax(asks > 0)

    def seen(state):
        bids, asks, stock, cash, _ = state
        best = jnp.stack(mid(bids, asks)).astype(jnp.float32)
        return jnp.concatenate([bids, asks, best / levels, jnp.stack([stock, cash / 100])])

    def eaten(volumes, size):
        before = jnp.cumsum(volumes) - volumes
        taken = jnp.clip(size - before, 0.0, volumes)
        return volumes - taken, taken

    def reset(key, params):
        places = jnp.arange(levels)
        sizes = random.randint(key, (levels,), 1, 9).astype(jnp.float32)
        bids, asks = jnp.where(places < 7, sizes, 0.0), jnp.where(places > 8, sizes, 0.0)
        state = (bids, asks, jnp.float32(0), jnp.float32(0), jnp.int32(0))
        return seen(state), state

    def step(key, state, action, params):
        bids, asks, stock, cash, time = state
        prices, keys = jnp.arange(levels, dtype=jnp.float32), random.split(key, 4)
        side = random.bernoulli(keys[0])
        place = random.categorical(keys[1], jnp.where(side, -jnp.abs(prices - 6), -jnp.abs(prices - 9)))
        size = jnp.ceil(random.exponential(keys[2]) * 3)
        bids = jnp.where(side & (asks[place] == 0), bids.at[place].add(size), bids)
        asks = jnp.where(~side & (bids[place] == 0), asks.at[place].add(size), asks)
        asks, bought = eaten(asks, jnp.where(action == 1, 2.0, 0.0))
        left, sold = eaten(jnp.flip(bids), jnp.where(action == 2, 2.0, 0.0))
        bids, sold = jnp.flip(left), jnp.flip(sold)
        gain = (sold - bought) @ prices
        stock, cash = stock + bought.sum() - sold.sum(), cash + gain
        state = (bids, asks, stock, cash, time + 1)
        empty = (bids.sum() == 0) | (asks.sum() == 0)
        return after(seen(state), state, gain - 0.01 * stock**2, empty, late=time + 1 >= 50)

    return task("OrderBook", 2 * levels + 4, 3, reset, step)


def five() -> Environment:
    """Five in a row on 8 x 8 cells against random moves: rows are found by a convolution."""
    size, line = 8, jnp.eye(5)
    across = jnp.zeros((5, 5)).at[2].set(1)
    kernels = jnp.stack([across, across.T, line, jnp.fliplr(line)])[:, None]

    def wins(stones):
        image = stones.astype(jnp.float32)[None, None]
        return (lax.conv_general_dilated(image, kernels, (1, 1), "SAME") >= 4.5).any()

    def seen(board):
        return board.ravel().astype(jnp.float32)

    def reset(key, params):
        board = jnp.zeros((size, size), jnp.int8)
        return seen(board), (board, jnp.int32(0))

    def step(key, state, action, params):
        board, moves = state
        place = jnp.unravel_index(action, (size, size))
        is_free = board[place] == 0
        board = jnp.where(is_free, board.at[place].set(1), board)
        answer = random.categorical(key, jnp.where(board == 0, 0.0, -jnp.inf).ravel())
        won = wins(board == 1)
        board = jnp.where(won, board, board.ravel().at[answer].set(-1).reshape(size, size))
        lost = ~won & wins(board == -1)
        full = (board != 0).all()
        reward = won * 1.0 - lost * 1.0 - 0.1 * ~is_free
        return after(seen(board), (board, moves + 1), reward, won | lost | full)

    return task("Five", size * size, size * size, reset, step)


# --- graphs and grids ------------------------------------------------------------------------------------------


def breadth_first(walls, goal):
    """Returns the distance of each cell from the goal; -1 where there is no way."""
    start = jnp.full(walls.shape, -1, jnp.int32).at[goal[0], goal[1]].set(0)

    def spread(carry):
        distance, turn, _ = carry
        is_front = jnp.pad(distance == turn, 1)
        near = is_front[:-2, 1:-1] | is_front[2:, 1:-1] | is_front[1:-1, :-2] | is_front[1:-1, 2:]
        new = near & (distance < 0) & ~walls
        return jnp.where(new, turn + 1, distance), turn + 1, new.any()

    return lax.while_loop(lambda carry: carry[2], spread, (start, jnp.int32(0), jnp.asarray(True)))[0]


def grid_search() -> Environment:
    """A grid of 8 x 8 cells with random walls, whose distances are found by a breadth-first search at reset."""
    size = 8

    def seen(state):
        walls, distance, place, _ = state
        here = jnp.zeros((size, size)).at[place[0], place[1]].set(1)
        return jnp.concatenate([walls.astype(jnp.float32).ravel(), here.ravel(), (distance == 0).ravel() * 1.0])

    def reset(key, params):
        maze, place, aim = random.split(key, 3)
        goal, start = random.randint(aim, (2,), 0, size), random.randint(place, (2,), 0, size)
        walls = random.bernoulli(maze, 0.25, (size, size)).at[goal[0], goal[1]].set(False)
        walls = walls.at[start[0], start[1]].set(False)
        state = (walls, breadth_first(walls, goal), start, jnp.int32(0))
        return seen(state), state

    def step(key, state, action, params):
        walls, distance, place, time = state
        moved = jnp.clip(place + jnp.array([[0, 1], [1, 0], [0, -1], [-1, 0]])[action], 0, size - 1)
        new = jnp.where(walls[tuple(moved)], place, moved)
        reward = (distance[tuple(place)] - distance[tuple(new)]).astype(jnp.float32)
        state = (walls, distance, new, time + 1)
        return after(seen(state), state, reward, distance[tuple(new)] == 0, late=time + 1 >= 40)

    return task("GridSearch", 3 * size * size, 4, reset, step)


def epidemic() -> Environment:
    """An epidemic on a random graph of 16 people with gamma-distributed recoveries; one is vaccinated a step."""
    people = 16

    def seen(state):
        _, ill, immune, left, _ = state
        return jnp.concatenate([ill.astype(jnp.float32), immune.astype(jnp.float32), left])

    def reset(key, params):
        graph, first, time = random.split(key, 3)
        upper = jnp.triu(random.bernoulli(graph, 0.2, (people, people)), 1)
        ill = jnp.zeros(people, bool).at[random.choice(first, people, (2,), replace=False)].set(True)
        left = jnp.where(ill, random.gamma(time, 3.0, (people,)), 0.0)
        state = (upper | upper.T, ill, jnp.zeros(people, bool), left, jnp.int32(0))
        return seen(state), state

    def step(key, state, action, params):
        graph, ill, immune, left, time = state
        catch, last = random.split(key)
        immune = immune.at[action].set(~ill[action] | immune[action])
        near = (graph & ill[None, :]).sum(axis=1)
        caught = random.bernoulli(catch, 1.0 - 0.7**near) & ~ill & ~immune
        left = jnp.where(caught, random.gamma(last, 3.0, (people,)), left - ill)
        healed = ill & (left <= 0)
        ill, immune = (ill & ~healed) | caught, immune | healed
        state = (graph, ill, immune, jnp.maximum(left, 0.0), time + 1)
        return after(seen(state), state, -ill.sum(), ~ill.any(), late=time + 1 >= 40)

    return task("Epidemic", 3 * people, people, reset, step)


def junction() -> Environment:
    """A traffic light: four lanes of cells that cars move along if the next cell is free."""
    lanes, cells = 4, 12

    def seen(state):
        road, light, since, _ = state
        return jnp.concatenate([road.astype(jnp.float32).ravel(), light[None] * 1.0, since[None] / 10.0])

    def reset(key, params):
        state = (random.bernoulli(key, 0.2, (lanes, cells)), jnp.int32(0), jnp.int32(0), jnp.int32(0))
        return seen(state), state

    def step(key, state, action, params):
        road, light, since, time = state
        switches = (action == 1) & (since >= 3)
        light, since = jnp.where(switches, 1 - light, light), jnp.where(switches, 0, since + 1)
        green = (jnp.arange(lanes) % 2) == light

        def drive(lane, green):
            def move(free, cell):
                moves = cell & free
                return ~cell | moves, (cell & ~moves, moves)

            _, (stay, moves) = lax.scan(move, green, lane, reverse=True)
            return stay | jnp.roll(moves.at[-1].set(False), 1), moves[-1]

        road, gone = jax.vmap(drive)(road, green)
        road = road.at[:, 0].set(road[:, 0] | random.bernoulli(key, 0.3, (lanes,)))
        state = (road, light, since, time + 1)
        return after(seen(state), state, gone.sum() - 0.1 * road.sum(), False, late=time + 1 >= 60)

    return task("Junction", lanes * cells + 2, 2, reset, step)


# --- distributions ----------------------------------------------------------------------------------------------


def inventory() -> Environment:
    """A warehouse of four goods: demand is Poisson, orders come after three days."""
    goods, days = 4, 3
    rates, price = jnp.array([2.0, 4.0, 1.0, 12.0]), jnp.array([3.0, 1.0, 6.0, 0.5])

    def seen(state):
        stock, pipeline, _ = state
        return jnp.concatenate([stock, pipeline.ravel()]) / 10

    def reset(key, params):
        stock = random.poisson(key, rates).astype(jnp.float32)
        state = (stock, jnp.zeros((days, goods)), jnp.int32(0))
        return seen(state), state

    def step(key, state, action, params):
        stock, pipeline, day = state
        order = jnp.where(jnp.arange(goods) == action % goods, jnp.where(action < goods, 5.0, 15.0), 0.0)
        demand = random.poisson(key, rates * (1 + 0.3 * jnp.sin(day / 5.0)), (goods,)).astype(jnp.float32)
        sold = jnp.minimum(stock, demand)
        stock = stock - sold + pipeline[0]
        pipeline = jnp.concatenate([pipeline[1:], order[None]])
        reward = (sold * price).sum() - 0.1 * stock.sum() - 0.2 * (order > 0).sum()
        return after(
            seen((stock, pipeline, day + 1)), (stock, pipeline, day + 1), reward, False, late=day + 1 >= 50
        )

    return task("Inventory", goods * (days + 1), 2 * goods, reset, step)


def bandit() -> Environment:
    """Six arms with gamma, beta and binomial rewards."""
    arms = 6

    def reset(key, params):
        shape = random.gamma(key, 2.0, (arms,)) + 0.3
        return jnp.zeros(2 * arms), (shape, jnp.zeros(arms), jnp.zeros(arms))

    def step(key, state, action, params):
        shape, pulls, gains = state
        first, second, third = random.split(key, 3)
        continuous = random.gamma(first, shape[action])
        share = random.beta(second, shape[action], 2.0)
        count = random.binomial(third, 12.0, share)
        reward = lax.switch(action % 3, [lambda: continuous, lambda: share * 3, lambda: count / 4])
        pulls, gains = pulls.at[action].add(1.0), gains.at[action].add(reward)
        observation = jnp.concatenate([pulls / 20, gains / jnp.maximum(pulls, 1)])
        return after(observation, (shape, pulls, gains), reward, False, late=pulls.sum() >= 30)

    return task("Bandit", 2 * arms, arms, reset, step)


# --- numbers ----------------------------------------------------------------------------------------------


def bodies() -> Environment:
    """Five bodies that attract each other; the first has an engine."""
    count = 5

    def seen(state):
        return jnp.concatenate([state[0].ravel(), state[1].ravel()])

    def reset(key, params):
        places = random.uniform(key, (count, 2), minval=-1.0, maxval=1.0)
        state = (places, jnp.zeros((count, 2)), jnp.int32(0))
        return seen(state), state

    def step(key, state, action, params):
        place, speed, time = state
        push = jnp.array([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])[action]

        def move(carry, _):
            place, speed = carry
            apart = place[None] - place[:, None]
            near = 1 / (jnp.sum(apart**2, -1) + 0.05) ** 1.5
            force = jnp.einsum("ijk,ij->ik", apart, near).at[0].add(push)
            speed = speed + 0.01 * force
            return (place + 0.01 * speed, speed), None

        (place, speed), _ = lax.scan(move, (place, speed), None, length=4)
        apart = jnp.linalg.norm(place[0] - place[1])
        state = (place, speed, time + 1)
        return after(seen(state), state, -apart, (jnp.abs(place) > 4).any(), late=time + 1 >= 80)

    return task("Bodies", 4 * count, 5, reset, step)


def circuit() -> Environment:
    """An oscillating circuit in complex numbers: its current follows from impedances."""

    def seen(state):
        voltage, charge, _ = state
        both = jnp.stack([voltage, charge])
        return jnp.concatenate([both.real, both.imag, jnp.abs(both), jnp.angle(both)])

    def reset(key, params):
        angle = random.uniform(key, (), maxval=2 * jnp.pi)
        state = (jnp.exp(1j * angle).astype(jnp.complex64), jnp.complex64(0.1), jnp.int32(0))
        return seen(state), state

    def step(key, state, action, params):
        voltage, charge, time = state
        resistance = jnp.array([0.5, 1.0, 2.0])[action]
        impedance = lax.complex(resistance, 0.3 * jnp.cos(time / 7.0))
        current = voltage / impedance - 0.2 * jnp.conj(charge)
        charge = charge + 0.1 * current
        voltage = voltage * jnp.exp(1j * 0.1).astype(jnp.complex64) - 0.05 * charge
        reward = jnp.real(voltage * jnp.conj(current))
        state = (voltage, charge, time + 1)
        return after(seen(state), state, reward, jnp.abs(charge) > 20, late=time + 1 >= 60)

    return task("Circuit", 8, 3, reset, step)


def tracker() -> Environment:
    """A Kalman filter of four states whose sensor is chosen at each step."""
    motion = jnp.eye(4) + jnp.diag(jnp.array([0.1, 0.1]), 2)
    sensors = jnp.array(
        [[[1.0, 0, 0, 0], [0, 1, 0, 0]], [[0, 0, 1.0, 0], [0, 0, 0, 1]], [[1.0, 1, 0, 0], [0, 0, 1, 1]]]
    )

    def seen(state):
        _, mean, covariance, _ = state
        return jnp.concatenate([mean, jnp.diagonal(covariance), jnp.linalg.slogdet(covariance)[1][None]])

    def reset(key, params):
        state = (random.normal(key, (4,)), jnp.zeros(4), jnp.eye(4), jnp.int32(0))
        return seen(state), state

    def step(key, state, action, params):
        true, mean, covariance, time = state
        drift, noise = random.split(key)
        true = motion @ true + 0.1 * random.normal(drift, (4,))
        mean, covariance = motion @ mean, motion @ covariance @ motion.T + 0.01 * jnp.eye(4)
        look = sensors[action]
        measured = look @ true + 0.3 * random.normal(noise, (2,))
        spread = look @ covariance @ look.T + 0.09 * jnp.eye(2)
        gain = jnp.linalg.solve(spread, look @ covariance).T
        mean = mean + gain @ (measured - look @ mean)
        covariance = covariance - gain @ look @ covariance
        state = (true, mean, covariance, time + 1)
        error = jnp.sum((mean - true) ** 2)
        return after(seen(state), state, -error, False, late=time + 1 >= 50)

    return task("Tracker", 9, 3, reset, step)


def landscape() -> Environment:
    """A map of 40 x 40 heights that a walker sees a window of, and digs into."""
    size = 40

    def seen(state):
        ground, place, _ = state
        window = lax.dynamic_slice(ground, (place[0], place[1]), (5, 5))
        return (window - window[2, 2]).ravel().astype(jnp.float32) / 8

    def reset(key, params):
        ground = random.randint(key, (size, size), 0, 32, jnp.int8)
        state = (ground, jnp.array([16, 16]), jnp.int32(0))
        return seen(state), state

    def step(key, state, action, params):
        ground, place, time = state
        moved = jnp.clip(place + jnp.array([[0, 1], [1, 0], [0, -1], [-1, 0]])[action], 0, size - 5)
        down = ground[place[0] + 2, place[1] + 2] - ground[moved[0] + 2, moved[1] + 2]
        ground = ground.at[moved[0] + 2, moved[1] + 2].add(1)
        state = (ground, moved, time + 1)
        return after(seen(state), state, down, False, late=time + 1 >= 60)

    return task("Landscape", 25, 4, reset, step)


def half_rocket() -> Environment:
    """A rocket in float16, as a small computer flies it."""
    half = jnp.float16

    def reset(key, params):
        state = random.uniform(key, (4,), half, -1.0, 1.0)
        return state.astype(jnp.float32), (state, jnp.int32(0))

    def step(key, state, action, params):
        (x, y, u, v), time = state
        push, turn = (action > 0).astype(half), (action - 1).astype(half)
        u = u + half(0.02) * turn * push
        v = v + half(0.02) * (half(1.4) * push - half(0.7))
        new = jnp.stack([x + half(0.1) * u, y + half(0.1) * v, u, v])
        reward = -jnp.sqrt(new[0] * new[0] + new[1] * new[1])
        return after(new.astype(jnp.float32), (new, time + 1), reward, jnp.abs(y) > 3, late=time + 1 >= 60)

    return task("HalfRocket", 4, 3, reset, step)


def market() -> Environment:
    """A portfolio of six assets, the returns of which are stored in bfloat16."""
    assets, past = 6, 8

    def seen(state):
        history, weights, _, _ = state
        return jnp.concatenate([history.astype(jnp.float32).ravel(), weights])

    def reset(key, params):
        history = (0.02 * random.normal(key, (past, assets))).astype(jnp.bfloat16)
        state = (history, jnp.full(assets, 1 / assets), jnp.float32(1), jnp.int32(0))
        return seen(state), state

    def step(key, state, action, params):
        history, weights, wealth, time = state
        goal = jax.nn.softmax(2.0 * jax.nn.one_hot(action, assets) + history.mean(axis=0).astype(jnp.float32))
        drift = 0.3 * history[-1].astype(jnp.float32) + 0.02 * random.laplace(key, (assets,))
        change = jnp.clip(drift, -0.5, 0.5)
        cost = 0.001 * jnp.abs(goal - weights).sum()
        new = wealth * (1 + goal @ change - cost)
        weights = goal * (1 + change) / jnp.sum(goal * (1 + change))
        history = jnp.concatenate([history[1:], change[None].astype(jnp.bfloat16)])
        state = (history, weights, new, time + 1)
        return after(seen(state), state, jnp.log(new / wealth), new < 0.5, late=time + 1 >= 60)

    return task("Market", past * assets + assets, assets, reset, step)


ENVIRONMENTS: dict[str, Callable[[], Environment]] = {
    make.__name__: make
    for make in (
        deck,
        tokens,
        elevator,
        order_book,
        five,
        grid_search,
        epidemic,
        junction,
        inventory,
        bandit,
        bodies,
        circuit,
        tracker,
        landscape,
        half_rocket,
        market,
    )
}
