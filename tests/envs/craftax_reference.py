"""CraftaxClassic-v0 beside Craftax-Classic of the package craftax: equal states, random numbers and actions.

    python tests/envs/craftax_reference.py     # plays in the package, and writes recorded_craftax.json

Both start in the same worlds of random blocks, in which players have random items, and follow the same actions.
The numbers that the package draws in a step are drawn anew from the key of the step. After a death, the same world
begins again.

Shape letters: `E` episodes, played side by side, and `T` steps.
"""

import functools
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rollmill.envs.craftax_classic import environment
from rollmill.envs.craftax_classic.blocks import SIZE, Block, block_at
from rollmill.envs.craftax_classic.state import (
    Arrows,
    CraftaxParams,
    CraftaxState,
    Creatures,
    Draws,
    InventoryItem,
    replace,
)

RECORDED = Path(__file__).parent / "recorded_craftax.json"
EPISODES, STEPS = 16, 400
"""Size of what is recorded."""

FIELDS = [
    *(
        "cells",
        "position",
        "facing",
        "health",
        "food",
        "drink",
        "energy",
        "asleep",
        "recovery",
        "hunger",
        "thirst",
    ),
    *("fatigue", "inventory", "creatures.position", "creatures.health", "creatures.alive", "creatures.cooldown"),
    *(
        "arrows.position",
        "arrows.offset",
        "arrows.flies",
        "plants",
        "plant_ages",
        "planted",
        "achievements",
        "time",
    ),
]
"""Fields of a state that are compared. `creatures.occupies` is compared as the map of occupied cells."""

BLOCKS = {
    **{Block.GRASS: 8.0, Block.PATH: 4.0, Block.SAND: 1.0, Block.WATER: 0.5, Block.STONE: 1.0, Block.TREE: 1.0},
    **{Block.COAL: 0.6, Block.IRON: 0.6, Block.DIAMOND: 0.6, Block.CRAFTING_TABLE: 0.5, Block.FURNACE: 0.5},
    **{Block.LAVA: 0.1, Block.PLANT: 0.1, Block.RIPE_PLANT: 0.3},
}
"""How often a block occurs in a random world."""

ACTIONS = [1, 3, 3, 3, 3, 9, 0.5, 1.5, 0.7, 0.7, 2, 0.7, 0.7, 1, 0.7, 0.7, 1]
"""How often an action is chosen."""


def begin(key):
    """A random world, in which a player with random items stands near an edge or anywhere."""
    keys = jax.random.split(key, 6)
    state = environment._begin(keys[0], CraftaxParams(), always_diamond=True)
    kinds, weights = np.array(list(BLOCKS)), np.log(np.array(list(BLOCKS.values()), np.float32))
    cells = jnp.asarray(kinds)[jax.random.categorical(keys[1], weights, shape=(SIZE, SIZE))]
    near_edge = jax.random.randint(keys[2], (2,), 0, 4)
    position = jnp.where(jax.random.bernoulli(keys[3]), near_edge, jax.random.randint(keys[4], (2,), 0, SIZE))
    state = replace(
        state,
        cells=cells.astype(jnp.uint8).at[position[0], position[1]].set(jnp.uint8(Block.GRASS)),
        position=position,
        inventory=jax.random.randint(keys[5], (len(InventoryItem),), 0, 4),
        plants=jnp.zeros_like(state.plants).at[0].set(jnp.clip(position + 1, 0, SIZE - 1)),
        plant_ages=state.plant_ages.at[0].set(450),
        planted=state.planted.at[0].set(True),
    )
    row, column = state.plants[0]
    return replace(state, cells=state.cells.at[row, column].set(jnp.uint8(Block.PLANT)))


def draws_of(key):
    """The numbers that the package draws in a step with a key."""
    split, uniform = jax.random.split, jax.random.uniform
    direction = lambda key, count: (jax.random.choice(key, jnp.arange(count)).astype(jnp.float32) + 0.5) / count
    key, acting = split(key)
    sapling = uniform(split(acting)[1])
    key, moving = split(key)
    zombies, cows, skeletons, appearances, places = [], [], [], [], []
    moving, _ = split(moving)
    for _ in range(3):
        moving, first = split(moving)
        moving, second = split(moving)
        moving, third = split(moving)
        _, moving = split(moving)
        zombies.append((direction(first, 4), uniform(second), uniform(third)))
    moving, _ = split(moving)
    for _ in range(3):
        moving, first = split(moving)
        cows.append(direction(first, 8))
    moving, _ = split(moving)
    for _ in range(2):
        moving, first = split(moving)
        moving, second = split(moving)
        moving, third = split(moving)
        skeletons.append((direction(first, 4), uniform(second), uniform(third)))
    key, spawning = split(key)
    for _ in range(3):
        spawning, first = split(spawning)
        spawning, second = split(spawning)
        appearances.append(uniform(first))
        places.append(uniform(second, (1,))[0])
    zombie_directions, zombie_axes, zombie_chases = map(jnp.stack, zip(*zombies, strict=True))
    skeleton_directions, skeleton_axes, skeleton_chases = map(jnp.stack, zip(*skeletons, strict=True))
    return Draws(
        sapling=sapling,
        directions=jnp.concatenate([zombie_directions, jnp.stack(cows), skeleton_directions]),
        axes=jnp.concatenate([zombie_axes, jnp.zeros(3), skeleton_axes]),
        zombie_chases=zombie_chases,
        skeleton_chases=skeleton_chases,
        appearances=jnp.stack(appearances),
        places=jnp.stack(places),
    )


