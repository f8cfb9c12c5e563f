"""Creatures of Craftax-Classic: how zombies, cows, skeletons and arrows move, attack, appear and disappear."""

import functools
import operator
from dataclasses import replace
from typing import NamedTuple, TypeAlias

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
    is_any,
    is_inside,
    is_same,
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

_Rows: TypeAlias = Int[Array, "27"]
"""Some cells of the window: an integer for each row, whose bits are the columns."""


def is_occupied(state: CraftaxState, position: Position) -> Bool[Array, ""]:
    """True if the player or a creature occupies a position."""
    here = are_at(state.creatures.position, position)
    return is_any(state.creatures.occupies & here) | is_same(state.position, position)


def can_stand(state: CraftaxState, position: Position) -> Bool[Array, ""]:
    """True if a creature may walk to a position."""
    return _is_ground(state, position) & ~is_occupied(state, position)


def free_cell(state: CraftaxState, position: Position, now: Bool[Array, ""]) -> CraftaxState:
    """Lets no creature at a position occupy it, if `now` is True."""
    creatures = state.creatures
    here = now & are_at(creatures.position, position)
    return replace(state, creatures=replace(creatures, occupies=creatures.occupies & ~here))


def move_creatures(state: CraftaxState, draws: Draws) -> CraftaxState:
    """Moves all creatures one after the other, and then all arrows.

    Where creatures want to go does not depend on how others move, so all of their targets are read from the map at
    once.
    """
    here = state.creatures.position
    far = distance(here, state.position[None, :])
    attacks = (far == 1) & (state.creatures.cooldown <= 0) & state.creatures.alive & _is(*KINDS["zombies"])
    ahead = _offset_to_player(state, here, draws.axes)
    target = here + _offsets(draws, far, ahead)
    is_ground = _is_ground(state, target)
    state = _suffer(state, attacks)
    for i in range(CREATURES):
        is_free = is_ground[i] & ~is_occupied(state, target[i])
        stays = attacks[i]
        if i in KINDS["skeletons"]:
            state, stays = _shoot(state, i, far[i], ahead[i], is_cornered=(far[i] <= 3) & ~is_free)
        state = _walk(state, i, jnp.where(is_free & ~stays, target[i], here[i]), far[i])
    return _move_arrows(state)


def _is_ground(state: CraftaxState, position: Int[Array, "*N 2"]) -> Bool[Array, "*N"]:
    """True for positions with a block on which creatures walk."""
    block = block_at(state.cells, position)
    return is_inside(position) & ~is_solid(block) & (block != Block.LAVA)


def _offsets(draws: Draws, far: Int[Array, "8"], ahead: Int[Array, "8 2"]) -> Int[Array, "8 2"]:
    """Returns the steps that creatures want to take.

    Zombies that are near often move towards the player. Skeletons mostly move at random, sometimes towards the
    player, and away from a player who is very near. Half of the eight directions of cows are none.
    """
    zombies, cows, skeletons = (slice(kind.start, kind.stop) for kind in KINDS.values())
    directions = np.where(_is(*KINDS["cows"]), 8, 4).astype(np.float32)
    anywhere = offset_towards(1 + jnp.floor(draws.directions * directions).astype(jnp.int32))
    chases = (far[zombies] < 10) & (draws.zombie_chases < 0.75)
    near, away = (far[skeletons] <= 3)[:, None], (far[skeletons] >= 10)[:, None]
    aimed = jnp.where(away, ahead[skeletons], jnp.where(near, -ahead[skeletons], anywhere[skeletons]))
    return jnp.concatenate(
        [
            jnp.where(chases[:, None], ahead[zombies], anywhere[zombies]),
            anywhere[cows],
            jnp.where((draws.skeleton_chases > 0.85)[:, None], aimed, anywhere[skeletons]),
        ]
    )


def _offset_to_player(
    state: CraftaxState, position: Int[Array, "8 2"], axis: Float[Array, "8"]
) -> Int[Array, "8 2"]:
    """Returns offsets towards the player along the longer axis. `axis` are random numbers that decide ties."""
    gap = state.position[None, :] - position
    down, across = jnp.abs(gap[:, 0]), jnp.abs(gap[:, 1])
    vertical = (down > across) | ((down == across) & (axis >= 0.5))
    return jnp.sign(gap) * jnp.stack([vertical, ~vertical], axis=1).astype(jnp.int32)


