"""Partitions: which can be run, what is said of those that cannot, and who shares environments with whom."""

import re

import pytest

from rollmill.core.errors import UsageError
from rollmill.dataflow import FRAGMENTS, Group, Loops, Partition, check_partition, peers, replica_environments

LOOPS = Loops(
    iterations=1, num_envs=24, num_steps=4, epochs=1, num_minibatches=2, num_shards=12, minibatch_items="samples"
)
ACTOR, LEARNER = Group("actor", ("environment", "policy")), Group("learner", ("gradients", "update"))


def several(*groups):
    """A partition; each group is its name, fragments by their first letters, and what else it has."""
    letters = {fragment[0]: fragment for fragment in FRAGMENTS}
    made = [Group(name, tuple(letters.get(c, c) for c in which), **more) for name, which, more in groups]
    return Partition("mine", tuple(made))


def refused(partition, loops=None):
    with pytest.raises(UsageError) as caught:
        check_partition(partition, loops)
    return str(caught.value)


GOOD = {
    "together": several(("all", "epgu", {"replicas": 4})),
    "coarse": several(("actor", "ep", {"replicas": 8, "device": "cpu"}), ("learner", "gu", {"replicas": 2})),
    "fine": several(("environment", "e", {"replicas": 24}), ("learner", "pgu", {})),
    "all apart": several(
        ("environment", "e", {"replicas": 6}),
        ("policy", "p", {"replicas": 3}),
        ("learner", "g", {"replicas": 12}),
        ("update", "u", {}),
    ),
    "fewer environments than policies": several(
        ("environment", "e", {"replicas": 2}), ("policy", "p", {"replicas": 4}), ("learner", "gu", {})
    ),
    "asynchronous actors": several(("actor", "ep", {"replicas": 3, "synchronous": False}), ("learner", "gu", {})),
    "central": several(("actor", "epg", {"replicas": 3, "synchronous": False}), ("update", "u", {})),
    "not side by side": several(("a", "eg", {"replicas": 2}), ("b", "p", {}), ("c", "u", {})),
}


@pytest.mark.parametrize("name", GOOD)
def test_partitions_that_can_be_run(name):
    check_partition(GOOD[name], LOOPS)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (Partition("mine", ()), "mine: a partition needs at least one group."),
        (
            several(("actor", ("environment", "polcy"), {}), ("learner", "gu", {})),
            "unknown fragment 'polcy'. Did you mean policy? It belongs to group 'actor'.",
        ),
        (
            several(("actor", "ep", {}), ("learner", "pgu", {})),
            (
                "mine: 'policy' is in two groups, 'actor' and 'learner'. A fragment belongs to one group, "
                "which may have several replicas."
            ),
        ),
        (
            several(("actor", "epp", {}), ("learner", "gu", {})),
            "mine: 'policy' occurs twice in group 'actor'.",
        ),
        (several(("actor", "e", {}), ("learner", "g", {})), "mine: no group contains policy, update."),
        (several(("one", "ep", {}), ("one", "gu", {})), "mine: two groups have the name one."),
        (
            several(("none", "", {}), ("all", "epgu", {})),
            "mine: group 'none' contains no fragment. hint: leave the group out.",
        ),
        (
            several(("all", "epgu", {"replicas": 0})),
            "mine: group 'all' has replicas=0, which must be at least 1.",
        ),
        (several(("all", "epgu", {"device": "gpus"})), "unknown kind of device 'gpus'. Did you mean gpu or cpu?"),
        (
            several(("actor", "epg", {"replicas": 2}), ("update", "u", {"replicas": 2})),
            (
                "mine: group 'update' has replicas=2, but an update without gradients needs exactly one "
                "replica, where all gradients meet. hint: use replicas=1, or add gradients to the group."
            ),
        ),
        (
            several(("actor", "epu", {}), ("gradients", "g", {})),
            (
                "mine: group 'actor' contains update with environment and policy, but not gradients. hint: "
                "give update a group of its own, or add gradients to this one."
            ),
        ),
        (
            several(("all", "epgu", {"synchronous": False})),
            (
                "mine: group 'all' computes the weights, so it cannot receive them asynchronously. hint: "
                "make the group synchronous."
            ),
        ),
        (
            several(("environment", "e", {"synchronous": False}), ("learner", "pgu", {})),
            (
                "mine: group 'environment' is asynchronous, but only a group with the policy receives "
                "weights. hint: make the group synchronous."
            ),
        ),
        (
            several(("actor", "ep", {}), ("learner", "g", {"synchronous": False}), ("update", "u", {})),
            (
                "mine: group 'learner' is asynchronous, but only a group with the policy receives weights. "
                "hint: make the group synchronous."
            ),
        ),
        (
            several(("environment", "e", {"replicas": 4}), ("learner", "pgu", {"replicas": 3})),
            "mine: group 'environment' has replicas=4 and 'learner' replicas=3. One must be a multiple of the "
            "other, so that the data along 'timestep' can be divided equally.",
        ),
        (
            several(("actor", "ep", {"replicas": 2}), ("learner", "gu", {"replicas": 3})),
            "mine: group 'actor' has replicas=2 and 'learner' replicas=3. One must be a multiple of the other, "
            "so that the data along 'trajectory' can be divided equally.",
        ),
    ],
)
def test_partitions_that_cannot_be_run(partition, message):
    assert refused(partition) == message


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (
            several(("environment", "e", {"replicas": 5}), ("learner", "pgu", {})),
            "group 'environment' has replicas=5, which do not divide num_envs=24 equally. "
            "Nearest numbers of replicas that do: 4 or 6.",
        ),
        (
            several(("environment", "e", {"replicas": 48}), ("learner", "pgu", {})),
            "group 'environment' has replicas=48, which do not divide num_envs=24 equally. "
            "Nearest numbers of replicas that do: 24.",
        ),
        (
            several(("actor", "ep", {"replicas": 8}), ("learner", "gu", {"replicas": 8})),
            "group 'learner' has replicas=8, which do not divide num_shards=12 equally. "
            "Nearest numbers of replicas that do: 6 or 12.",
        ),
        (
            several(("all", "epgu", {"replicas": 24})),
            "group 'all' has replicas=24, which do not divide num_shards=12 equally. "
            "Nearest numbers of replicas that do: 12.",
        ),
    ],
)
def test_replicas_that_do_not_fit_the_environments(partition, message):
    check_partition(partition)  # which knows no sizes yet
    assert refused(partition, LOOPS) == message
    offered = map(int, re.findall(r"\d+", message.rpartition(":")[2]))
    for count in offered:
        groups = [g._replace(replicas=count) if g.replicas > 1 else g for g in partition.groups]
        check_partition(partition._replace(groups=tuple(groups)), LOOPS)