def chosen(key, before):
    """Random actions. Players often repeat a walk or an interaction, so that they get about."""
    new, again = jax.random.split(key)
    actions = jax.random.categorical(new, np.log(np.array(ACTIONS, np.float32)), shape=before.shape)
    return jnp.where(jax.random.bernoulli(again, 0.6, before.shape) & (before <= 5), before, actions)


def dies(state):
    return (block_at(state.cells, state.position) == Block.LAVA) | (state.health <= 0)


def get(state, field):
    return functools.reduce(getattr, field.split("."), state)


def play(advance, states, key, steps):
    """Plays. `advance` maps the keys, states and actions of a step to the next states, and to what is summed up.

    Returns the last states, the sums over all steps, and the number of deaths.
    """
    count = len(jax.tree.leaves(states)[0])

    def step(carry, key):
        now, before, sums, deaths = carry
        choose, draw = jax.random.split(key)
        actions = chosen(choose, before)
        after, more = advance(jax.random.split(draw, count), now, actions)
        dead = jax.vmap(dies)(after[0] if isinstance(after, tuple) else after)
        after = jax.tree.map(
            lambda new, old: jnp.where(_wide(dead, new), old.astype(new.dtype), new), after, states
        )
        return (after, actions, jax.tree.map(jnp.add, sums, more), deaths + jnp.sum(dead)), None

    def run(states):
        _, more = jax.eval_shape(advance, jax.random.split(key, count), states, jnp.zeros(count, int))
        sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), more)
        start = (states, jnp.zeros(count, int), sums, jnp.zeros((), int))
        (last, _, sums, deaths), _ = jax.lax.scan(step, start, jax.random.split(key, steps))
        return last, sums, deaths

    return jax.jit(run)(states)


def _wide(flags, like):
    return flags.reshape(flags.shape + (1,) * (like.ndim - 1))


def advance_ours(keys, states, actions):
    """Steps of ours, with the rewards and observations as sums."""
    params = CraftaxParams()
    after = jax.vmap(lambda key, state, action: environment.advance(state, action, draws_of(key), params))(
        keys, states, actions
    )
    rewards = jax.vmap(environment._reward)(states, after)
    seen = jax.vmap(lambda state: environment.observe_flat(state, params))(after)
    return after, sums_of(seen, rewards)


def sums_of(seen, rewards):
    """What is summed up: rewards in tenths, and a number that depends on every cell of a view."""
    weights = jnp.arange(1323) % 97 + 1
    views = jnp.sum(seen[:, :1323].astype(int) * weights[None, :], axis=1)
    return {"rewards": jnp.round(rewards * 10).astype(int), "views": views}


def summary(states, sums):
    """What is recorded of the last states: hashes of maps, and numbers of all else."""
    recorded = {
        field: np.asarray(get(states, field)).astype(float).tolist() for field in FIELDS if field != "cells"
    }
    maps = np.asarray(states.cells)
    return {
        **recorded,
        "cells": [hashlib.sha256(cells.tobytes()).hexdigest()[:16] for cells in maps],
        "rewards": np.asarray(sums["rewards"]).tolist(),
        "views": np.asarray(sums["views"]).tolist(),
    }


