"""Meshes of devices with two axes, the GPUs and the instances of a GPU, and arrays and functions on them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, PyTree

from rollmill.dataflow import Reduce

AXES = ("instance", "gpu")
"""Names of the two axes of a mesh."""


def mesh_of(devices: Sequence[Any], *, instances: int = 1) -> Mesh:
    """Creates a mesh from devices, ordered as the first instance of each GPU, then the second instances, and so
    on.
    """
    return Mesh(np.asarray(devices).reshape(instances, -1), AXES)


def on_each(mesh: Mesh, function: Callable[..., Array], num_operands: int = 0) -> Callable[..., Array]:
    """Maps a function over the devices of a mesh. Its result is replicated.

    Its first argument is a vector that is replicated, and `num_operands` further arrays have one row per device.
    """
    whole, row = PartitionSpec(), PartitionSpec(AXES)
    specs = (whole, *[row] * num_operands)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)


def on_own_devices(mesh: Mesh, rows: Float[np.ndarray, "devices N"]) -> Array:
    """Places one row on each of this process's devices, and returns an array that counts as replicated."""
    everywhere = jax.sharding.NamedSharding(mesh, PartitionSpec())
    own = [
        jax.device_put(row, device)
        for row, device in zip(rows, mesh.devices.flat, strict=True)
        if device.process_index == jax.process_index()
    ]
    return jax.make_array_from_single_device_arrays(rows.shape[1:], everywhere, own)


def over_vectors(mean: Reduce, tree: PyTree[Array]) -> PyTree[Array]:
    """Computes the mean of a tree with `mean`. All arrays of one dtype are reduced together, as one vector."""
    leaves, structure = jax.tree.flatten(tree)
    by_dtype: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        by_dtype.setdefault(jnp.result_type(leaf), []).append(place)
    for places in by_dtype.values():
        vector, restore = ravel_pytree([leaves[place] for place in places])
        for place, leaf in zip(places, restore(mean(vector)), strict=True):
            leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)
