"""Creatures of Craftax-Classic: how zombies, cows, skeletons and arrows move, attack, appear and disappear."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rollmill.envs.craftax_classic.blocks import (
    SIZE,
    Block,
    Position,
    are_at,
    block_at,
    distance,
    is_inside,
    is_solid,
    offset_towards,
)
from rollmill.envs.craftax_classic.state import (
    ARROWS,
    CREATURES,
    KINDS,
    Count,
    CraftaxParams,
    CraftaxState,
    Creatures,
    Draws,
    first,
    first_of_kind,
    light_at,
    with_achievements,
)
from rollmill.envs.physics import Scalar

DESPAWN_DISTANCE = 14
"""Creatures at this distance from the player or beyond disappear, and none appears there."""

_WINDOW = 2 * DESPAWN_DISTANCE - 1
"""Rows and columns of the part of the map in which creatures appear."""

_AXIS = np.arange(_WINDOW, dtype=np.int32)


def is_occupied(state: CraftaxState, position: Position) -> Bool[Array, ""]:
    """True if the player or a creature occupies a position."""
    here = are_at(state.creatures.position, position)
    return jnp.any(state.creatures.occupies & here) | jnp.all(state.position == position)


def can_stand(state: CraftaxState, position: Position) -> Bool[Array, ""]:
    """True if a creature may walk to a position."""
    block = block_at(state.cells, position)
    return is_inside(position) & ~is_solid(block) & (block != Block.LAVA) & ~is_occupied(state, position)


def free_cell(state: CraftaxState, position: Position, now: Bool[Array, ""]) -> CraftaxState:
    """Lets no creature at a position occupy it, if `now` is True."""
    creatures = state.creatures
    here = now & are_at(creatures.position, position)
    return replace(state, creatures=replace(creatures, occupies=creatures.occupies & ~here))


def move_creatures(state: CraftaxState, draws: Draws) -> CraftaxState:
    """Moves all creatures one after the other, and then all arrows."""
    for number, i in enumerate(KINDS["zombies"]):
        state = _move_zombie(state, draws, i, number)
    for number, i in enumerate(KINDS["cows"]):
        offset = _random_offset(draws.cow_directions[number], 8)  # half of the eight directions are none
        state = _walk_to(state, i, state.creatures.position[i] + offset)
    for number, i in enumerate(KINDS["skeletons"]):
        state = _move_skeleton(state, draws, i, number)
    return _move_arrows(state)


def _random_offset(number: Float[Array, ""], directions: int) -> Position:
    return offset_towards(1 + jnp.floor(number * directions).astype(jnp.int32))


def _offset_to_player(state: CraftaxState, position: Position, axis: Float[Array, ""]) -> Position:
    """Returns the offset towards the player along the longer axis. `axis` is a random number that decides ties."""
    gap = state.position - position
    down, across = jnp.abs(gap[0]), jnp.abs(gap[1])
    vertical = (down > across) | ((down == across) & (axis >= 0.5))
    return jnp.sign(gap) * jnp.stack([vertical, ~vertical]).astype(jnp.int32)


def _move_zombie(state: CraftaxState, draws: Draws, i: int, number: int) -> CraftaxState:
    """Moves a zombie at random or towards the player. A zombie next to the player attacks."""
    creatures, here = state.creatures, state.creatures.position[i]
    far = distance(here, state.position)
    attacks = (far == 1) & (creatures.cooldown[i] <= 0) & creatures.alive[i]
    chases = (far < 10) & (draws.zombie_chases[number] < 0.75)
    offset = jnp.where(
        chases,
        _offset_to_player(state, here, draws.zombie_axes[number]),
        _random_offset(draws.zombie_directions[number], 4),
    )
    state = with_achievements(state, wake_up=state.asleep & attacks)
    state = replace(
        state,
        health=state.health - jnp.where(attacks, jnp.where(state.asleep, 7, 2), 0),
        asleep=state.asleep & ~attacks,
        creatures=_with_cooldown(creatures, i, attacks, 5),
    )
    return _walk_to(state, i, jnp.where(attacks, here, here + offset))


def _move_skeleton(state: CraftaxState, draws: Draws, i: int, number: int) -> CraftaxState:
    """Moves a skeleton, mostly at random. It shoots at a player who is near, and evades one who is very near."""
    creatures, here = state.creatures, state.creatures.position[i]
    far = distance(here, state.position)
    ahead = _offset_to_player(state, here, draws.skeleton_axes[number])
    offset = _random_offset(draws.skeleton_directions[number], 4)
    aimed = jnp.where(far >= 10, ahead, jnp.where(far <= 3, -ahead, offset))
    target = here + jnp.where(draws.skeleton_chases[number] > 0.85, aimed, offset)
    cornered = (far <= 3) & ~can_stand(state, target)
    attacks = ((far == 4) | (far == 5) | cornered) & (creatures.cooldown[i] <= 0) & creatures.alive[i]
    arrows = state.arrows
    shot = first(jnp.logical_and(attacks, ~arrows.flies))
    state = replace(
        state,
        arrows=replace(
            arrows,
            position=jnp.where(shot[:, None], here[None, :], arrows.position),
            offset=jnp.where(shot[:, None], ahead[None, :], arrows.offset),
            flies=arrows.flies | shot,
        ),
        creatures=_with_cooldown(creatures, i, attacks, 4),
    )
    return _walk_to(state, i, jnp.where(attacks, here, target))


def _is(*indices: int) -> Bool[np.ndarray, "8"]:
    """Flags some creatures among all."""
    return np.isin(np.arange(CREATURES), np.array(indices))


def _with_cooldown(creatures: Creatures, i: int, attacks: Bool[Array, ""], steps: int) -> Creatures:
    cooldown = jnp.where(attacks, steps, creatures.cooldown - 1)
    return replace(creatures, cooldown=jnp.where(_is(i), cooldown, creatures.cooldown))


def _walk_to(state: CraftaxState, i: int, target: Position) -> CraftaxState:
    """Moves a creature to a position if it can stand there. Far from the player, it disappears."""
    here, alive = state.creatures.position[i], state.creatures.alive[i]
    position = jnp.where(can_stand(state, target), target, here)
    stays = alive & (distance(here, state.position) < DESPAWN_DISTANCE)
    state, this = free_cell(state, here, alive), _is(i)
    creatures = state.creatures
    return replace(
        state,
        creatures=replace(
            creatures,
            position=jnp.where(this[:, None], position[None, :], creatures.position),
            alive=jnp.where(this, stays, creatures.alive),
            occupies=jnp.where(this, stays, creatures.occupies),
        ),
    )


def _move_arrows(state: CraftaxState) -> CraftaxState:
    """Moves arrows until they hit something. They hurt the player, and destroy crafting tables and furnaces."""
    arrows = state.arrows
    position = arrows.position + arrows.offset
    flies, hits, destroys = [], [], []
    for i in range(ARROWS):
        block = block_at(state.cells, position[i])
        for earlier in range(i):  # which may have destroyed the same block in this step
            gone = destroys[earlier] & jnp.all(position[earlier] == position[i])
            block = jnp.where(gone, Block.PATH, block)
        passes = ~is_solid(block) | (block == Block.WATER)
        flies.append(arrows.flies[i] & is_inside(position[i]) & passes & ~is_occupied(state, position[i]))
        hits.append(arrows.flies[i] & jnp.all(position[i] == state.position))
        destroys.append(arrows.flies[i] & ((block == Block.FURNACE) | (block == Block.CRAFTING_TABLE)))
    hit, destroyed = jnp.stack(hits), jnp.stack(destroys)
    rows = jnp.where(destroyed, position[:, 0], SIZE)  # beyond the map, nothing is written
    return replace(
        state,
        arrows=replace(arrows, position=position, flies=jnp.stack(flies)),
        health=state.health - 2 * jnp.sum(hit, dtype=jnp.int32),
        asleep=state.asleep & ~jnp.any(hit),
        cells=state.cells.at[rows, position[:, 1]].set(jnp.uint8(Block.PATH)),
    )


class _Window(NamedTuple):
    """The part of the map in which creatures may appear."""

    blocks: Int[Array, "W W"]
    free: Bool[Array, "W W"]
    """Cells that no creature occupies."""
    distances: Int[Array, "W W"]
    corner: Position


def spawn_creatures(state: CraftaxState, draws: Draws, params: CraftaxParams) -> CraftaxState:
    """Lets a cow, a zombie and a skeleton appear at random, each if there is room for one more of its kind."""
    window = _window_of(state)
    darkness = 1 - light_at(state.time, params)
    zombie_chance = params.spawn_zombie_base_chance + params.spawn_zombie_night_chance * jnp.square(darkness)
    grass, path = window.blocks == Block.GRASS, window.blocks == Block.PATH
    kinds: tuple[tuple[str, Bool[Array, "W W"], int, Scalar, Count], ...] = (
        ("cows", grass, 3, params.spawn_cow_chance, params.cow_health),
        ("zombies", grass | path, 9, zombie_chance, params.zombie_health),
        ("skeletons", path, 9, params.spawn_skeleton_chance, params.skeleton_health),
    )
    creatures, free = state.creatures, window.free
    slots = first_of_kind(~creatures.alive)
    for number, (kind, ground, nearest, chance, health) in enumerate(kinds):
        this = _is(*KINDS[kind])
        cells = ground & free & (window.distances > nearest) & (window.distances < DESPAWN_DISTANCE)
        count = jnp.sum(cells, dtype=jnp.int32)
        appears = (draws.appearances[number] < chance) & (count > 0)
        rank = jnp.ceil(count.astype(jnp.float32) * (1 - draws.places[number])).astype(jnp.int32) - 1
        local = _cell_of_rank(cells, rank)
        new = slots & this & appears
        creatures = replace(
            creatures,
            position=jnp.where(new[:, None], (window.corner + local)[None, :], creatures.position),
            health=jnp.where(new, health, creatures.health),
            alive=creatures.alive | new,
            occupies=creatures.occupies | new,
        )
        free &= ~(jnp.any(new) & _is_cell(local))
    # Without room for one more, the first of a kind occupies its cell again, as in Craftax.
    occupies = creatures.occupies
    for indices in KINDS.values():
        occupies |= _is(indices[0]) & jnp.all(state.creatures.alive[np.array(indices)])
    return replace(state, creatures=replace(creatures, occupies=occupies))


def _window_of(state: CraftaxState) -> _Window:
    corner = jnp.clip(state.position - (DESPAWN_DISTANCE - 1), 0, SIZE - _WINDOW)
    blocks = jax.lax.dynamic_slice(state.cells, (corner[0], corner[1]), (_WINDOW, _WINDOW))
    down = jnp.abs(corner[0] + _AXIS - state.position[0])
    across = jnp.abs(corner[1] + _AXIS - state.position[1])
    local, free = state.creatures.position - corner[None, :], jnp.ones((_WINDOW, _WINDOW), bool)
    for i in range(CREATURES):
        free &= ~(state.creatures.occupies[i] & _is_cell(local[i]))
    return _Window(blocks.astype(jnp.int32), free, down[:, None] + across[None, :], corner)


def _is_cell(local: Position) -> Bool[Array, "W W"]:
    """Flags a cell of the window."""
    return (local[0] == _AXIS)[:, None] & (local[1] == _AXIS)[None, :]


def _cell_of_rank(cells: Bool[Array, "W W"], rank: Int[Array, ""]) -> Position:
    """Returns the row and column of the True cell that has `rank` others before it, row by row."""
    counts = jnp.sum(cells, axis=1, dtype=jnp.int32)
    until = jnp.cumsum(counts, dtype=jnp.int32)
    row = jnp.sum(until <= rank, dtype=jnp.int32)
    within = rank - jnp.sum(jnp.where(until <= rank, counts, 0), dtype=jnp.int32)
    there = jnp.any(cells & (row == _AXIS)[:, None], axis=0)
    column = jnp.sum(jnp.cumsum(there, dtype=jnp.int32) <= within, dtype=jnp.int32)
    return jnp.stack([row, column])