def _suffer(state: CraftaxState, attacks: Bool[Array, "8"]) -> CraftaxState:
    """Hurts and wakes the player, whom some zombies attack. The first attack in sleep hurts most."""
    is_attacked, count = is_any(attacks), sum(attacks[i].astype(jnp.int32) for i in KINDS["zombies"])
    wakes, creatures = state.asleep & is_attacked, state.creatures
    cooldown = jnp.where(_is(*KINDS["zombies"]), jnp.where(attacks, 5, creatures.cooldown - 1), creatures.cooldown)
    return replace(
        with_achievements(state, wake_up=wakes),
        health=state.health - 2 * count - jnp.where(wakes, 5, 0),
        asleep=state.asleep & ~is_attacked,
        creatures=replace(creatures, cooldown=cooldown),
    )


def _shoot(
    state: CraftaxState, i: int, far: Int[Array, ""], ahead: Position, *, is_cornered: Bool[Array, ""]
) -> tuple[CraftaxState, Bool[Array, ""]]:
    """Lets a skeleton shoot at a player who is near. Returns the state, and whether it shoots."""
    creatures, arrows = state.creatures, state.arrows
    attacks = ((far == 4) | (far == 5) | is_cornered) & (creatures.cooldown[i] <= 0) & creatures.alive[i]
    shot = first(jnp.logical_and(attacks, ~arrows.flies))
    cooldown = jnp.where(attacks, 4, creatures.cooldown[i] - 1)
    state = replace(
        state,
        arrows=replace(
            arrows,
            position=jnp.where(shot[:, None], creatures.position[i][None, :], arrows.position),
            offset=jnp.where(shot[:, None], ahead[None, :], arrows.offset),
            flies=arrows.flies | shot,
        ),
        creatures=replace(creatures, cooldown=jnp.where(_is(i), cooldown, creatures.cooldown)),
    )
    return state, attacks


def _is(*indices: int) -> Bool[np.ndarray, "8"]:
    """Flags some creatures among all."""
    return np.isin(np.arange(CREATURES), np.array(indices))


def _walk(state: CraftaxState, i: int, position: Position, far: Int[Array, ""]) -> CraftaxState:
    """Moves a creature to a free position. Far from the player, it disappears."""
    here, alive, this = state.creatures.position[i], state.creatures.alive[i], _is(i)
    stays = alive & (far < DESPAWN_DISTANCE)
    creatures = free_cell(state, here, alive).creatures
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
    blocks, is_within = block_at(state.cells, position), is_inside(position)
    flies, hits, destroys = [], [], []
    for i in range(ARROWS):
        block = blocks[i]
        for earlier in range(i):  # which may have destroyed the same block in this step
            gone = destroys[earlier] & is_same(position[earlier], position[i])
            block = jnp.where(gone, Block.PATH, block)
        passes = ~is_solid(block) | (block == Block.WATER)
        flies.append(arrows.flies[i] & is_within[i] & passes & ~is_occupied(state, position[i]))
        hits.append(arrows.flies[i] & is_same(position[i], state.position))
        destroys.append(arrows.flies[i] & ((block == Block.FURNACE) | (block == Block.CRAFTING_TABLE)))
    rows = jnp.where(jnp.stack(destroys), position[:, 0], SIZE)  # beyond the map, nothing is written
    return replace(
        state,
        arrows=replace(arrows, position=position, flies=jnp.stack(flies)),
        health=state.health - 2 * sum(hit.astype(jnp.int32) for hit in hits),
        asleep=state.asleep & ~functools.reduce(operator.or_, hits),
        cells=state.cells.at[rows, position[:, 1]].set(jnp.uint8(Block.PATH)),
    )


class _Window(NamedTuple):
    """The part of the map in which creatures may appear. Bit `c` of a row is column `c`."""

    grass: _Rows
    path: _Rows
    free: _Rows
    """Cells that no creature occupies."""
    player: Position
    corner: Position
    """Position of the first cell on the map."""

    def near(self, steps: int) -> _Rows:
        """Returns the cells that are less than `steps` away from the player."""
        across = steps - jnp.abs(_AXIS - self.player[0])
        begin = jnp.clip(self.player[1] - across + 1, 0, _WINDOW)
        end = jnp.clip(self.player[1] + across, 0, _WINDOW)
        return _bits_below(end) & ~_bits_below(begin)


