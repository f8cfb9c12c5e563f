"""Supports runs of earlier versions, which lack some hyperparameters or used packages of other major versions."""

import re
from collections.abc import Mapping
from typing import Any

from rollmill.core.machine import versions
from rollmill.record.run_directory import RunDirectory

VERSION = re.compile(r"(?P<first>\d{1,9})(\.(?P<second>\d{1,9}))?[\w.+!-]{0,60}", re.ASCII)

ADDED: dict[str, dict[str, Any]] = {
    "ppo": {"normalize_values": False},
    "a3c": {"norm_adv": False, "normalize_values": False},
    "impala": {"norm_adv": False, "normalize_values": False},
}
"""Hyperparameters that were added to an algorithm later, with the values that match its earlier behaviour."""


def with_added(algorithm: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the hyperparameters that a run's version did not have, with the values that reproduce that version."""
    added = ADDED.get(algorithm, {}) if isinstance(algorithm, str) and config else {}
    return {**added, **config}


def note_of_versions(run: RunDirectory) -> str | None:
    """Returns a sentence about packages whose major version has changed since the run was created, or None.

    For a version `0.N`, `N` counts as the major version. Only strings that look like versions are repeated, since
    the file may come from someone else. Raises a `CheckpointError` if the file is damaged.
    """
    recorded: Any = run.read_versions().get("versions")
    if not isinstance(recorded, dict):
        return None
    made_with = {name: found for name, found in recorded.items() if isinstance(found, str) and _major(found)}
    other = [
        f"{name} {made_with[name]} (now {now})"
        for name, now in versions().items()
        if now is not None and name in made_with and _major(made_with[name]) != _major(now)
    ]
    if not other:
        return None
    return (
        f"note: this run was made with {', '.join(other)}. Its results may differ from those of an uninterrupted "
        "run"
    )


def _major(version: str) -> tuple[int, ...] | None:
    """Returns the parts of a version that change only if its meaning changes.

    Returns None for a string that is not a version.
    """
    found = VERSION.fullmatch(version)
    if found is None:
        return None
    first = int(found["first"])
    return (first,) if first else (first, int(found["second"] or 0))
