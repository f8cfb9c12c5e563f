"""Means over a mesh are the same in every way, and the fastest way is found in all processes alike."""

import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.shm.wire import MemoryWire
from rollmill.programs import one_shot, reductions
from rollmill.programs.meshes import AXES, mesh_of
from rollmill.programs.reductions import (
    MAX_ONE_SHOT,
    MeshAllReduce,
    algorithms_for,
    fastest,
    means_in_a_row,
    mesh_all_reduce,
    time_reductions,
)
from rollmill.workers.replica.mesh import HostMean
from wordings import raises


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
        over_both(mesh_all_reduce(Grid, "hierarchical").reduce()),
        over_both(mesh_all_reduce(Grid, "flat").reduce()),
    )
    for found, expected, original in zip(*map(jax.tree.leaves, (by_parts, flat, stacked)), strict=True):
        assert found.shape == original.shape and found.dtype == original.dtype
        np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=1e-2 if found.ndim == 3 else 1e-6)


def test_one_device_has_nothing_to_reduce():
    tree = tree_of(0, 0)
    assert mesh_all_reduce(mesh_of(jax.devices()[:1]), "hierarchical").reduce()(tree) is tree


def test_means_by_the_host_are_the_same_in_all_processes():
    """Two threads stand in for two processes, each with a program of its own."""
    broker, found, grid = LocalBroker(), {}, Grid()
    grid.size = 2
    # Of one dtype: without a GPU's order of calls, those for two vectors might wait for each other.
    tree = lambda rank: {"kernel": jnp.arange(15.0).reshape(3, 5) * rank, "bias": jnp.float32([rank, 1, -rank])}

    def compute(rank):
        mean = mesh_all_reduce(grid, "host", HostMean(MemoryWire(broker), rank=rank, size=2))
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
    seconds = time_reductions(mesh, 1000, {way: mesh_all_reduce(mesh, way) for way in ("flat", "hierarchical")})
    assert set(seconds) == {"flat", "hierarchical"} and min(seconds.values()) > 0
    assert seconds[fastest(seconds)] == min(seconds.values())


def test_what_is_timed_depends_on_who_shares_a_gpu_and_on_the_parameters():
    alone, sharing = mesh_of(jax.devices()[:2]), mesh_of(jax.devices()[:2], instances=2)
    assert list(algorithms_for(alone, 9000)) == ["flat", "one-shot"]
    assert list(algorithms_for(alone, MAX_ONE_SHOT + 1)) == ["flat"]
    assert list(algorithms_for(mesh_of(jax.devices()[:1]), 9000)) == ["flat"]
    assert list(algorithms_for(sharing, 9000)) == ["flat", "host"]


def test_one_shot_means_are_for_gpus():
    with raises("one-shot-all-reduce-needs"):
        mesh_all_reduce(mesh_of(jax.devices()[:2]), "one-shot")


def test_a_program_passes_each_device_its_row_of_a_mean_s_operands():
    mesh = mesh_of(jax.devices()[:2])
    rows = jax.device_put(np.float32([[1], [3]]), jax.NamedSharding(mesh, PartitionSpec(AXES)))
    weighted = MeshAllReduce(lambda row: lambda tree: jax.lax.psum(row[0, 0] * tree, AXES), (rows,))
    numbers = np.float32([[1, 2], [0, 2]])
    found = means_in_a_row(mesh, weighted, numbers)()
    carry = np.float64(numbers)
    for _ in range(reductions.TIMED_REDUCTIONS):
        # Weights are 1 and 3; to the rows their ranks are added, less the mean of ranks.
        carry = np.broadcast_to(np.float64([1, 3]) @ (carry + np.float64([[-0.5], [0.5]])), (2, 2))
    np.testing.assert_allclose(found, carry[0], rtol=1e-5)


def test_a_way_whose_means_are_wrong_is_never_the_fastest():
    mesh = mesh_of(jax.devices()[:2])
    nothing = MeshAllReduce(lambda: lambda tree: tree)
    seconds = time_reductions(mesh, 100, {"flat": mesh_all_reduce(mesh), "one-shot": nothing})
    assert fastest(seconds) == "flat" and seconds["one-shot"] == float("inf")


def test_one_shot_means_of_a_program_have_lanes_of_their_own_until_there_are_none(monkeypatch):
    lanes = []

    def recorded(vector, addresses, *, ranks, first_lane):
        lanes.append((first_lane, vector.size))
        assert ranks == 2 and addresses.shape == (5,)
        return jax.lax.pmean(vector, AXES)

    monkeypatch.setattr(one_shot, "one_shot_mean", recorded)
    mesh = mesh_of(jax.devices()[:2])
    means = partial(one_shot._OneShotMeans, 2, 6)
    trees = [np.ones(3000, np.float32), {"a": np.ones(10, np.float32), "b": np.ones(4, np.int32)}]
    trees += [np.ones(5000, np.float32), np.ones(1, np.float32)]

    def program(addresses):
        reduce = means(addresses)
        return [reduce(tree) for tree in trees]

    spec = PartitionSpec(AXES)
    found = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False))(
        np.zeros((2, 5), np.uint32)
    )
    jax.tree.map(lambda mean, tree: np.testing.assert_array_equal(mean, tree), found, trees)
    assert lanes == [(0, 3000), (3, 10)]  # the rest is flat: integers, and what finds no lane any more


def test_one_shot_means_of_several_vectors_are_one_mean(monkeypatch):
    sizes = []

    def recorded(vector, addresses, *, ranks, first_lane):
        sizes.append(vector.size)
        return jax.lax.pmean(vector, AXES)

    monkeypatch.setattr(one_shot, "one_shot_mean", recorded)
    mesh = mesh_of(jax.devices()[:2])
    means = partial(one_shot._OneShotMeans, 2, 60)
    rows = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

    def program(rows, addresses):
        return jax.vmap(jax.vmap(means(addresses)))(rows)

    spec = PartitionSpec(AXES)
    on_each = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    found = jax.jit(on_each)(rows.reshape(2, 3, 4), np.zeros((2, 5), np.uint32))
    np.testing.assert_array_equal(found[0], rows.mean(axis=0))
    assert sizes[-1] == 12  # all numbers of a device at once


def test_one_shot_means_in_a_loop_are_vectorised(monkeypatch):
    monkeypatch.setattr(
        one_shot, "one_shot_mean", lambda vector, addresses, *, ranks, first_lane: jax.lax.pmean(vector, AXES)
    )
    mesh = mesh_of(jax.devices()[:2])
    rows = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

    def program(rows, addresses):
        mean = one_shot._OneShotMeans(2, 60, addresses)
        return jax.vmap(lambda row: jax.lax.scan(lambda carry, _: (mean(carry), None), row, None, length=3)[0])(
            rows
        )

    spec = PartitionSpec(AXES)
    on_each = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    found = jax.jit(on_each)(rows.reshape(6, 4), np.zeros((2, 5), np.uint32))
    np.testing.assert_array_equal(found, rows.mean(axis=0))


@pytest.mark.parametrize("way", ["flat", "hierarchical"])
def test_programs_of_a_mesh_take_means_so(way):
    mesh = mesh_of(jax.devices()[:2], instances=2)
    spec = PartitionSpec(AXES)
    program = jax.jit(
        jax.shard_map(
            mesh_all_reduce(mesh, way).reduce(), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )
    assert program(jnp.float32([[1, 2, 3], [3, 4, 5]])).tolist() == [[2, 3, 4], [2, 3, 4]]
