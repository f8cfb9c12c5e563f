"""CraftaxClassic-v0: survive and collect in a two-dimensional world (Craftax-Classic).

The rules are those of Craftax-Classic in Craftax 1.6 (Matthews et al., "Craftax: A Lightning-Fast Benchmark for
Open-Ended Reinforcement Learning", ICML 2024), which follow Crafter (Hafner, "Benchmarking the Spectrum of Agent
Capabilities", ICLR 2022). From equal states, actions and random numbers follow equal states, rewards and
observations, including the peculiarities of Craftax:

- Creatures that have disappeared keep moving unseen. They come to life when the player uses the action `do`, and
  disappear again if they are far from the player.
- Lava on the opposite edge of the map lets the player walk over the edge, and die.

A step reads and writes single cells of the map, and never computes all of it.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, Int, PyTree

from rollmill.core.drawing import Drawing
from rollmill.core.types import Environment, Key, Observation, Timestep
from rollmill.envs.craftax_classic.blocks import SIZE, Block, block_at, offset_towards, replace_block, view_around
from rollmill.envs.craftax_classic.creatures import move_creatures, spawn_creatures
from rollmill.envs.craftax_classic.player import craft, interact, live, place, walk
from rollmill.envs.craftax_classic.state import (
    ARROWS,
    CREATURES,
    KINDS,
    MOST,
    PLANTS,
    Achievement,
    Arrows,
    CraftaxParams,
    CraftaxState,
    Creatures,
    Draws,
    InventoryItem,
    Move,
    draw,
    light_at,
)
from rollmill.envs.craftax_classic.world import START, generate
from rollmill.envs.drawings.craftax import DrawnPlayer, draw_world
from rollmill.envs.rare_resets import checked_ratio
from rollmill.envs.transforms import time_limit

VIEW = (7, 9)
"""Rows and columns of the map that the player sees."""

RIPENING = 600
"""Steps until a plant can be eaten."""

RESET_RATIO = 64
"""Default reset ratio. Generating a world takes as long as about a hundred steps, and episodes are longer."""


def craftax_classic(
    *, max_steps: int = 10_000, flat: bool = False, always_diamond: bool = True, reset_ratio: int = RESET_RATIO
) -> Environment:
    """Survive and collect in a world of 64 × 64 cells, 17 actions (Craftax-Classic).

    An observation is a dictionary. `blocks` are the kinds of the 7 × 9 cells around the player, `creatures` flags
    zombies, cows, skeletons and arrows in these cells, and `self` contains the 12 numbers of the inventory and
    health, food, drink and energy (divided by 10), the direction of the player (one-hot), the light, and whether
    the player sleeps. Networks receive `blocks` as one-hot vectors. Each of 22 achievements is rewarded with 1 in
    an episode, and each change of health with 0.1 per point. Death terminates an episode.

    Args:
        max_steps: length of the longest episode, which truncates it, in steps.
        flat: whether the observation is the vector of 1,345 numbers that Craftax-Classic-Symbolic-v1 observes.
        always_diamond: whether each world has at least one diamond.
        reset_ratio: see `rollmill.Environment`. With 1, a world is generated for every environment in every step.
    """

    def reset(key: Key, params: CraftaxParams) -> tuple[Observation, CraftaxState]:
        state = _begin(key, params, always_diamond=always_diamond)
        return seen(state, params), state

    def step(key: Key, state: CraftaxState, action: Int[Array, ""], params: CraftaxParams) -> Timestep:
        after = advance(state, action, draw(key), params)
        in_lava = block_at(after.cells, after.position) == Block.LAVA
        return Timestep(
            observation=seen(after, params),
            state=after,
            reward=_reward(state, after),
            terminated=in_lava | (after.health <= 0),
            truncated=jnp.zeros((), bool),
            info={},
        )

    seen = observe_flat if flat else observe
    dictionary = spaces.Dict(
        {
            "blocks": spaces.MultiDiscrete(np.full(VIEW, len(Block)), np.uint8),
            "creatures": spaces.MultiBinary((*VIEW, len(KINDS) + 1)),
            "self": spaces.Box(0.0, 1.0, (len(InventoryItem) + 4 + 4 + 2,), np.float32),
        }
    )
    env = Environment(
        name="CraftaxClassic-v0",
        reset=reset,
        step=step,
        observation_space=spaces.Box(0.0, 1.0, (1345,), np.float32) if flat else dictionary,
        action_space=spaces.Discrete(len(Move)),
        params=CraftaxParams(),
        draw=_draw,
        reset_ratio=checked_ratio(reset_ratio),
    )
    return time_limit(env, max_steps)


def advance(state: CraftaxState, action: Int[Array, ""], draws: Draws, params: CraftaxParams) -> CraftaxState:
    """Returns the state after an action, given the random numbers of the step."""
    move = jnp.where(state.asleep, Move.NOOP, action.astype(jnp.int32))
    state = craft(state, move)
    target = state.position + offset_towards(state.facing)
    block = block_at(state.cells, target)
    state, block = interact(state, move, target, block, draws.sapling)
    state, block = place(state, move, target, block)
    state = replace(state, cells=replace_block(state.cells, target, block))
    state = walk(state, move)
    state = move_creatures(state, draws)
    state = _grow_plants(state)
    state = spawn_creatures(state, draws, params)
    state = live(state, move)
    in_lava = block_at(state.cells, state.position) == Block.LAVA
    return replace(
        state,
        inventory=jnp.minimum(state.inventory, MOST),
        health=jnp.where(in_lava, 0, jnp.maximum(state.health, 0)),
        time=state.time + 1,
    )


def observe(state: CraftaxState, params: CraftaxParams) -> PyTree[Array]:
    """Returns the observation of a state: a dictionary of blocks, creatures and numbers of the player."""
    return {
        "blocks": view_around(state.cells, state.position, VIEW).astype(jnp.uint8),
        "creatures": _visible_creatures(state).astype(jnp.int8),
        "self": _numbers_of_player(state, params),
    }


def observe_flat(state: CraftaxState, params: CraftaxParams) -> Float[Array, "1345"]:
    """Returns the observation of a state as one vector, in the order of Craftax-Classic-Symbolic-v1."""
    blocks = (
        view_around(state.cells, state.position, VIEW)[..., None]
        == np.arange(len(Block), dtype=np.int32)[None, None, :]
    )
    planes = jnp.concatenate([blocks, _visible_creatures(state)], axis=-1)
    return jnp.concatenate([planes.astype(jnp.float32).reshape(-1), _numbers_of_player(state, params)])


def _begin(key: Key, params: CraftaxParams, *, always_diamond: bool) -> CraftaxState:
    zero, none = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    most = jnp.full((), MOST, jnp.int32)
    return CraftaxState(
        cells=generate(key, always_diamond=always_diamond),
        position=jnp.asarray(START, jnp.int32),
        facing=jnp.asarray(int(Move.UP), jnp.int32),
        health=most,
        food=most,
        drink=most,
        energy=most,
        asleep=jnp.zeros((), bool),
        recovery=none,
        hunger=none,
        thirst=none,
        fatigue=none,
        inventory=jnp.zeros(len(InventoryItem), jnp.int32),
        creatures=_unborn(params),
        arrows=Arrows(
            position=jnp.zeros((ARROWS, 2), jnp.int32),
            offset=jnp.ones((ARROWS, 2), jnp.int32),
            flies=jnp.zeros(ARROWS, bool),
        ),
        plants=jnp.zeros((PLANTS, 2), jnp.int32),
        plant_ages=jnp.zeros(PLANTS, jnp.int32),
        planted=jnp.zeros(PLANTS, bool),
        achievements=jnp.zeros(len(Achievement), bool),
        time=zero,
    )


def _unborn(params: CraftaxParams) -> Creatures:
    """Returns the creatures of a new episode. None is alive, but zombies and cows have health, as in Craftax."""
    cows = np.isin(np.arange(CREATURES), np.array(KINDS["cows"]))
    zombies = np.isin(np.arange(CREATURES), np.array(KINDS["zombies"]))
    return Creatures(
        position=jnp.zeros((CREATURES, 2), jnp.int32),
        health=jnp.where(cows, params.cow_health, zombies.astype(np.int32)).astype(jnp.int32),
        alive=jnp.zeros(CREATURES, bool),
        cooldown=jnp.zeros(CREATURES, jnp.int32),
        occupies=jnp.zeros(CREATURES, bool),
    )


def _grow_plants(state: CraftaxState) -> CraftaxState:
    """Lets plants grow. At most one ripens in a step, because no two are planted or eaten in the same step."""
    ages = jnp.where(state.planted, state.plant_ages + 1, 0)
    ripens = ages == RIPENING
    beyond = jnp.full(2, SIZE, jnp.int32)  # where nothing is written
    position = sum((jnp.where(ripens[i], state.plants[i] - beyond, 0) for i in range(PLANTS)), start=beyond)
    cells = replace_block(state.cells, position, jnp.full((), Block.RIPE_PLANT, jnp.int32))
    return replace(state, plant_ages=ages, cells=cells)


def _reward(before: CraftaxState, after: CraftaxState) -> Float[Array, ""]:
    achieved = jnp.sum(after.achievements, dtype=jnp.float32) - jnp.sum(before.achievements, dtype=jnp.float32)
    return achieved + (after.health - before.health).astype(jnp.float32) * 0.1


def _visible_creatures(state: CraftaxState) -> Bool[Array, "7 9 4"]:
    """Flags the kinds of creatures in each cell that the player sees.

    As in Craftax, only the last creature of a kind in a cell counts, even if it is not alive, and a creature that
    is up to 7 rows above or 9 columns left of the view counts in the row or column that a negative index selects.
    """
    centre, size = np.array([VIEW[0] // 2, VIEW[1] // 2], np.int32), np.array(VIEW, np.int32)
    rows, columns = (np.arange(length, dtype=np.int32) for length in VIEW)
    alive = jnp.concatenate([state.creatures.alive, state.arrows.flies])
    local = jnp.concatenate([state.creatures.position, state.arrows.position]) - (state.position - centre)[None, :]
    in_view = (local >= 0) & (local < size[None, :])
    visible = alive & in_view[:, 0] & in_view[:, 1]
    index = jnp.where(local < 0, local + size[None, :], local)
    planes = []
    for kind in (*KINDS.values(), range(CREATURES, CREATURES + ARROWS)):
        plane = jnp.zeros(VIEW, bool)
        for i in kind:
            here = (rows == index[i, 0])[:, None] & (columns == index[i, 1])[None, :]
            plane = jnp.where(here, visible[i], plane)
        planes.append(plane)
    return jnp.stack(planes, axis=-1)


def _numbers_of_player(state: CraftaxState, params: CraftaxParams) -> Float[Array, "22"]:
    needs = jnp.stack([state.health, state.food, state.drink, state.energy])
    counts = jnp.concatenate([state.inventory, needs]).astype(jnp.float32) / 10
    facing = (state.facing == np.arange(1, 5, dtype=np.int32)).astype(jnp.float32)
    rest = jnp.stack([light_at(state.time, params), state.asleep.astype(jnp.float32)])
    return jnp.concatenate([counts, facing, rest])


def _draw(state: CraftaxState, params: CraftaxParams) -> Drawing:
    positions, alive = np.asarray(state.creatures.position), state.creatures.alive
    living = {kind: [positions[i] for i in indices if alive[i]] for kind, indices in KINDS.items()}
    arrows = [np.asarray(state.arrows.position[i]) for i in range(ARROWS) if state.arrows.flies[i]]
    player = DrawnPlayer(
        position=(int(state.position[0]), int(state.position[1])),
        offset={Move.LEFT: (0, -1), Move.RIGHT: (0, 1), Move.UP: (-1, 0), Move.DOWN: (1, 0)}[
            Move(int(state.facing))
        ],
        is_asleep=bool(state.asleep),
        needs={name: int(getattr(state, name)) for name in ("health", "food", "drink", "energy")},
    )
    names = {int(block): block.name.lower() for block in Block}
    return draw_world(np.asarray(state.cells, np.int32), names, player, living | {"arrows": arrows})
