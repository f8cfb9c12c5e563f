"""Means over a mesh are the same in every way, and the fastest way is found in all processes alike."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rollmill.channels import LocalBroker, MemoryWire
from rollmill.execution.program.reductions import AXES, HostMean, fastest, mean_over, mesh_of, time_reductions


def tree_of(instance, gpu):
    """Leaves whose sizes no number of instances divides, of two dtypes."""
    number = 10 * instance + gpu
    return {
        "kernel": jnp.arange(15.0).reshape(3, 5) * (1 + number),
        "scale": jnp.float32(number),
        "narrow": jnp.full(7, number, jnp.bfloat16),
    }


class Grid:
    """A mesh of two instances on each of three GPUs, whose axes `vmap` stands in for."""

    size, devices = 6, np.zeros((2, 3))


def test_hierarchical_means_are_means_over_all():
    numbers = [[tree_of(instance, gpu) for gpu in range(3)] for instance in range(2)]
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves).reshape(2, 3, *leaves[0].shape), *sum(numbers, start=[])
    )
    over_both = lambda mean: jax.vmap(jax.vmap(mean, axis_name="gpu"), axis_name="instance")(stacked)
    by_parts, flat = (
        over_both(mean_over(Grid, "hierarchical").reduce()),
        over_both(mean_over(Grid, "flat").reduce()),
    )
    for found, expected, original in zip(*map(jax.tree.leaves, (by_parts, flat, stacked)), strict=True):
        assert found.shape == original.shape and found.dtype == original.dtype
        np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=1e-2 if found.ndim == 3 else 1e-6)


def test_one_device_has_nothing_to_reduce():
    tree = tree_of(0, 0)
    assert mean_over(mesh_of(jax.devices()[:1]), "hierarchical").reduce()(tree) is tree


def test_means_by_the_host_are_the_same_in_all_processes():
    """Two threads stand in for two processes, each with a program of its own."""
    broker, found, grid = LocalBroker(), {}, Grid()
    grid.size = 2
    # Of one dtype: without a GPU's order of calls, those for two vectors might wait for each other.
    tree = lambda rank: {"kernel": jnp.arange(15.0).reshape(3, 5) * rank, "bias": jnp.float32([rank, 1, -rank])}

    def compute(rank):
        mean = mean_over(grid, "host", HostMean(MemoryWire(broker), rank=rank, size=2))
        program = jax.jit(mean.reduce())
        operand = jax.device_put(tree(1 + rank), jax.devices()[rank])
        found[rank] = [jax.tree.map(np.asarray, program(operand)) for _ in range(2)]

    threads = [threading.Thread(target=compute, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for mean in found[0] + found[1]:
        jax.tree.map(np.testing.assert_array_equal, mean, jax.tree.map(np.asarray, tree(1.5)))


@pytest.mark.parametrize("instances", [1, 2])
def test_the_fastest_way_is_chosen_from_times_that_all_processes_share(instances):
    mesh = mesh_of(jax.devices()[:2], instances=instances)
    assert dict(mesh.shape) == {"instance": instances, "gpu": 2 // instances}
    seconds = time_reductions(mesh, 1000, {way: mean_over(mesh, way) for way in ("flat", "hierarchical")})
    assert set(seconds) == {"flat", "hierarchical"} and min(seconds.values()) > 0
    assert seconds[fastest(seconds)] == min(seconds.values())


@pytest.mark.parametrize("way", ["flat", "hierarchical"])
def test_programs_of_a_mesh_take_means_so(way):
    mesh = mesh_of(jax.devices()[:2], instances=2)
    spec = PartitionSpec(AXES)
    program = jax.jit(
        jax.shard_map(mean_over(mesh, way).reduce(), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    assert program(jnp.float32([[1, 2, 3], [3, 4, 5]])).tolist() == [[2, 3, 4], [2, 3, 4]]