def test_only_where_a_group_learns_do_shards_count():
    check_partition(several(("environment", "e", {"replicas": 24}), ("learner", "pgu", {})), LOOPS)


# --- who holds what -----------------------------------------------------------------------------------


def test_holders_and_channels():
    partition = GOOD["all apart"]
    assert [partition.holder(fragment).name for fragment in FRAGMENTS] == [
        "environment",
        "policy",
        "learner",
        "update",
    ]
    edges = lambda name: [edge.name for edge in GOOD[name].cut_edges]
    assert edges("all apart") == ["timestep", "action", "trajectory", "gradients", "parameters", "weights"]
    assert edges("together") == []
    assert edges("coarse") == ["trajectory", "weights"]
    assert edges("fine") == ["timestep", "action"]
    assert edges("central") == ["gradients", "parameters"]
    assert edges("not side by side") == [
        "timestep",
        "action",
        "trajectory",
        "gradients",
        "parameters",
        "weights",
    ]


def test_one_asynchronous_group_makes_a_partition_asynchronous():
    assert {name for name in GOOD if not GOOD[name].synchronous} == {"asynchronous actors", "central"}


def test_replicas_in_order():
    assert [(group.name, n) for group, n in GOOD["fewer environments than policies"].replicas] == [
        ("environment", 0),
        ("environment", 1),
        ("policy", 0),
        ("policy", 1),
        ("policy", 2),
        ("policy", 3),
        ("learner", 0),
    ]


def test_shares_by_value():
    assert [list(replica_environments(6, 3, n)) for n in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert list(replica_environments(6, 1, 0)) == list(range(6))


@pytest.mark.parametrize(("replicas", "others"), [(2, 4), (4, 2), (3, 3), (1, 6), (6, 1)])
def test_peers_are_those_with_environments_in_common(replicas, others):
    for replica in range(replicas):
        mine = set(replica_environments(12, replicas, replica))
        right = [n for n in range(others) if mine & set(replica_environments(12, others, n))]
        assert list(peers(replicas, others, replica)) == right


def test_peers_by_value():
    assert [list(peers(2, 4, n)) for n in range(2)] == [[0, 1], [2, 3]]
    assert [list(peers(4, 2, n)) for n in range(4)] == [[0], [0], [1], [1]]
