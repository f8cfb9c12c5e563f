"""Snapshots: every part of the training state has an owner, and a part that its owner does not send is missed."""

import functools

import jax
import numpy as np
import pytest

import rollmill
from rollmill.core.errors import CheckpointError
from rollmill.dataflow import OwnedPart, graph_roles, replica_environments
from rollmill.planning.distribution import find_distribution, list_distributions
from rollmill.planning.placement import Counts
from rollmill.programs.memory_needs import ReplaySize, check_message_size
from rollmill.programs.states import state_shapes
from rollmill.record.leaves import to_host
from rollmill.workers.coordination import snapshots
from rollmill.workers.replica.snapshots import StatePart, assemble
from wordings import raises

ENVS, ITERATION = 4, 7
REPLICAS = {"workers": 2, "actors": 2, "learners": 2}


@functools.cache
def graph():
    """Has every part of a training state: prioritised replay, statistics, environments with action masks."""
    return rollmill.dqn(
        rollmill.make("CartPole-v1"),
        num_envs=ENVS,
        num_steps=4,
        total_timesteps=1024,
        buffer_size=64,
        learning_starts=64,
        batch_size=8,
        gradient_steps=1,
        num_shards=ENVS,
        priority_exponent=0.6,
        network=rollmill.NetworkConfig(hidden_sizes=(2,)),
    )


@functools.cache
def filled():
    """A blank state, and one in which no leaf is blank: every number is 3, but the root key and the iteration."""
    blank = jax.tree.map(_zeros, state_shapes(graph()))
    whole = {name: array + np.asarray(3, array.dtype) for name, array in to_host(blank).items()}
    return blank, {**whole, "key": to_host(blank)["key"], "iteration": np.int32(ITERATION)}


def _zeros(shape):
    return (
        jax.random.key(0)
        if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key)
        else np.zeros(shape.shape, shape.dtype)
    )


def kind_of(name):
    """The owned part that a leaf is of."""
    room, _, rest = name.partition(".")
    if room == "collector":
        return OwnedPart.ENVIRONMENTS if rest.startswith("environment") else OwnedPart.POLICY_INPUTS
    return {"rings": OwnedPart.REPLAY, "learner": OwnedPart.PARAMETERS}.get(room)


def parts_of(policy):
    """What the replicas of a distribution policy send, by the roles that they have."""
    read = {name: REPLICAS[name] for name in REPLICAS}
    partition = find_distribution(policy)(Counts(**read))
    roles, (_, whole) = graph_roles(graph(), partition), filled()
    parts = []
    for group, replica in partition.replicas:
        role, index = roles[group.name], replica_environments(ENVS, group.replicas, replica)
        mine = {}
        for name, array in whole.items():
            kind = kind_of(name)
            if (
                kind is OwnedPart.PARAMETERS
                and role.owned_parts & {OwnedPart.PARAMETERS, OwnedPart.STATISTICS}
                and replica == 0
            ):
                mine[name] = array
            elif kind in role.owned_parts and kind is not OwnedPart.PARAMETERS:
                mine[name] = array[index.start : index.stop]
        parts.append(StatePart(index.start, mine, f"{group.name}/{replica}", role.owned_parts))
    return parts


@pytest.mark.parametrize("policy", list_distributions())
def test_a_state_is_whole_only_with_every_leaf_of_every_owner(policy):
    blank, whole = filled()
    parts = [part for part in parts_of(policy) if part.owned_parts]
    state = to_host(assemble(blank, ITERATION, parts))
    assert state.keys() == whole.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(array, whole[name], err_msg=name)
    dropped = set()
    for n, part in enumerate(parts):
        for name in part.arrays:
            others = {other: array for other, array in part.arrays.items() if other != name}
            rest = [*parts[:n], *parts[n + 1 :]]
            if kind_of(name) is OwnedPart.PARAMETERS and any(name in other.arrays for other in rest):
                continue  # a leaf of the learner that two groups hold alike
            with pytest.raises(CheckpointError) as caught:
                assemble(blank, ITERATION, [*rest, part._replace(arrays=others)])
            assert part.replica in str(caught.value) and f"({name})" in str(caught.value)
            dropped.add(kind_of(name))
    assert dropped >= {OwnedPart.ENVIRONMENTS, OwnedPart.POLICY_INPUTS, OwnedPart.REPLAY}


