"""The player of Craftax-Classic: crafting, collecting, attacking, placing blocks, walking, and bodily needs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rollmill.envs.craftax_classic.blocks import (
    NEIGHBOURS,
    Block,
    Position,
    are_at,
    block_at,
    is_any,
    is_inside,
    is_solid,
    offset_towards,
)
from rollmill.envs.craftax_classic.creatures import can_stand, free_cell, is_occupied
from rollmill.envs.craftax_classic.state import (
    KINDS,
    MOST,
    PLANTS,
    Achievement,
    CraftaxState,
    InventoryItem,
    Move,
    first,
    first_of_kind,
    with_achievements,
)


class CraftingRecipe(NamedTuple):
    """How an item is crafted next to a crafting table."""

    move: Move
    item: InventoryItem
    cost: tuple[InventoryItem, ...]
    """One of each is used up."""
    needs_furnace: bool = False


RECIPES = [
    CraftingRecipe(Move.MAKE_WOOD_PICKAXE, InventoryItem.WOOD_PICKAXE, (InventoryItem.WOOD,)),
    CraftingRecipe(
        Move.MAKE_STONE_PICKAXE, InventoryItem.STONE_PICKAXE, (InventoryItem.WOOD, InventoryItem.STONE)
    ),
    CraftingRecipe(
        Move.MAKE_IRON_PICKAXE,
        InventoryItem.IRON_PICKAXE,
        (InventoryItem.WOOD, InventoryItem.STONE, InventoryItem.COAL, InventoryItem.IRON),
        needs_furnace=True,
    ),
    CraftingRecipe(Move.MAKE_WOOD_SWORD, InventoryItem.WOOD_SWORD, (InventoryItem.WOOD,)),
    CraftingRecipe(Move.MAKE_STONE_SWORD, InventoryItem.STONE_SWORD, (InventoryItem.WOOD, InventoryItem.STONE)),
    CraftingRecipe(
        Move.MAKE_IRON_SWORD,
        InventoryItem.IRON_SWORD,
        (InventoryItem.WOOD, InventoryItem.STONE, InventoryItem.COAL, InventoryItem.IRON),
        needs_furnace=True,
    ),
]


class Ore(NamedTuple):
    """A block that is collected, and leaves another block behind."""

    block: Block
    left: Block
    item: InventoryItem
    tool: InventoryItem | None
    achievement: Achievement


ORES = [
    Ore(Block.TREE, Block.GRASS, InventoryItem.WOOD, None, Achievement.COLLECT_WOOD),
    Ore(Block.STONE, Block.PATH, InventoryItem.STONE, InventoryItem.WOOD_PICKAXE, Achievement.COLLECT_STONE),
    Ore(Block.COAL, Block.PATH, InventoryItem.COAL, InventoryItem.WOOD_PICKAXE, Achievement.COLLECT_COAL),
    Ore(Block.IRON, Block.PATH, InventoryItem.IRON, InventoryItem.STONE_PICKAXE, Achievement.COLLECT_IRON),
    Ore(Block.DIAMOND, Block.PATH, InventoryItem.DIAMOND, InventoryItem.IRON_PICKAXE, Achievement.COLLECT_DIAMOND),
]

DAMAGES = {InventoryItem.WOOD_SWORD: 2, InventoryItem.STONE_SWORD: 3, InventoryItem.IRON_SWORD: 5}
"""Health that an attack with a sword takes from a creature. Without a sword, it takes 1."""

SAPLING_CHANCE = 0.1
"""Probability of finding a sapling in grass."""


def craft(state: CraftaxState, move: Int[Array, ""]) -> CraftaxState:
    """Crafts a tool, if the player stands next to a crafting table and has what it takes."""
    around = jnp.stack([_block_inside(state, offset) for offset in NEIGHBOURS])
    at_table, at_furnace = is_any(around == Block.CRAFTING_TABLE), is_any(around == Block.FURNACE)
    inventory, achieved = state.inventory, {}
    for recipe in RECIPES:
        affordable = ~is_any(state.inventory[np.array(recipe.cost)] < 1)
        crafts = (move == recipe.move) & affordable & at_table
        crafts &= at_furnace if recipe.needs_furnace else True
        inventory += _some(crafts, dict.fromkeys(recipe.cost, -1) | {recipe.item: 1})
        achieved[recipe.move.name.lower()] = crafts
    return with_achievements(replace(state, inventory=inventory), **achieved)


def _block_inside(state: CraftaxState, offset: tuple[int, int]) -> Int[Array, ""]:
    position = state.position + np.array(offset, np.int32)
    return jnp.where(is_inside(position), block_at(state.cells, position), Block.OUT_OF_BOUNDS)


def interact(
    state: CraftaxState, move: Int[Array, ""], target: Position, block: Int[Array, ""], sapling: Float[Array, ""]
) -> tuple[CraftaxState, Int[Array, ""]]:
    """Attacks the creature in front of the player, or collects, eats or drinks the block there.

    Args:
        state: the state.
        move: the player's action.
        target: the position in front of the player.
        block: the block there.
        sapling: random number that decides whether grass yields a sapling.

    Returns:
        The state, and the block that is left.
    """
    does = move == Move.DO
    state, attacked = _attack(state, target, does)
    reaches = does & is_inside(target) & ~attacked
    inventory, left, achieved = state.inventory, block, {}
    for ore in ORES:
        has_tool = True if ore.tool is None else state.inventory[ore.tool] > 0
        mines = reaches & (block == ore.block) & has_tool
        inventory += _some(mines, {ore.item: 1})
        left = jnp.where(mines, ore.left, left)
        achieved[ore.achievement.name.lower()] = mines
    finds = reaches & (block == Block.GRASS) & (sapling < SAPLING_CHANCE)
    drinks = reaches & (block == Block.WATER)
    eats = reaches & (block == Block.RIPE_PLANT)
    eaten = np.arange(PLANTS) == jnp.argmax(are_at(state.plants, target))
    state = replace(
        state,
        inventory=inventory + _some(finds, {InventoryItem.SAPLING: 1}),
        drink=jnp.where(drinks, jnp.minimum(MOST, state.drink + 1), state.drink),
        thirst=jnp.where(drinks, 0.0, state.thirst),
        food=jnp.where(eats, jnp.minimum(MOST, state.food + 4), state.food),
        hunger=jnp.where(eats, 0.0, state.hunger),
        plant_ages=jnp.where(eats & eaten, 0, state.plant_ages),
    )
    state = with_achievements(state, **achieved, collect_sapling=finds, collect_drink=drinks, eat_plant=eats)
    return state, jnp.where(eats, Block.PLANT, left)


def _some(now: Bool[Array, ""], items: Mapping[InventoryItem, int]) -> Int[Array, "12"]:
    """Returns numbers of items, or none unless `now` is True."""
    numbers = np.zeros(len(InventoryItem), np.int32)
    numbers[list(items)] = list(items.values())
    return now.astype(jnp.int32) * numbers


def _attack(state: CraftaxState, target: Position, does: Bool[Array, ""]) -> tuple[CraftaxState, Bool[Array, ""]]:
    """Attacks the creature at a position. Also returns whether there is one.

    As in Craftax, every creature with health comes to life, even one that had disappeared.
    """
    damage = jnp.ones((), jnp.int32)
    for sword, of_sword in DAMAGES.items():
        damage = jnp.maximum(damage, state.inventory[sword] * of_sword)
    creatures = state.creatures
    there = are_at(creatures.position, target) & creatures.alive
    hit = first_of_kind(there)
    health = creatures.health - damage * (does & hit).astype(jnp.int32)
    alive = jnp.where(does, health > 0, creatures.alive)
    killed = hit & ~alive
    zombie, cow, skeleton = (is_any(killed[indices.start : indices.stop]) for indices in KINDS.values())
    state = replace(
        state,
        creatures=replace(creatures, health=health, alive=alive),
        food=jnp.where(cow, jnp.minimum(MOST, state.food + 6), state.food),
        hunger=jnp.where(cow, 0.0, state.hunger),
    )
    state = free_cell(state, target, is_any(killed))
    state = with_achievements(state, defeat_zombie=zombie, eat_cow=cow, defeat_skeleton=skeleton)
    return state, is_any(there)


def place(
    state: CraftaxState, move: Int[Array, ""], target: Position, block: Int[Array, ""]
) -> tuple[CraftaxState, Int[Array, ""]]:
    """Places a crafting table, a furnace, a stone or a sapling in front of the player.

    Args:
        state: the state.
        move: the player's action.
        target: the position in front of the player.
        block: the block there.

    Returns:
        The state, and the block that is there then.
    """
    has, free, inside = state.inventory, ~is_solid(block), is_inside(target) & ~is_occupied(state, target)
    table = inside & (move == Move.PLACE_TABLE) & free & (has[InventoryItem.WOOD] >= 2)
    furnace = inside & (move == Move.PLACE_FURNACE) & free & (has[InventoryItem.STONE] > 0)
    stone = inside & (move == Move.PLACE_STONE) & (free | (block == Block.WATER)) & (has[InventoryItem.STONE] > 0)
    plant = inside & (move == Move.PLACE_PLANT) & (block == Block.GRASS) & (has[InventoryItem.SAPLING] > 0)
    slot = first(plant & ~state.planted)
    state = replace(
        state,
        inventory=state.inventory
        - _some(table, {InventoryItem.WOOD: 2})
        - _some(furnace | stone, {InventoryItem.STONE: 1})
        - _some(plant, {InventoryItem.SAPLING: 1}),
        plants=jnp.where(slot[:, None], target[None, :], state.plants),
        plant_ages=jnp.where(slot, 0, state.plant_ages),
        planted=state.planted | slot,
    )
    placing = {Block.CRAFTING_TABLE: table, Block.FURNACE: furnace, Block.STONE: stone, Block.PLANT: plant}
    for placed, now in placing.items():
        block = jnp.where(now, placed, block)
    state = with_achievements(
        state, place_table=table, place_furnace=furnace, place_stone=stone, place_plant=plant
    )
    return state, block


def walk(state: CraftaxState, move: Int[Array, ""]) -> CraftaxState:
    """Turns the player, and walks one step if the cell is free. Lava counts as free."""
    turns = (move >= Move.LEFT) & (move <= Move.DOWN)
    target = state.position + offset_towards(move)
    moves = can_stand(state, target) | (block_at(state.cells, target) == Block.LAVA)
    return replace(
        state,
        position=jnp.where(moves, target, state.position),
        facing=jnp.where(turns, move, state.facing),
    )


def live(state: CraftaxState, move: Int[Array, ""]) -> CraftaxState:
    """Updates sleep, hunger, thirst, fatigue and health by one step."""
    asleep = state.asleep | ((move == Move.SLEEP) & (state.energy < MOST))
    wakes = asleep & (state.energy >= MOST)
    asleep &= ~wakes
    state = with_achievements(state, wake_up=wakes)
    effort = jnp.where(asleep, 0.5, 1.0)
    hunger, thirst = state.hunger + effort, state.thirst + effort
    food = jnp.where(hunger > 25, jnp.maximum(state.food - 1, 0), state.food)
    drink = jnp.where(thirst > 20, jnp.maximum(state.drink - 1, 0), state.drink)
    fatigue = jnp.where(asleep, jnp.minimum(state.fatigue - 1, 0.0), state.fatigue + 1)
    energy = jnp.where(fatigue > 30, jnp.maximum(state.energy - 1, 0), state.energy)
    energy = jnp.where(fatigue < -10, jnp.minimum(state.energy + 1, MOST), energy)
    well = (food > 0) & (drink > 0) & ((energy > 0) | asleep)
    gained = jnp.where(well, jnp.where(asleep, 2.0, 1.0), jnp.where(asleep, -0.5, -1.0))
    recovery = state.recovery + gained
    health = jnp.where(recovery > 25, jnp.minimum(state.health + 1, MOST), state.health)
    health = jnp.where(recovery < -15, state.health - 1, health)
    return replace(
        state,
        asleep=asleep,
        hunger=jnp.where(hunger > 25, 0.0, hunger),
        thirst=jnp.where(thirst > 20, 0.0, thirst),
        food=food,
        drink=drink,
        energy=energy,
        fatigue=jnp.where((fatigue > 30) | (fatigue < -10), 0.0, fatigue),
        recovery=jnp.where((recovery > 25) | (recovery < -15), 0.0, recovery),
        health=health,
    )
