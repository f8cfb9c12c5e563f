"""A plan: where each group of a training runs. A frozen value that reads and writes JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rollmill.core.errors import UsageError, unknown_name
from rollmill.dataflow import Group, Loops, Partition, check_partition

Place = Literal["program", "threads", "processes", "mesh", "ray"]
PLACES: tuple[str, ...] = get_args(Place)

VERSION = 1


@dataclass(frozen=True)
class Plan:
    """Which groups there are, and what carries them."""

    partition: Partition
    """The distribution policy."""
    place: Place = "program"
    """`program`: one compiled program in this process; `threads` of it; `processes` of this host; `mesh`: one
    program over several processes, each with its own devices; `ray`: workers that a Ray cluster places."""

    def check(self, loops: Loops | None = None) -> None:
        """Whether it can be run, with the sizes of these loops.

        Raises:
            UsageError: naming what does not fit, and what would.
        """
        _check_place(self.place)
        check_partition(self.partition, loops)
        whole = len(self.partition.groups) == 1
        if self.place in ("program", "mesh") and not whole:
            raise UsageError(
                f"{self.partition.name} has {len(self.partition.groups)} groups, which one program cannot hold; "
                "use place=processes, threads or ray."
            )

    def to_json(self) -> dict[str, Any]:
        """As JSON; `from_json` reads it."""
        groups = [{**group._asdict(), "fragments": list(group.fragments)} for group in self.partition.groups]
        return {"version": VERSION, "distribution": self.partition.name, "place": self.place, "groups": groups}

    @staticmethod
    def from_json(value: Any) -> "Plan":
        """The plan that `to_json` wrote, or that somebody edited.

        Raises:
            UsageError: naming the field that is missing, unknown, of another type, or does not fit.
        """
        _fields(value, "a plan", {"version": int, "distribution": str, "place": str, "groups": list})
        if value["version"] != VERSION:
            raise UsageError(f"the plan is of version {value['version']}; this Rollmill reads {VERSION}.")
        _check_place(value["place"])
        groups = tuple(_group(group) for group in value["groups"])
        plan = Plan(Partition(value["distribution"], groups), value["place"])
        plan.check()
        return plan


def read_plan(path: Path) -> Plan:
    """The plan in a file.

    Raises:
        UsageError: if there is none, or it is no plan.
    """
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"the plan {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(f"the plan {path} is no JSON: {error}.") from error
    try:
        return Plan.from_json(value)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def write_plan(plan: Plan, path: Path) -> None:
    """Writes a plan to a file.

    Raises:
        UsageError: if it cannot be written.
    """
    try:
        path.write_text(json.dumps(plan.to_json(), indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"the plan {path} cannot be written: {error.strerror}.") from error


def _check_place(place: str) -> None:
    if place not in PLACES:
        raise unknown_name("place", place, PLACES)


def _group(value: Any) -> Group:
    optional = {"replicas": int, "device": str, "synchronous": bool}
    _fields(value, "a group", {"name": str, "fragments": list}, optional)
    if not all(isinstance(fragment, str) for fragment in value["fragments"]):
        raise UsageError(f"group {value['name']!r}: fragments are names, {value['fragments']} was given.")
    return Group(**{**value, "fragments": tuple(value["fragments"])})


def _fields(
    value: Any, what: str, required: Mapping[str, type], optional: Mapping[str, type] | None = None
) -> None:
    known = {**required, **(optional or {})}
    if not isinstance(value, dict):
        raise UsageError(f"{what} is an object with {', '.join(known)}; {type(value).__name__} was given.")
    for name, found in value.items():
        if name not in known:
            raise unknown_name(f"field of {what}", name, known)
        if not isinstance(found, known[name]) or (known[name] is int and isinstance(found, bool)):
            raise UsageError(f"{what}: {name}={found!r} has to be of type {known[name].__name__}.")
    if missing := required.keys() - value.keys():
        raise UsageError(f"{what} lacks {', '.join(sorted(missing))}.")
