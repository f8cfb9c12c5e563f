"""Plans as files: what is written is read again, and what is wrong with an edited one is named."""

import json

import pytest

from rollmill.core.errors import UsageError
from rollmill.dataflow import Loops
from rollmill.planning.distribution import find_distribution, list_distributions
from rollmill.planning.placement import Counts
from rollmill.planning.plan import PLACES, Plan, read_plan, write_plan
from wordings import raises

COUNTS = [Counts(), Counts(workers=4, actors=2, learners=2), Counts(asynchronous=True)]


def policies(counts):
    """Plans of every policy that has a form for these counts."""
    for name in list_distributions():
        try:
            partition = find_distribution(name)(counts)
        except UsageError:
            assert counts.asynchronous
            continue
        yield Plan(partition, "program" if len(partition.groups) == 1 else "processes")


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_plans_of_every_policy_are_read_as_they_were_written(counts, tmp_path):
    plans = list(policies(counts))
    assert len(plans) == (3 if counts.asynchronous else 6)
    for plan in plans:
        path = tmp_path / f"{plan.partition.name}.json"
        write_plan(plan, path)
        assert read_plan(path) == plan
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_plan_is_json_that_a_person_can_edit(tmp_path):
    plan = Plan(find_distribution("central")(Counts(actors=3, asynchronous=True)), "processes")
    assert plan.to_json() == {
        "version": 1,
        "distribution": "central",
        "place": "processes",
        "groups": [
            {
                "name": "actor",
                "fragments": ["environment", "policy", "gradients"],
                "replicas": 3,
                "device": "any",
                "synchronous": False,
            },
            {"name": "update", "fragments": ["update"], "replicas": 1, "device": "any", "synchronous": True},
        ],
    }
    shorter = plan.to_json()
    for name in ("replicas", "device", "synchronous"):  # left out where they are as usual
        del shorter["groups"][1][name]
    (tmp_path / "plan.json").write_text(json.dumps(shorter))
    assert read_plan(tmp_path / "plan.json") == plan


def plan_json(**changes):
    groups = [
        {"name": "actor", "fragments": ["environment", "policy"], "replicas": 2},
        {"name": "learner", "fragments": ["gradients", "update"]},
    ]
    return {"version": 1, "distribution": "mine", "place": "processes", "groups": groups, **changes}


def with_group(**changes):
    actor, learner = plan_json()["groups"]
    return plan_json(groups=[{**actor, **changes}, learner])


def without(name):
    return {field: value for field, value in plan_json().items() if field != name}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "the plan: [] must be an object."),
        (None, "the plan: null must be an object."),
        (without("groups"), "the plan: groups is missing."),
        ({}, "the plan: version is missing."),
        (plan_json(version=3), "the plan has version 3, but this Rollmill reads only 1 and 2."),
        (plan_json(version="1"), "the plan: version=\"1\" must be an integer."),
        (plan_json(version=True), "the plan: version=true must be an integer."),
        (plan_json(distribution=None), "the plan: distribution=null must be a string."),
        (plan_json(plaec="program"), "the plan: plaec is unknown. Did you mean place?"),
        (plan_json(place="thread"), "unknown place 'thread'. Did you mean threads?"),
        (plan_json(groups={}), "the plan: groups={} must be a list."),
        (plan_json(groups=[]), "mine: a partition needs at least one group."),
        (plan_json(groups=["actor"]), "the plan: groups[0]=\"actor\" must be an object."),
        (with_group(replica=3), "the plan: groups[0].replica is unknown. Did you mean replicas?"),
        (with_group(replicas=2.0), "the plan: groups[0].replicas=2.0 must be an integer."),
        (with_group(replicas="2"), "the plan: groups[0].replicas=\"2\" must be an integer."),
        (with_group(replicas=-1), "mine: group 'actor' has replicas=-1, which must be at least 1."),
        (with_group(synchronous=0), "the plan: groups[0].synchronous=0 must be true or false."),
        (with_group(device="tpu"), "the plan: groups[0].device=\"tpu\" must be 'any' or 'cpu' or "
         "'gpu'."),
        (with_group(fragments="environment"), "the plan: groups[0].fragments=\"environment\" must be a "
         "list."),
        (with_group(fragments=["environment", 1]), "the plan: groups[0].fragments[1]=1 must be a string."),
        (with_group(fragments=["environment"]), "mine: no group contains policy."),
        (plan_json(place="program"), "mine has 2 groups, which do not fit into one program. hint: "
          "use place=processes, threads or ray."),
    ],
)  # fmt: skip
def test_a_malformed_plan_is_refused_by_name(value, message, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(value))
    with pytest.raises(UsageError) as caught:
        read_plan(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, ("plan-cannot-be-read", "No such file or directory")),
        (b"", ("plan-cannot-be-read", "it is not valid JSON (input data was truncated)")),
        (b"{", ("plan-cannot-be-read", "it is not valid JSON")),
        (b"\xff\xfe", ("plan-cannot-be-read", "JSON is malformed: invalid character (byte 0)")),
        (b"[" * 100_000, ("plan-cannot-be-read", "it is nested deeper than 32 levels")),
        (b" " * (2**20 + 1), ("plan-cannot-be-read", "its 1,048,577 bytes exceed the limit of 1,048,576")),
    ],
)
def test_a_file_that_is_no_plan(content, message, tmp_path):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with raises(*message) as caught:
        read_plan(path)
    assert f"the plan {path} " in str(caught.value)


def test_where_no_plan_can_be_written(tmp_path):
    plan = Plan(find_distribution("gpu-only")(Counts()))
    with raises("plan-cannot-be-written", "nowhere/plan.json", "No such file"):
        write_plan(plan, tmp_path / "nowhere/plan.json")


def test_a_plan_fits_the_sizes_or_says_so():
    loops = Loops(1, num_envs=8, num_steps=4, epochs=1, num_minibatches=1, num_shards=8, minibatch_items="samples")
    plan = Plan(find_distribution("single-learner-fine")(Counts(workers=3)), "processes")
    plan.check()
    with raises("group-has-replicas-cannot-hold", "3", "num_envs=8", "2 or 4"):
        plan.check(loops)


def test_every_place_can_be_written():
    partition = find_distribution("gpu-only")(Counts())
    assert [Plan.from_json(Plan(partition, place).to_json()).place for place in PLACES] == list(PLACES)