class Package:
    """Craftax-Classic of the package."""

    def __init__(self):
        from craftax.craftax_classic.envs import craftax_symbolic_env

        self.env = craftax_symbolic_env.CraftaxClassicSymbolicEnvNoAutoReset()
        self.params = self.env.default_params

    def begin(self, state):
        """The package's state of one of ours, in which no creature is alive."""
        from craftax.craftax_classic.envs.craftax_state import EnvState, Inventory, Mobs

        def mobs(first, last):
            part = jax.tree.map(lambda leaf: leaf[first:last], state.creatures)
            return Mobs(part.position, part.health, part.alive, part.cooldown)

        arrows = state.arrows
        return EnvState(
            map=state.cells.astype(int),
            mob_map=jnp.zeros((SIZE, SIZE), bool),
            player_position=state.position,
            player_direction=state.facing,
            player_health=state.health,
            player_food=state.food,
            player_drink=state.drink,
            player_energy=state.energy,
            is_sleeping=state.asleep,
            player_recover=state.recovery,
            player_hunger=state.hunger,
            player_thirst=state.thirst,
            player_fatigue=state.fatigue,
            inventory=Inventory(*state.inventory),
            zombies=mobs(0, 3),
            cows=mobs(3, 6),
            skeletons=mobs(6, 8),
            arrows=Mobs(arrows.position, jnp.zeros(3, int), arrows.flies, jnp.zeros(3, int)),
            arrow_directions=arrows.offset,
            growing_plants_positions=state.plants,
            growing_plants_age=state.plant_ages,
            growing_plants_mask=state.planted,
            light_level=environment.light_at(state.time, CraftaxParams()),
            achievements=state.achievements,
            state_rng=jnp.zeros(()),
            timestep=state.time,
        )

    def step(self, key, theirs, action):
        """A step of the package: the observation, the state and the reward."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            seen, theirs, reward, _, _ = self.env.step_env(key, theirs, action, self.params)
        return seen, theirs.replace(state_rng=jnp.zeros(())), reward

    def state(self, theirs):
        """Our form of the package's state. `occupies` is right unless two creatures share a cell."""
        kinds = (theirs.zombies, theirs.cows, theirs.skeletons)
        join = lambda name: jnp.concatenate([getattr(kind, name) for kind in kinds])
        position, alive = join("position").astype(jnp.int32), join("mask")
        creatures = Creatures(
            position,
            join("health").astype(jnp.int32),
            alive,
            join("attack_cooldown").astype(jnp.int32),
            alive & theirs.mob_map[position[:, 0], position[:, 1]],
        )
        integer = lambda value: jnp.asarray(value, jnp.int32)
        number = lambda value: jnp.asarray(value, jnp.float32)
        return CraftaxState(
            cells=theirs.map.astype(jnp.uint8),
            position=integer(theirs.player_position),
            facing=integer(theirs.player_direction),
            health=integer(theirs.player_health),
            food=integer(theirs.player_food),
            drink=integer(theirs.player_drink),
            energy=integer(theirs.player_energy),
            asleep=jnp.asarray(theirs.is_sleeping, bool),
            recovery=number(theirs.player_recover),
            hunger=number(theirs.player_hunger),
            thirst=number(theirs.player_thirst),
            fatigue=number(theirs.player_fatigue),
            inventory=jnp.stack([integer(getattr(theirs.inventory, item.name.lower())) for item in InventoryItem]),
            creatures=creatures,
            arrows=Arrows(
                integer(theirs.arrows.position), integer(theirs.arrow_directions), jnp.asarray(theirs.arrows.mask)
            ),
            plants=integer(theirs.growing_plants_positions),
            plant_ages=integer(theirs.growing_plants_age),
            planted=jnp.asarray(theirs.growing_plants_mask, bool),
            achievements=theirs.achievements,
            time=integer(theirs.timestep),
        )

    def advance_both(self, keys, states, actions):
        """Steps of both from `(ours, theirs)`. Counts differences of fields, blocked cells, rewards and views."""
        params = CraftaxParams()

        def one(key, ours, theirs, action):
            seen, theirs, reward = self.step(key, theirs, action)
            after = environment.advance(ours, action, draws_of(key), params)
            same = self.state(theirs)
            differs = {field: jnp.any(get(after, field) != get(same, field)) for field in FIELDS}
            blocked = jnp.zeros((SIZE, SIZE), bool)
            for i in range(len(after.creatures.occupies)):
                row, column = after.creatures.position[i]
                blocked = blocked.at[row, column].max(after.creatures.occupies[i])
            differs["blocked cells"] = jnp.any(blocked != theirs.mob_map)
            # the package rounds the inventory to float16
            gap = jnp.max(jnp.abs(environment.observe_flat(after, params) - seen))
            differs["observation"] = gap > 5e-4
            differs["reward"] = jnp.abs(environment._reward(ours, after) - reward) > 1e-6
            return (after, theirs), differs

        after, differs = jax.vmap(one)(keys, *states, actions)
        counts = {name: jnp.sum(each, dtype=int) for name, each in differs.items()}
        counts |= {f"achieved {i}": jnp.sum(each) for i, each in enumerate(after[0].achievements.T)}
        return after, counts


def worlds(count, seed):
    return jax.jit(jax.vmap(begin))(jax.random.split(jax.random.key(seed), count))


def record():
    """Plays in the package, and writes the summary of what happened there."""
    package, states = Package(), worlds(EPISODES, 0)

    def advance(keys, states, actions):
        def one(key, pair, action):
            seen, theirs, reward = package.step(key, pair[1], action)
            return (package.state(theirs), theirs), (seen, reward)

        after, (seen, rewards) = jax.vmap(one)(keys, states, actions)
        return after, sums_of(seen, rewards)

    both = (states, jax.vmap(package.begin)(states))
    shapes = jax.eval_shape(advance, jax.random.split(jax.random.key(1), EPISODES), both, jnp.zeros(EPISODES, int))
    both = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), both, shapes[0])
    (last, _), sums, deaths = play(advance, both, jax.random.key(1), STEPS)
    assert deaths > EPISODES / 4
    RECORDED.write_text(json.dumps(summary(last, sums), indent=None) + "\n")


if __name__ == "__main__":
    record()
