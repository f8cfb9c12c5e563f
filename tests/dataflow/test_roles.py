"""Roles of groups: stages, channels, state and recovery, derived from a partition without running anything."""

import itertools

import pytest

from rollmill.core.errors import UsageError
from rollmill.dataflow import (
    FRAGMENTS,
    Group,
    OwnedPart,
    Partition,
    Stage,
    check_partition,
    partition_channels,
    roles,
)
from rollmill.planning.distribution import find_distribution, list_distributions
from rollmill.planning.placement import Counts

ENVIRONMENTS, INPUTS, PARAMETERS, REPLAY, STATISTICS = OwnedPart

SYNCHRONOUS = {
    ("gpu-only", "all"): ("collect, learn, report metrics", {ENVIRONMENTS, INPUTS, PARAMETERS, STATISTICS}),
    ("single-learner-coarse", "actor"): ("receive weights, collect, send trajectories", {ENVIRONMENTS, INPUTS}),
    ("single-learner-coarse", "learner"): (
        "receive trajectories, learn, publish weights, report metrics",
        {PARAMETERS, STATISTICS},
    ),
    ("single-learner-fine", "environment"): ("serve environments", {ENVIRONMENTS}),
    ("single-learner-fine", "learner"): ("collect, learn, report metrics", {INPUTS, PARAMETERS, STATISTICS}),
    ("multi-learner", "environment"): ("serve environments", {ENVIRONMENTS}),
    ("multi-learner", "learner"): ("collect, learn, report metrics", {INPUTS, PARAMETERS, STATISTICS}),
    ("environments", "environment"): ("serve environments", {ENVIRONMENTS}),
    ("environments", "policy"): ("receive weights, collect, send trajectories", {INPUTS}),
    ("environments", "learner"): (
        "receive trajectories, learn, publish weights, report metrics",
        {PARAMETERS, STATISTICS},
    ),
    ("central", "actor"): (
        "fetch parameters, collect, learn, report metrics",
        {ENVIRONMENTS, INPUTS, STATISTICS},
    ),
    ("central", "update"): ("apply gradients", {PARAMETERS}),
}


def partition_of(name, **counts):
    return find_distribution(name)(Counts(**counts))


def roles_of(name, *, host=False, replay=False, **counts):
    return roles(partition_of(name, **counts), host=host, replay=replay)


def test_of_every_policy_that_there_is():
    derived = {
        (name, group): (", ".join(role.stages), set(role.owned_parts))
        for name in list_distributions()
        for group, role in roles_of(name).items()
    }
    assert derived == SYNCHRONOUS


def test_a_replay_memory_lies_with_the_gradients():
    holders = {
        name: [group for group, role in roles_of(name, replay=True).items() if REPLAY in role.owned_parts]
        for name in list_distributions()
    }
    assert all(len(groups) == 1 for groups in holders.values())
    assert holders["single-learner-coarse"] == ["learner"] and holders["central"] == ["actor"]
    begins_empty = roles_of("central", replay=True, actors=2, asynchronous=True)
    assert not any(REPLAY in role.owned_parts for role in begins_empty.values())


def test_synchronous_groups_end_together_and_those_with_environments_alone_are_replaceable():
    replaceable = {
        name: [group for group, role in roles_of(name).items() if role.replaceable]
        for name in list_distributions()
    }
    assert replaceable == {
        "gpu-only": [],
        "multi-learner": ["environment"],
        "single-learner-coarse": ["actor"],
        "single-learner-fine": ["environment"],
        "environments": ["environment"],
        "central": [],
    }
    assert all(role.in_step for name in list_distributions() for role in roles_of(name).values())


