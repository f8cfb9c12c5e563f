"""Room for all workers of a training on a Ray cluster: all of it at once, or none (a placement group of Ray)."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from rollmill.core.errors import RollmillError
from rollmill.processes.cluster.room import Demand

ROOM_SECONDS = 900.0
"""How long a cluster may take to make room: nodes may have to be added, or other trainings to end."""

POLL_SECONDS = 1.0


class NoRoom(RollmillError):
    """A cluster had no room for all workers of a training within the time limit. Nothing is held there."""

    exit_code = 1


class RoomReservation:
    """Room for workers, by the names of their jobs. A cluster with room for some of them alone gives none.

    It is asked for at once, and nothing waits for it here: an actor in it begins when all of the room is there.
    """

    def __init__(
        self, ray: Any, demands: Mapping[str, Demand], *, name: str, seconds: float = ROOM_SECONDS
    ) -> None:
        self._ray, self._places = ray, {job: place for place, job in enumerate(demands)}
        self._total = Demand(*map(sum, zip(*demands.values(), strict=True)))
        bundles = [_bundle(demand) for demand in demands.values()]
        self._group = ray.util.placement_group(bundles, strategy="SPREAD", name=name)
        self._asked_at, self._seconds = time.monotonic(), seconds
        self._looked_at = float("-inf")
        self._nodes: Mapping[int, str] = {}
        self._is_made = False

    def strategy(self, job: str, without: Mapping[str, str]) -> Any:
        """Returns Ray's strategy for an actor in a job's room, or None if that room is on a node of `without`.

        Ray may not know yet that such a node is gone. It moves the room once it does.
        """
        place = self._places.get(job)
        self._look()
        if place is None or self._nodes.get(place) in without:
            return None
        strategies = self._ray.util.scheduling_strategies
        return strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)

    @property
    def is_made(self) -> bool:
        """Whether the room has been there."""
        self._look()
        return self._is_made

    def check(self) -> None:
        """Raises `NoRoom` if the cluster has not made room within the time limit. The room is then given up."""
        waited = time.monotonic() - self._asked_at
        if waited < self._seconds or self.is_made:
            return
        self.release()
        raise NoRoom(
            f"the cluster had no room for all {len(self._places)} workers at once within {self._seconds:.0f} s: "
            f"they ask for {self._total}, {self.free()}. Nothing is held there. hint: fewer workers (--actors, "
            "--workers, --learners), more nodes, or another time; `ray status` tells who holds what."
        )

    def free(self) -> str:
        """Returns what the cluster has free, for messages."""
        there, free = self._ray.cluster_resources(), self._ray.available_resources()
        kinds = ("CPU", "GPU") if self._total.gpus else ("CPU",)
        counts = (f"{free.get(kind, 0.0):g} of {there.get(kind, 0.0):g} {kind}" for kind in kinds)
        return f"and {' and '.join(counts)} are free"

    def release(self) -> None:
        """Gives the room back, and ends the actors in it."""
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._ray.util.remove_placement_group(self._group)

    def _look(self) -> None:
        """Reads on which nodes the room is, unless that was read a moment ago."""
        now = time.monotonic()
        if now - self._looked_at < POLL_SECONDS:
            return
        self._looked_at = now
        with contextlib.suppress(Exception):  # a cluster that does not answer now
            table = self._ray.util.placement_group_table(self._group)
            self._nodes = {
                int(place): str(node) for place, node in (table.get("bundles_to_node_id") or {}).items()
            }
            self._is_made = self._is_made or table.get("state") == "CREATED"


def _bundle(demand: Demand) -> dict[str, float]:
    return {"CPU": demand.cpus} | ({"GPU": demand.gpus} if demand.gpus else {})
