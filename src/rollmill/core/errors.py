"""Errors that the user can fix. Each message names the value, the limit and a remedy."""

import difflib
from collections.abc import Iterable, Sequence


class RollmillError(Exception):
    """Base of all errors whose cause lies outside Rollmill. The command line prints them without a traceback."""

    exit_code = 2


class UsageError(RollmillError):
    """An invalid option, name or size."""


class DeviceMemoryError(UsageError):
    """A device has too little memory for a run."""

    exit_code = 3


class DeviceLostError(RollmillError):
    """A device failed, or a process that shares it made it fail. The last good checkpoint is kept."""

    exit_code = 4


class CannotFuse(Exception):
    """A function that no kernel can compute. The text names the primitive, the line, and what would help."""

    def __init__(self, reason: str, line: str = "", advice: str = "") -> None:
        """`line` of the caller's code, and `advice` on how to change it, both where they are known."""
        self.reason, self.line, self.advice = reason, line, advice
        place, hint = f"\n  at {line}" if line else "", f"\n  hint: {advice}" if advice else ""
        Exception.__init__(self, f"{reason}{place}{hint}")


class FusionError(UsageError):
    """A run cannot be fused. `depths` lists the depths of fusion that the reason rules out."""

    def __init__(self, message: str, depths: Sequence[str]) -> None:
        super().__init__(message)
        self.depths = tuple(depths)


class UnfitHost(RollmillError):
    """A worker cannot do its job on its host, because the code there differs or is missing. Another try would
    fail too.
    """


class ContractError(RollmillError):
    """An environment violates the contract of `rollmill.Environment`, or raised an exception in a step."""


class DataError(RollmillError):
    """A document or a message that is not JSON, or does not match its schema."""


class CheckpointError(RollmillError):
    """A run directory or a checkpoint that is missing, damaged, or belongs to something else."""


class StorageError(RollmillError):
    """The run directory could not be written, for example because the disk is full."""

    exit_code = 1


class NonFiniteError(RollmillError):
    """Training stopped at a NaN or an infinity. The last good checkpoint is kept."""

    exit_code = 1


class EnvironmentFailed(RollmillError):
    """An environment failed too many times in a row. The last good checkpoint is kept."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def unknown_name(
    kind: str, name: str, known: Iterable[str], *, hint: str = "", meant: str | None = None
) -> UsageError:
    """Returns a `UsageError` that suggests `meant`, or else the known names nearest to `name`."""
    advice = suggestion(name, known, meant=meant)
    return UsageError(f"unknown {kind} {name!r}. {advice}{' ' + hint if hint else ''}")


def suggestion(name: str, known: Iterable[str], *, meant: str | None = None) -> str:
    """Returns a sentence that suggests `meant`, or else the known names nearest to `name`, or lists all."""
    names = sorted(known)
    near = [meant] if meant else nearest(name, names)
    return f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(names)}."


def nearest(name: str, known: Iterable[str], *, limit: int = 3, cutoff: float = 0.5) -> list[str]:
    """Returns up to `limit` known names that resemble `name`, the nearest first."""
    return difflib.get_close_matches(name, sorted(known), n=limit, cutoff=cutoff)
