"""Distribution policies: found by name, each one file or one function, and nothing else knows them."""

import pytest

from rollmill.core.errors import UsageError
from rollmill.dataflow import FRAGMENTS, Group, Partition, check_partition
from rollmill.planning import distribution
from rollmill.planning.distribution import find_distribution, list_distributions
from rollmill.planning.placement import Counts
from wordings import raises

POLICIES = {
    "gpu-only": {"all": (FRAGMENTS, 4)},
    "multi-learner": {"environment": (("environment",), 8), "learner": (("policy", "gradients", "update"), 4)},
    "single-learner-coarse": {
        "actor": (("environment", "policy"), 2),
        "learner": (("gradients", "update"), 1),
    },
    "single-learner-fine": {
        "environment": (("environment",), 8),
        "learner": (("policy", "gradients", "update"), 1),
    },
    "environments": {
        "environment": (("environment",), 8),
        "policy": (("policy",), 2),
        "learner": (("gradients", "update"), 4),
    },
    "central": {"actor": (("environment", "policy", "gradients"), 2), "update": (("update",), 1)},
}


def mine(counts):
    """A policy of this file's own."""
    return Partition("mine", (Group("everything", FRAGMENTS, counts.actors),))


def no_partition(counts):
    return [counts]


def takes_nothing():
    return Partition("nothing", ())


def one_group_alone(counts):
    return Partition("alone", Group("everything", FRAGMENTS))


NO_FUNCTION = 3


def test_every_policy_of_the_paper_is_there_and_says_what_it_does():
    found = list_distributions()
    assert found.keys() == POLICIES.keys()
    assert all(line and line.endswith((".", ").")) for line in found.values())


@pytest.mark.parametrize("name", POLICIES)
def test_groups_and_replicas_of_every_policy(name):
    partition = find_distribution(name)(Counts(workers=8, actors=2, learners=4))
    check_partition(partition)
    assert partition.name == name
    assert {group.name: (group.fragments, group.replicas) for group in partition.groups} == POLICIES[name]
    assert partition.synchronous


@pytest.mark.parametrize("name", POLICIES)
def test_asynchronous_where_the_policy_lies_apart_from_the_update(name):
    counts = Counts(asynchronous=True)
    if name in ("gpu-only", "multi-learner", "single-learner-fine"):
        message = (
            f"{name} cannot be asynchronous, because its policy belongs to the learner's group. hint: use "
            "single-learner-coarse, environments or central, or leave asynchronous out."
        )
        with pytest.raises(UsageError) as caught:
            find_distribution(name)(counts)
        assert str(caught.value) == message
    else:
        partition = find_distribution(name)(counts)
        check_partition(partition)
        assert [group.name for group in partition.groups if not group.synchronous] == [
            partition.holder("policy").name
        ]


def test_counts_name_those_that_a_policy_has_read():
    counts = Counts(workers=8, actors=2, learners=4)
    assert counts.used == set()
    find_distribution("multi-learner")(counts)
    assert counts.used == {"workers", "learners", "asynchronous"}


def test_an_unknown_name_offers_the_nearest():
    with pytest.raises(UsageError) as caught:
        find_distribution("single-learner-corse")
    message = str(caught.value)
    assert message.startswith(
        "unknown distribution policy 'single-learner-corse'. Did you mean single-learner-coarse"
    )
    assert message.endswith("For a function of your own, use module:function.")
    with raises("distribution-cannot-be-imported", "unknown", "policy 'GPUOnly'"):
        find_distribution("GPUOnly")


def test_a_function_of_ones_own_is_a_policy():
    partition = find_distribution(f"{__name__}:mine")(Counts(actors=3))
    assert partition == Partition("mine", (Group("everything", FRAGMENTS, 3),))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_such_module:mine",
            "cannot import 'no_such_module': .*hint: name its file with --import DIRECTORY/no_such_module.py",
        ),
        (":mine", "cannot import '': ValueError"),
        (f"{__name__}:", "has no function ''"),
        (f"{__name__}:yours", f"{__name__} has no function 'yours'"),
        (f"{__name__}:NO_FUNCTION", "has no function 'NO_FUNCTION'"),
        (f"{__name__}:no_partition", "must return a Partition, got list"),
        (f"{__name__}:takes_nothing", "raised TypeError: .* must return a Partition."),
        (f"{__name__}:one_group_alone", "expected a tuple of Groups"),
    ],
)
def test_what_is_no_policy_of_ones_own(name, message):
    with pytest.raises(UsageError, match=f"distribution '{name}':? .*{message}"):
        find_distribution(name)(Counts())


def test_a_module_that_fails_is_told_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "fails_at_once.py").write_text("number = 1\nnumber.append(2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with raises(
        "distribution-cannot-be-imported", "AttributeError:", "at", "fails_at_once.py:2: number.append(2)"
    ):
        find_distribution("fails_at_once:mine")


def test_one_more_function_is_one_more_policy(monkeypatch):
    def two_halves(counts):
        """Collects on one side, learns on the other."""
        groups = Group("collects", ("environment", "policy")), Group("learns", ("gradients", "update"))
        return Partition("two-halves", groups)

    monkeypatch.setitem(distribution._POLICIES, "two-halves", two_halves)
    assert list_distributions()["two-halves"] == "Collects on one side, learns on the other."
    check_partition(find_distribution("two-halves")(Counts()))
