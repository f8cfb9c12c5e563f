"""State, parameters and random draws of Craftax-Classic."""

from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rollmill.core.types import Key
from rollmill.envs.craftax_classic.blocks import Cells, Position, is_any
from rollmill.envs.physics import Scalar

KINDS = {"zombies": range(3), "cows": range(3, 6), "skeletons": range(6, 8)}
"""Kinds of creatures, and their indices in the arrays of all creatures."""

CREATURES, ARROWS, PLANTS = 8, 3, 10
"""Maximum numbers of creatures, flying arrows and growing plants."""

_KIND = np.array([kind for kind, indices in enumerate(KINDS.values()) for _ in indices])
# _EARLIER[i, j] says whether creature j is of the same kind as creature i, and comes before it.
_EARLIER = (_KIND[:, None] == _KIND) & (np.arange(CREATURES)[:, None] > np.arange(CREATURES))

MOST = 9
"""Maximum of health, food, drink and energy, and of each item in the inventory."""


Count: TypeAlias = Int[Array, "..."] | int
"""An integer constant: an int, or an int32 array `[]`, or `[E]` with one value for each environment."""


class InventoryItem(IntEnum):
    """Index of an item in the inventory."""

    WOOD = 0
    STONE = 1
    COAL = 2
    IRON = 3
    DIAMOND = 4
    SAPLING = 5
    WOOD_PICKAXE = 6
    STONE_PICKAXE = 7
    IRON_PICKAXE = 8
    WOOD_SWORD = 9
    STONE_SWORD = 10
    IRON_SWORD = 11


class Move(IntEnum):
    """The player's actions. 1 to 4 are also the directions that the player and creatures face."""

    NOOP = 0
    LEFT = 1
    RIGHT = 2
    UP = 3
    DOWN = 4
    DO = 5
    SLEEP = 6
    PLACE_STONE = 7
    PLACE_TABLE = 8
    PLACE_FURNACE = 9
    PLACE_PLANT = 10
    MAKE_WOOD_PICKAXE = 11
    MAKE_STONE_PICKAXE = 12
    MAKE_IRON_PICKAXE = 13
    MAKE_WOOD_SWORD = 14
    MAKE_STONE_SWORD = 15
    MAKE_IRON_SWORD = 16


class Achievement(IntEnum):
    """Index of an achievement. Each is rewarded once in an episode."""

    COLLECT_WOOD = 0
    PLACE_TABLE = 1
    EAT_COW = 2
    COLLECT_SAPLING = 3
    COLLECT_DRINK = 4
    MAKE_WOOD_PICKAXE = 5
    MAKE_WOOD_SWORD = 6
    PLACE_PLANT = 7
    DEFEAT_ZOMBIE = 8
    COLLECT_STONE = 9
    PLACE_STONE = 10
    EAT_PLANT = 11
    DEFEAT_SKELETON = 12
    MAKE_STONE_PICKAXE = 13
    MAKE_STONE_SWORD = 14
    WAKE_UP = 15
    PLACE_FURNACE = 16
    COLLECT_COAL = 17
    COLLECT_IRON = 18
    COLLECT_DIAMOND = 19
    MAKE_IRON_PICKAXE = 20
    MAKE_IRON_SWORD = 21


class CraftaxParams(eqx.Module):
    """Numbers of Craftax-Classic. Each field may hold one value for each environment."""

    day_length: Scalar = 300.0
    """Length of a day, in steps."""
    zombie_health: Count = 5
    cow_health: Count = 3
    skeleton_health: Count = 3
    spawn_cow_chance: Scalar = 0.1
    """Probability that a cow appears in a step."""
    spawn_zombie_base_chance: Scalar = 0.02
    spawn_zombie_night_chance: Scalar = 0.1
    """Added to the base chance in the dark, times the square of the darkness."""
    spawn_skeleton_chance: Scalar = 0.05


