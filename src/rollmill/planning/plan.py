"""A plan: a partition into groups, the place in which they run, and settings. It can be read from and written to
JSON.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from rollmill.core.bounds import Count, Range
from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.folder import open_replacement, opened_named
from rollmill.core.json_data import parse_json
from rollmill.core.schema import check_fields, read_as
from rollmill.dataflow import Group, Loops, Partition, check_partition

Place = Literal["program", "threads", "processes", "mesh", "ray"]
PLACES: tuple[str, ...] = get_args(Place)

AllReduce = Literal["flat", "hierarchical", "host", "one-shot"]
"""Names of the ways in which the devices of a mesh compute means.

`flat` is over all devices at once, `hierarchical` over the instances of each GPU first, `host` through host
memory, and `one-shot` by a kernel that reads the memory of all other GPUs.
"""
AllReduceOption = Literal["auto", AllReduce]
"""Values of the option `reduction`: an `AllReduce`, or `auto` for the fastest by timing."""

VERSION, WITH_SETTINGS = 1, 2
"""Versions of the JSON form. A plan without settings has the older one, which earlier releases read."""
MAX_BYTES = 2**20


@dataclass(frozen=True)
class SavedGroup:
    """A group of a plan in the form of its JSON file."""

    name: str
    fragments: tuple[str, ...]
    replicas: int = 1
    device: Literal["any", "cpu", "gpu"] = "any"
    synchronous: bool = True


@dataclass(frozen=True)
class PlanSettings:
    """Options of a run chosen with its partition and place. None leaves an option to the run."""

    devices: Annotated[int, Range(0, finite=False)] | None = None
    """Number of devices that share one program."""
    fusion: Literal["auto", "off", "rollout", "full"] | None = None
    num_envs: Count | None = None
    """Number of environments that the plan was chosen for."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class SavedPlan:
    """A plan in the form of its JSON file."""

    version: int
    distribution: str
    place: str
    groups: tuple[SavedGroup, ...]
    settings: PlanSettings | None = None


@dataclass(frozen=True)
class Plan:
    """A partition into groups, the place in which the groups run, and settings of the run."""

    partition: Partition
    """The groups, as returned by a distribution policy."""
    place: Place = "program"
    """`program`: one compiled program in this process; `threads` of it; `processes` of this host; `mesh`: one
    program over several processes, each with its own devices; `ray`: workers that a Ray cluster places."""
    settings: PlanSettings | None = None
    """Options of a plan that was found by a search, or None."""

    @property
    def placement(self) -> "Plan":
        """This plan without its settings: only the partition and its place."""
        return replace(self, settings=None)

    def check(self, loops: Loops | None = None) -> None:
        """Checks that the plan can run with the number of environments and shards in `loops`.

        Raises a `UsageError` that suggests suitable sizes.
        """
        _check_place(self.place)
        check_partition(self.partition, loops)
        whole = len(self.partition.groups) == 1
        if self.place in ("program", "mesh") and not whole:
            raise UsageError(
                f"{self.partition.name} has {len(self.partition.groups)} groups, which do not fit into one "
                "program. hint: use place=processes, threads or ray."
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as a JSON value, which `from_json` reads."""
        groups = [{**group._asdict(), "fragments": list(group.fragments)} for group in self.partition.groups]
        placed = {"distribution": self.partition.name, "place": self.place, "groups": groups}
        if self.settings is None:
            return {"version": VERSION, **placed}
        given = {name: value for name, value in asdict(self.settings).items() if value is not None}
        return {"version": WITH_SETTINGS, **placed, "settings": given}

    @staticmethod
    def from_json(value: Any) -> "Plan":
        """Reads a plan from the JSON value that `to_json` returns, possibly edited by the user.

        Raises a `UsageError` if a field is missing, unknown, of another type, or invalid.
        """
        saved = read_as(SavedPlan, value, where="the plan", error=UsageError)
        if saved.version not in (VERSION, WITH_SETTINGS):
            raise UsageError(
                f"the plan has version {saved.version}, but this Rollmill reads only {VERSION} and "
                f"{WITH_SETTINGS}."
            )
        if saved.settings is not None and saved.version != WITH_SETTINGS:
            raise UsageError(
                f"the plan has settings, which need version {WITH_SETTINGS}, but it has version {saved.version}."
            )
        _check_place(saved.place)
        groups = tuple(Group(**vars(group)) for group in saved.groups)
        plan = Plan(Partition(saved.distribution, groups), cast(Place, saved.place), saved.settings)
        plan.check()
        return plan


def read_plan(path: Path) -> Plan:
    """Reads a plan from a file. Raises a `UsageError` if the file does not exist or does not hold a plan."""
    try:
        with opened_named(path) as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"the plan {path} cannot be read: {error.strerror}.") from error
    value = parse_json(text, where=f"the plan {path}", limit=MAX_BYTES, error=UsageError)
    try:
        return Plan.from_json(value)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def write_plan(plan: Plan, path: Path) -> None:
    """Writes a plan to a file. Raises a `UsageError` if the file cannot be written."""
    try:
        with open_replacement(path) as file:
            file.write((json.dumps(plan.to_json(), indent=2) + "\n").encode())
    except OSError as error:
        raise UsageError(f"the plan {path} cannot be written: {error.strerror}.") from error


def _check_place(place: str) -> None:
    if place not in PLACES:
        raise unknown_name("place", place, PLACES)