def spawn_creatures(state: CraftaxState, draws: Draws, params: CraftaxParams) -> CraftaxState:
    """Lets a cow, a zombie and a skeleton appear at random, each if there is room for one more of its kind."""
    window = _window_of(state)
    darkness = 1 - light_at(state.time, params)
    zombie_chance = params.spawn_zombie_base_chance + params.spawn_zombie_night_chance * jnp.square(darkness)
    kinds: tuple[tuple[str, _Rows, int, Scalar, Count], ...] = (
        ("cows", window.grass, 3, params.spawn_cow_chance, params.cow_health),
        ("zombies", window.grass | window.path, 9, zombie_chance, params.zombie_health),
        ("skeletons", window.path, 9, params.spawn_skeleton_chance, params.skeleton_health),
    )
    creatures, free = state.creatures, window.free
    slots = first_of_kind(~creatures.alive)
    for number, (kind, ground, nearest, chance, health) in enumerate(kinds):
        cells = ground & free & window.near(DESPAWN_DISTANCE) & ~window.near(nearest + 1)
        local, is_room = _pick(cells, draws.places[number])
        new = slots & _is(*KINDS[kind]) & (draws.appearances[number] < chance) & is_room
        creatures = replace(
            creatures,
            position=jnp.where(new[:, None], (window.corner + local)[None, :], creatures.position),
            health=jnp.where(new, health, creatures.health),
            alive=creatures.alive | new,
            occupies=creatures.occupies | new,
        )
        free &= ~_cell(local, is_any(new))
    # Without room for one more, the first of a kind occupies its cell again, as in Craftax.
    occupies = creatures.occupies
    for indices in KINDS.values():
        occupies |= _is(indices[0]) & ~is_any(~state.creatures.alive[indices.start : indices.stop])
    return replace(state, creatures=replace(creatures, occupies=occupies))


def _window_of(state: CraftaxState) -> _Window:
    corner = jnp.clip(state.position - (DESPAWN_DISTANCE - 1), 0, SIZE - _WINDOW)
    blocks = jax.lax.dynamic_slice(state.cells, (corner[0], corner[1]), (_WINDOW, _WINDOW))
    rows_of = lambda block: jnp.sum(jnp.where(blocks == block, 1 << _AXIS, 0), axis=1, dtype=jnp.int32)
    occupied = jnp.zeros(_WINDOW, jnp.int32)
    for i in range(CREATURES):
        occupied |= _cell(state.creatures.position[i] - corner, state.creatures.occupies[i])
    return _Window(
        grass=rows_of(Block.GRASS),
        path=rows_of(Block.PATH),
        free=~occupied,
        player=state.position - corner,
        corner=corner,
    )


def _bits_below(column: Int[Array, "..."]) -> Int[Array, "..."]:
    return (1 << column) - 1


def _cell(local: Position, now: Bool[Array, ""]) -> _Rows:
    """Returns a cell of the window, or none if it is outside, or unless `now` is True."""
    column = local[1]
    is_here = now & (local[0] == _AXIS) & (column >= 0) & (column < _WINDOW)
    return jnp.where(is_here, 1 << jnp.clip(column, 0, _WINDOW - 1), 0)


def _pick(cells: _Rows, number: Float[Array, ""]) -> tuple[Position, Bool[Array, ""]]:
    """Returns the row and column of one of some cells, which `number` chooses, and whether there is one."""
    counts = jax.lax.population_count(cells)
    until = jnp.cumsum(counts, dtype=jnp.int32)
    before, total = until - counts, until[-1]
    rank = jnp.ceil(total.astype(jnp.float32) * (1 - number)).astype(jnp.int32) - 1
    is_row = (before <= rank) & (rank < until)
    in_row = lambda numbers: jnp.sum(jnp.where(is_row, numbers, 0), dtype=jnp.int32)
    row, bits, others = in_row(_AXIS), in_row(cells), rank - in_row(before)
    column = jnp.zeros((), jnp.int32)
    for width in (16, 8, 4, 2, 1):  # finds the set bit with `others` set bits below
        below = jax.lax.population_count((bits >> column) & ((1 << width) - 1))
        skips = below <= others
        others -= jnp.where(skips, below, 0)
        column += jnp.where(skips, width, 0)
    return jnp.stack([row, column]), total > 0