def test_a_memory_that_nobody_owns_is_missed():
    """The defect that this guards against: the rings came from the blank state, and training went on without."""
    blank, _ = filled()
    parts = [
        part._replace(
            arrays={name: array for name, array in part.arrays.items() if kind_of(name) is not OwnedPart.REPLAY},
            owned_parts=part.owned_parts - {OwnedPart.REPLAY},
        )
        for part in parts_of("gpu-only")
    ]
    with raises("state-after-iteration-cannot-be", "all/0 and all/1 sent no replay memory (rings."):
        assemble(blank, ITERATION, parts)


def test_a_part_of_another_size_or_name_is_refused():
    blank, _ = filled()
    first, *rest = parts_of("gpu-only")
    wide = {**first.arrays, "rings.steps": np.zeros(3, np.int32)}
    with raises("state-after-iteration-cannot-be", "rings.steps is [5], expected [4]"):  # 3 + the other's 2
        assemble(blank, ITERATION, [first._replace(arrays=wide), *rest])
    more = {**first.arrays, "rings.warp": np.zeros(2, np.int32)}
    with raises("state-after-iteration-cannot-be", "all/0 sent rings.warp, which does not belong to it"):
        assemble(blank, ITERATION, [first._replace(arrays=more), *rest])


def test_environments_begin_anew_where_nobody_owns_them():
    """Asynchronous actors keep none: their leaves are those of the blank state, all 0."""
    blank, whole = filled()
    roles = graph_roles(graph(), find_distribution("single-learner-coarse")(Counts(actors=2, asynchronous=True)))
    mine = {name: array for name, array in whole.items() if name.startswith(("learner.", "rings."))}
    state = to_host(assemble(blank, ITERATION, [StatePart(0, mine, "learner/0", roles["learner"].owned_parts)]))
    assert np.all(state["collector.observation"] == 0) and np.all(state["rings.views.words"] == 3)


@pytest.mark.parametrize(
    ("place", "replicas", "fits"),
    [
        ("program", 1, None),
        ("threads", 2, None),
        ("processes", 2, 7_680_000),
        ("processes", 4, None),
        ("mesh", 4, 3_840_000),
    ],
)
def test_a_memory_that_workers_cannot_send_is_refused(place, replicas, fits):
    """Of its 4 GiB a message keeps 0.25 for the rest: 3.75 GiB are 3,840,000 steps of 1,048.576 bytes each."""
    size = ReplaySize(steps=10_000_000, total=10_000_000 * 1024 * 1024 // 1000)
    if fits is None:
        check_message_size(size, place=place, replicas=replicas)
        return
    with raises("replay-memory-steps-takes-and", place, fits):
        check_message_size(size, place=place, replicas=replicas)


def test_reports_in_bursts_do_not_look_like_a_fast_training(monkeypatch):
    """An iteration takes 0.1 s, or 1 s. Then no report is read for a while, and all of them at once."""
    clock = [100.0]
    monkeypatch.setattr(snapshots.time, "monotonic", lambda: clock[0])
    for seconds in (0.1, 1.0):
        pace = snapshots.Pace(0)
        clock[0] += 60  # the workers start
        for number in range(60):
            pace.advance(number, 1)
            clock[0] += seconds
        steady = pace.ahead(mesh=False) - pace.iteration
        clock[0] += 50 * seconds
        for number in range(60, 110):
            pace.advance(number, 1)
        assert steady == 2 + int(0.5 / seconds)
        assert pace.ahead(mesh=False) - pace.iteration <= steady + 1
        pace.begin_again(80)
        clock[0] += 60
        pace.advance(81, 1)
        assert abs(pace.ahead(mesh=False) - 81 - steady) <= 1
