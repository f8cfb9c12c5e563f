"""Room for workers on a cluster, and lines about one that cannot be joined; no Ray is running here."""

import json
import types

import pytest

from rollmill.core.errors import UsageError
from rollmill.dataflow import Group, Partition
from rollmill.processes.cluster import joining
from rollmill.processes.cluster.capacity import Demand, Room, autoscales, check_room, demands_of, room_of
from rollmill.processes.cluster.node_health import draining_nodes
from rollmill.processes.cluster.reservation import NoRoom, RoomReservation
from wordings import raises

PARTITION = Partition(
    "any",
    (
        Group("environment", ("environment",), 2, device="cpu"),
        Group("actor", ("policy",), 2, device="cpu"),
        Group("learner", ("gradients", "update"), 1),
    ),
)


def test_a_worker_needs_a_core_and_one_with_a_gpu_both_on_one_node():
    assert room_of([{"CPU": 2.0, "GPU": 4.0}, {"CPU": 3.0}, {"GPU": 1.0}]) == Room(with_gpu=2, in_all=5)
    assert room_of([{"CPU": 1.9}]) == Room(0, 1)


def test_more_workers_than_a_cluster_can_ever_hold_are_refused():
    nodes = [{"CPU": 2.0}, {"CPU": 2.0}]
    demands = demands_of(PARTITION, {"CPU": 4.0})
    with raises("cluster-can-never-hold-workers", "5", "4", "2 x environment, 2 x actor, 1 x learner", "2"):
        check_room(PARTITION, demands, nodes)
    check_room(PARTITION, demands, [*nodes, {"CPU": 1.0}])


def test_a_gpu_on_a_node_without_a_core_left_holds_nobody():
    nodes = [{"CPU": 5.0}, {"GPU": 1.0}]
    with raises("cluster-can-never-hold-workers", "1", "with a GPU", "0"):
        check_room(PARTITION, demands_of(PARTITION, {"CPU": 5.0, "GPU": 1.0}), nodes)


def fake_ray(most=None, status=None):
    state = types.SimpleNamespace(get_max_resources_from_cluster_config=lambda: most)
    kept = json.dumps(status).encode() if status else None
    return types.SimpleNamespace(
        _private=types.SimpleNamespace(state=types.SimpleNamespace(state=state)),
        experimental=types.SimpleNamespace(
            internal_kv=types.SimpleNamespace(_internal_kv_get=lambda key: kept),
        ),
    )


def of_types(*kinds):
    return {"autoscaler_report": {"active_nodes": dict.fromkeys(kinds, 1)}}


@pytest.mark.parametrize(
    ("ray", "grows"),
    [
        (fake_ray(), False),
        (fake_ray(status=of_types("node_1f", "node_2e")), False),
        (fake_ray(status=of_types("ray.head.default")), True),
        (fake_ray(most={"CPU": 100}), True),
        (types.SimpleNamespace(), True),
    ],
)
def test_a_cluster_that_may_grow_is_waited_for(ray, grows):
    assert autoscales(ray) == grows


class LateRay:
    """Lets nobody in, and takes a while for it."""

    def __init__(self, seconds):
        self.seconds = seconds

    def init(self, **_):
        joining.threading.Event().wait(self.seconds)
        raise ConnectionError("Failed to connect to GCS.\nmore")


def test_a_cluster_that_lets_nobody_in_is_told_of_meanwhile_and_at_the_end(monkeypatch):
    monkeypatch.setattr(joining, "PATIENT_SECONDS", 0.1)
    monkeypatch.setattr(joining, "_check_reachable", lambda name, address: None)
    lines = []
    with pytest.raises(UsageError) as refusal:
        joining._connect(LateRay(0.35), "10.0.0.1:6379", lines.append)
    assert len(lines) in (2, 3)
    for text in (lines[0], str(refusal.value)):
        assert "RAY_AUTH_MODE=token" in text and "~/.ray/auth_token" in text
    assert "did not accept this process within 0 s" in lines[0]
    assert "Failed to connect to GCS. `ray start --head`" in str(refusal.value)


class HalfFull:
    """A cluster whose placement group is made once `state` says so; `groups` are those that exist."""

    def __init__(self):
        self.util, self.groups, self.state, self.nodes = self, [], "PENDING", {}
        self.scheduling_strategies = self

    def placement_group(self, bundles, strategy, name):
        self.groups.append((bundles, strategy, name))
        return len(self.groups)

    def placement_group_table(self, group):
        return {"state": self.state, "bundles_to_node_id": self.nodes}

    def remove_placement_group(self, group):
        self.groups.clear()

    def PlacementGroupSchedulingStrategy(self, group, placement_group_bundle_index):
        return placement_group_bundle_index

    def cluster_resources(self):
        return {"CPU": 4.0}

    def available_resources(self):
        return {"CPU": 1.0}


def test_room_for_all_workers_is_asked_for_together_and_given_up_together():
    ray = HalfFull()
    room = RoomReservation(ray, {"actor/0": Demand(), "learner/0": Demand(gpus=1.0)}, name="run", seconds=0.0)
    assert ray.groups == [([{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}], "SPREAD", "run")]
    with raises("cluster-had-no-room-for", "all 2 workers", "2 CPU and 1 GPU", "1 of 4 CPU", kind=NoRoom):
        room.check()
    assert not ray.groups


def test_a_worker_leaves_its_room_where_the_node_is_out_of_reach():
    ray = HalfFull()
    ray.state, ray.nodes = "CREATED", {0: "a", 1: "b"}
    room = RoomReservation(ray, {"actor/0": Demand(), "actor/1": Demand()}, name="run", seconds=0.0)
    room.check()
    assert room.is_made and room.strategy("actor/1", {}) == room.strategy("actor/1", {"a": "10.0.0.1"}) == 1
    assert room.strategy("actor/1", {"b": "10.0.0.2"}) is None and room.strategy("other/0", {}) is None


def test_nodes_that_are_drained_are_read_from_ray():
    state = types.SimpleNamespace(get_draining_nodes=lambda: {"a": 5_000, "b": 0})
    client = types.SimpleNamespace(ray=types.SimpleNamespace(is_connected=lambda: False))
    private = types.SimpleNamespace(state=types.SimpleNamespace(state=state))
    ray = types.SimpleNamespace(util=types.SimpleNamespace(client=client), _private=private)
    assert draining_nodes(ray) == {"a": 5.0, "b": 0.0}
    del private.state.state.get_draining_nodes
    assert draining_nodes(ray) == {}
