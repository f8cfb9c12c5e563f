"""Errors that the user can fix. Each message names the invalid value, the limit, and a remedy."""

import difflib
from collections.abc import Iterable, Sequence

MAX_NEAREST = 3
"""Maximum number of names that a message suggests."""


class RollmillError(Exception):
    """Base of all errors whose cause lies outside Rollmill. The command line prints them without a traceback."""

    exit_code = 2


class UsageError(RollmillError):
    """Raised for an invalid option, name or size."""


class DeviceMemoryError(UsageError):
    """Raised if a device has too little memory for a run."""

    exit_code = 3


class DeviceLostError(RollmillError):
    """Raised if a device failed, or if a process that shares it made it fail.

    The last good checkpoint is kept.
    """

    exit_code = 4


class CannotFuse(Exception):
    """Raised if no kernel can compute a function.

    The message names the primitive, the line, and a remedy.
    """

    def __init__(self, reason: str, line: str = "", advice: str = "") -> None:
        """`line` is the caller's line of code, and `advice` a way to change it, if they are known."""
        self.reason, self.line, self.advice = reason, line, advice
        place, hint = f"\n  at {line}" if line else "", f"\n  hint: {advice}" if advice else ""
        Exception.__init__(self, f"{reason}{place}{hint}")


class FusionError(UsageError):
    """Raised if a run cannot be fused.

    `depths` lists the values of the option `fusion` that this error rules out.
    """

    def __init__(self, message: str, depths: Sequence[str]) -> None:
        super().__init__(message)
        self.depths = tuple(depths)


class UnfitHost(RollmillError):
    """Raised if a worker cannot run on its host, because the code there differs or is missing.

    Starting the worker again would fail too.
    """


class ContractError(RollmillError):
    """Raised if a user's environment or function violates its contract, or raises an exception."""


class DataError(RollmillError):
    """Raised if a document or a message is not JSON, or does not match its schema."""


class CheckpointError(RollmillError):
    """Raised if a run directory or a checkpoint is missing, is damaged, or does not match the run."""


class StorageError(RollmillError):
    """Raised if the run directory cannot be written, for example because the disk is full."""

    exit_code = 1


class NonFiniteError(RollmillError):
    """Raised if training stops at a NaN or an infinity. The last good checkpoint is kept."""

    exit_code = 1


class EnvironmentFailed(RollmillError):
    """Raised if an environment failed too many times in a row. The last good checkpoint is kept."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its type if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def unknown_name(
    kind: str, name: str, known: Iterable[str], *, hint: str = "", meant: str | None = None
) -> UsageError:
    """Returns a `UsageError` for an unknown name. It suggests `meant`, or the known names nearest to `name`."""
    advice = suggestion(name, known, meant=meant)
    return UsageError(f"unknown {kind} {name!r}. {advice}{' ' + hint if hint else ''}")


def suggestion(name: str, known: Iterable[str], *, meant: str | None = None) -> str:
    """Returns a sentence that suggests a known name instead of `name`.

    The sentence names `meant` if it is given, and otherwise the nearest names, or all names.
    """
    names = sorted(known)
    near = [meant] if meant else nearest_names(name, names)
    return f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(names)}."


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Returns up to `MAX_NEAREST` known names that resemble `name`, the nearest first.

    Case is ignored. If known names differ from `name` only in case, only these names are returned.
    """
    by_lower: dict[str, list[str]] = {}
    for each in sorted(known):
        by_lower.setdefault(each.lower(), []).append(each)
    if same := by_lower.get(name.lower()):
        return same[:MAX_NEAREST]
    near = difflib.get_close_matches(name.lower(), by_lower, n=MAX_NEAREST, cutoff=0.5)
    return [each for lower in near for each in by_lower[lower]][:MAX_NEAREST]