def test_asynchronous_actors_follow_the_learner_own_nothing_and_start_anew():
    impala = roles_of("single-learner-coarse", asynchronous=True)
    assert not impala["actor"].in_step and impala["actor"].owned_parts == frozenset()
    assert impala["learner"].in_step and impala["learner"].owned_parts == {PARAMETERS, STATISTICS}
    a3c = roles_of("central", asynchronous=True)
    assert a3c["actor"].stages == (Stage.FETCH, Stage.COLLECT, Stage.LEARN)  # its metrics go with its gradients
    assert a3c["update"].stages == (Stage.APPLY, Stage.REPORT)
    assert a3c["actor"].replaceable and not a3c["actor"].in_step
    assert a3c["update"].in_step and not a3c["update"].replaceable and a3c["update"].ends_on_request
    apart = roles_of("environments", asynchronous=True)
    assert [apart[name].in_step for name in ("environment", "policy", "learner")] == [False, False, True]


def test_environments_on_the_host_are_in_no_snapshot_but_their_workers_end_with_the_others():
    derived = roles_of("single-learner-fine", host=True)
    assert derived["environment"].owned_parts == frozenset() and derived["environment"].in_step
    assert derived["learner"].owned_parts == {PARAMETERS, STATISTICS}


def test_channels_by_name_kind_and_ends():
    def ends(name, **counts):
        return [
            (channel.name, channel.kind, channel.sender.name, channel.receiver.name)
            for channel in partition_channels(partition_of(name, **counts))
        ]

    assert ends("gpu-only") == []
    assert ends("gpu-only", learners=2) == [("mean", "all-reduce", "all", "all")]
    assert ends("central", actors=1) == [
        ("parameters", "latest value", "update", "actor"),
        ("gradients", "queue", "actor", "update"),
    ]
    assert ("mean", "all-reduce", "actor", "actor") in ends("central")
    assert ("mean", "all-reduce", "actor", "actor") not in ends("central", asynchronous=True)
    assert ends("environments") == [
        ("opening", "queue", "environment", "policy"),
        ("action", "queue", "policy", "environment"),
        ("timestep", "queue", "environment", "policy"),
        ("weights", "latest value", "learner", "policy"),
        ("trajectory", "queue", "policy", "learner"),
    ]
    policy = roles_of("environments")["policy"]
    assert policy.partner("action").name == "environment" and policy.partner("trajectory").name == "learner"
    assert policy.has_channel("weights") and not policy.has_channel("gradients")


def groupings():
    """Every way to divide the fragments into groups."""
    for labels in itertools.product(range(4), repeat=4):
        if list(dict.fromkeys(labels)) == sorted(set(labels)):
            yield [
                tuple(fragment for fragment, label in zip(FRAGMENTS, labels, strict=True) if label == number)
                for number in sorted(set(labels))
            ]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_of_every_valid_partition_the_stages_and_the_state_are_complete(asynchronous):
    valid = 0
    for fragments in groupings():
        groups = tuple(
            Group(" ".join(held), held, synchronous=not (asynchronous and "policy" in held)) for held in fragments
        )
        partition = Partition("any", groups)
        try:
            check_partition(partition)
        except UsageError:
            continue
        valid += 1
        derived = roles(partition, replay=True)
        stages = [stage for role in derived.values() for stage in role.stages]
        assert stages.count(Stage.COLLECT) == stages.count(Stage.LEARN) == stages.count(Stage.REPORT) == 1
        assert (
            stages.count(Stage.SEND_TRAJECTORIES)
            == stages.count(Stage.RECEIVE_TRAJECTORIES)
            == stages.count(Stage.PUBLISH)
        )
        assert (
            stages.count(Stage.APPLY) == stages.count(Stage.FETCH) == partition.are_separate("gradients", "update")
        )
        assert stages.count(Stage.SERVE) == partition.are_separate("environment", "policy")
        owned = [part for role in derived.values() for part in role.owned_parts]
        assert len(owned) == len(set(owned))
        if partition.synchronous:
            assert set(owned) == set(OwnedPart)
        for role in derived.values():
            assert role.in_step or not role.owned_parts
            for channel in role.channels:
                assert role.group in (channel.sender, channel.receiver)
    assert valid >= 6
