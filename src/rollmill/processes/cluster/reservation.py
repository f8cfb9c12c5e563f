"""Reserves the resources for all workers of a run on a Ray cluster, either all or none, as a placement group."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from rollmill.core.errors import RollmillError
from rollmill.processes.cluster.capacity import Demand

ROOM_SECONDS = 900.0
"""Maximum seconds to wait for resources, because nodes may have to be added or other runs to end."""

POLL_SECONDS = 1.0


class NoRoom(RollmillError):
    """Error: a cluster could not reserve resources for all workers of a run within the time limit. It has reserved
    nothing.
    """

    exit_code = 1


class RoomReservation:
    """The reserved resources of a run's workers, by the names of their jobs.

    A cluster with resources for only some of the workers reserves nothing. The resources are requested
    immediately, without waiting: actors that use them start once all resources are reserved.
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
        """Returns the Ray scheduling strategy for an actor that uses a job's resources.

        Returns None if these resources are on a node in `without`. Ray may not know yet that a node in `without`
        is gone, and moves the resources once it knows.
        """
        place = self._places.get(job)
        self._look()
        if place is None or self._nodes.get(place) in without:
            return None
        strategies = self._ray.util.scheduling_strategies
        return strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)

    @property
    def is_made(self) -> bool:
        """True once all resources have been reserved."""
        self._look()
        return self._is_made

    def check(self) -> None:
        """Cancels the reservation and raises `NoRoom` if the resources were not reserved within the time limit."""
        waited = time.monotonic() - self._asked_at
        if waited < self._seconds or self.is_made:
            return
        self.release()
        raise NoRoom(
            f"the cluster had no room for all {len(self._places)} workers at once within {self._seconds:.0f} s: "
            f"they need {self._total}, {self.free()}. No resources are reserved there. hint: use fewer workers "
            "(--actors, --workers, --learners) or more nodes, or try again later. `ray status` shows how the "
            "resources are used."
        )

    def free(self) -> str:
        """Describes for messages which resources of the cluster are free."""
        there, free = self._ray.cluster_resources(), self._ray.available_resources()
        kinds = ("CPU", "GPU") if self._total.gpus else ("CPU",)
        counts = (f"{free.get(kind, 0.0):g} of {there.get(kind, 0.0):g} {kind}" for kind in kinds)
        return f"and {' and '.join(counts)} are free"

    def release(self) -> None:
        """Releases the reserved resources, and ends the actors that use them."""
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._ray.util.remove_placement_group(self._group)

    def _look(self) -> None:
        """Reads which nodes the reserved resources are on, unless they were read a moment ago."""
        now = time.monotonic()
        if now - self._looked_at < POLL_SECONDS:
            return
        self._looked_at = now
        with contextlib.suppress(Exception):  # the cluster may not answer at the moment
            table = self._ray.util.placement_group_table(self._group)
            self._nodes = {
                int(place): str(node) for place, node in (table.get("bundles_to_node_id") or {}).items()
            }
            self._is_made = self._is_made or table.get("state") == "CREATED"


def _bundle(demand: Demand) -> dict[str, float]:
    return {"CPU": demand.cpus} | ({"GPU": demand.gpus} if demand.gpus else {})
