"""Errors that the user can fix: each message names the value, the limit and what to do."""

import difflib
from collections.abc import Iterable


class RollmillError(Exception):
    """Something outside Rollmill is wrong; the command line prints it without a traceback."""

    exit_code = 2


class UsageError(RollmillError):
    """An option, a name or a size that cannot be used as it was given."""


class ContractError(RollmillError):
    """An environment breaks the contract of `rollmill.Environment`, or raised inside a step."""


class DataError(RollmillError):
    """A document or a message that is no JSON, or whose fields are not those that are expected."""


class CheckpointError(RollmillError):
    """A run directory or a checkpoint that cannot be read as what it should be."""


class StorageError(RollmillError):
    """The run directory could not be written, for one because the disk is full."""

    exit_code = 1


class NonFiniteError(RollmillError):
    """Training met a NaN or an infinity and stopped; the last good checkpoint is kept."""

    exit_code = 1


class EnvironmentFailed(RollmillError):
    """An environment failed too many times in a row; the last good checkpoint is kept."""

    exit_code = 1


def unknown_name(
    kind: str, name: str, known: Iterable[str], *, hint: str = "", meant: str | None = None
) -> UsageError:
    """A `UsageError` that offers `meant`, or else the known names nearest to the one that was given."""
    names = sorted(known)
    near = [meant] if meant else difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    offer = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(names)}."
    return UsageError(f"unknown {kind} {name!r}. {offer}{' ' + hint if hint else ''}")
