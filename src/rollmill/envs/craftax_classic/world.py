"""Generates the worlds of Craftax-Classic from gradient noise (Perlin, "An image synthesizer", 1985)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rollmill.core.types import Key
from rollmill.envs.craftax_classic.blocks import SIZE, Block, Cells

START = (SIZE // 2, SIZE // 2)
"""Position of the player at the start of an episode."""

_Grid = Float[Array, "64 64"]


def generate(key: Key, *, always_diamond: bool) -> Cells:
    """Generates the map of a world, which has at least one diamond if `always_diamond` is set.

    With the same key, it equals the map of Craftax 1.6, except for rounding.
    """
    key, water_key = jax.random.split(key)
    near = jnp.asarray(_closeness())
    water = _noise(water_key, (4, 4)) + near - 1.0
    key, _ = jax.random.split(key)
    key, mountain_key = jax.random.split(key)
    mountain = _noise(mountain_key, (4, 4)) + 0.05 + near - 1.0
    key, tunnel_key = jax.random.split(key)
    tunnel = _noise(tunnel_key, (8, 32)) > 0.8
    key, _ = jax.random.split(key)
    rocks = mountain > 0.7

    cells = jnp.where(water > 0.7, Block.WATER, jnp.where((water > 0.6) & (water < 0.75), Block.SAND, Block.GRASS))
    cells = jnp.where(rocks, Block.STONE, cells)
    cells = jnp.where(rocks & (tunnel | tunnel.T), Block.PATH, cells)
    cells = jnp.where((mountain > 0.85) & (water > 0.4), Block.PATH, cells)
    for block, share, depth in ((Block.COAL, 0.04, 0.7), (Block.IRON, 0.03, 0.7), (Block.DIAMOND, 0.005, 0.8)):
        key, ore_key = jax.random.split(key)
        found = (cells == Block.STONE) & (mountain > depth) & (_uniform(ore_key) < share)
        cells = jnp.where(found, block, cells)
    key, tree_key = jax.random.split(key)
    growth = _noise(tree_key, (16, 16))
    trees = (cells == Block.GRASS) & (growth > 0.5) & (_uniform(key) > 0.8)
    cells = jnp.where(trees, Block.TREE, cells)
    cells = jnp.where((mountain > 0.85) & (growth > 0.7), Block.LAVA, cells)
    cells = cells.at[START].set(Block.GRASS)
    if always_diamond:
        key, diamond_key = jax.random.split(key)
        cells = jnp.where(_pick(diamond_key, cells == Block.STONE), Block.DIAMOND, cells)
    return cells.astype(jnp.uint8)


def _uniform(key: Key) -> _Grid:
    return jax.random.uniform(key, (SIZE, SIZE))


def _closeness() -> Float[np.ndarray, "64 64"]:
    """Returns 0 at the player's start, and 1 at a distance of five cells and beyond."""
    index = np.arange(SIZE)
    far = np.abs(index - START[0])[:, None] + np.abs(index - START[1])[None, :]
    return np.clip(far.astype(np.float32) / np.float32(5.0), 0.0, 1.0)


def _noise(key: Key, corners: tuple[int, int]) -> _Grid:
    """Returns gradient noise between 0 and 1. `corners` is the number of gradients along each axis, minus 1."""
    _, key = jax.random.split(key)
    _, key = jax.random.split(key)
    rows, columns = corners
    angles = 2 * jnp.pi * jax.random.uniform(key, (rows + 1, columns + 1))
    # Without barriers, XLA computes gradients and noise again for each of their uses.
    down, across = jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))
    heights, widths = SIZE // rows, SIZE // columns
    y = (np.arange(heights, dtype=np.float32) / heights)[None, :, None, None]
    x = (np.arange(widths, dtype=np.float32) / widths)[None, None, None, :]

    def ramp(below: int, right: int) -> Float[Array, "rows heights columns widths"]:
        corner = lambda part: part[below : rows + below, None, right : columns + right, None]
        return corner(down) * (y - below) + corner(across) * (x - right)

    fade = lambda t: t * t * t * (t * (t * 6 - 15) + 10)
    left = ramp(0, 0) * (1 - fade(y)) + fade(y) * ramp(1, 0)
    right = ramp(0, 1) * (1 - fade(y)) + fade(y) * ramp(1, 1)
    blended = math.sqrt(2) * ((1 - fade(x)) * left + fade(x) * right)
    noise = jax.lax.optimization_barrier(blended.reshape(SIZE, SIZE))
    return (noise - jnp.min(noise)) / (jnp.max(noise) - jnp.min(noise))


def _pick(key: Key, cells: Bool[Array, "64 64"]) -> Bool[Array, "64 64"]:
    """Draws one of the True cells. Returns a grid in which it alone is True."""
    order = jnp.cumsum(cells.reshape(-1), dtype=jnp.int32).reshape(cells.shape)
    count = jnp.sum(cells, dtype=jnp.int32)
    rank = jnp.ceil(count.astype(jnp.float32) * (1 - jax.random.uniform(key)))
    return cells & (order == rank.astype(jnp.int32))