class Creatures(eqx.Module):
    """Zombies, cows and skeletons.

    The place of a creature that is not alive is free for the next one of its kind. Until then, it keeps moving
    unseen, as in Craftax.
    """

    position: Int[Array, "8 2"]
    health: Int[Array, "8"]
    alive: Bool[Array, "8"]
    cooldown: Int[Array, "8"]
    """Steps until the next attack."""
    occupies: Bool[Array, "8"]
    """Whether it occupies its cell. A creature that has just come back to life does not yet."""


class Arrows(eqx.Module):
    """Arrows of skeletons. An arrow that has hit something does not fly, and its place is free."""

    position: Int[Array, "3 2"]
    offset: Int[Array, "3 2"]
    """Change of the position in a step."""
    flies: Bool[Array, "3"]


class CraftaxState(eqx.Module):
    """The state of Craftax-Classic."""

    cells: Cells
    position: Position
    facing: Int[Array, ""]
    """Direction of the player, 1 to 4."""
    health: Int[Array, ""]
    food: Int[Array, ""]
    drink: Int[Array, ""]
    energy: Int[Array, ""]
    asleep: Bool[Array, ""]
    recovery: Float[Array, ""]
    hunger: Float[Array, ""]
    thirst: Float[Array, ""]
    fatigue: Float[Array, ""]
    inventory: Int[Array, "12"]
    creatures: Creatures
    arrows: Arrows
    plants: Int[Array, "10 2"]
    """Positions of growing plants."""
    plant_ages: Int[Array, "10"]
    planted: Bool[Array, "10"]
    achievements: Bool[Array, "22"]
    time: Int[Array, ""]


class Draws(NamedTuple):
    """Random numbers of a step, uniform in [0, 1)."""

    sapling: Float[Array, ""]
    directions: Float[Array, "8"]
    """Where creatures go, unless they look for the player."""
    axes: Float[Array, "8"]
    """Along which axis creatures look for the player, if both are equally far."""
    zombie_chases: Float[Array, "3"]
    skeleton_chases: Float[Array, "2"]
    appearances: Float[Array, "3"]
    """Whether a cow, a zombie and a skeleton appear."""
    places: Float[Array, "3"]
    """Where they appear."""


def draw(key: Key) -> Draws:
    """Draws the random numbers of a step."""
    numbers = jax.random.uniform(key, (25,))
    return Draws(
        sapling=numbers[0],
        directions=jnp.concatenate([numbers[1:4], numbers[10:15]]),
        axes=jnp.concatenate([numbers[4:7], jnp.zeros(3, jnp.float32), numbers[15:17]]),  # cows look for nobody
        zombie_chases=numbers[7:10],
        skeleton_chases=numbers[17:19],
        appearances=numbers[19:22],
        places=numbers[22:25],
    )


def with_achievements(state: CraftaxState, **achieved: Bool[Array, ""]) -> CraftaxState:
    """Returns the state in which the achievements that are True are achieved, too."""
    achievements, index = state.achievements, np.arange(len(Achievement))
    for name, now in achieved.items():
        achievements |= now & (index == Achievement[name.upper()])
    return replace(state, achievements=achievements)


def first_of_kind(flags: Bool[Array, "8"]) -> Bool[Array, "8"]:
    """Keeps the first True flag of each kind of creatures."""
    return flags & ~is_any(flags[:, None] & _EARLIER.T)


def first(flags: Bool[Array, " N"]) -> Bool[Array, " N"]:
    """Keeps the first True flag."""
    index = np.arange(flags.size)
    return flags & ~is_any(flags[:, None] & (index[:, None] < index))


def light_at(time: Int[Array, ""], params: CraftaxParams) -> Float[Array, ""]:
    """Returns the brightness of a step, from 0 at night to 1."""
    progress = (time.astype(jnp.float32) / params.day_length) % 1 + 0.3
    return 1 - jnp.abs(jnp.cos(jnp.pi * progress)) ** 3
