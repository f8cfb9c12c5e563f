"""The options of a search for a plan, in `rollmill plan` and `rollmill train`."""

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmill.api import DEFAULT_BUDGET
from rollmill.cli.parsing import given_options, values_of
from rollmill.core.children import start_python
from rollmill.core.errors import RollmillError, UsageError
from rollmill.core.temporary import temporary_folder
from rollmill.planning.search import Objective

FLAGS = ("search-plan", "fresh")
DECIDED = ("distribution", "place", "devices", "workers", "actors", "learners", "fusion")
"""Options that a search chooses; one that is given narrows it."""
DECIDED_FLAGS = ("asynchronous",)
ELSEWHERE = ("plan", "cluster", "host")
"""Options that leave nothing to search for, or not on this machine."""


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search for a plan."""

    search_plan: bool = False
    """First search for the fastest way to run the training, by short trainings; placement options that are given
    narrow the search. The result is kept for the next time."""
    budget: float = DEFAULT_BUDGET
    """Seconds that the search may take; the first candidate is measured in any case."""
    objective: Objective = "keep-batch"
    """`keep-batch` changes nothing of what is learned; `grow-batch` may also raise the number of environments."""
    fresh: bool = False
    """Search although there is a result of an earlier search."""

    def check(self, given: set[str]) -> None:
        """Checks these options.

        Args:
            given: names of the options of the command that are given.

        Raises:
            UsageError: one is out of bounds, or has no effect.
        """
        if not self.search_plan:
            for name in sorted(given & {"budget", "objective", "fresh"}):
                raise UsageError(
                    f"--{name} has no effect without --search-plan. hint: add --search-plan, or leave it out."
                )
            return
        if not 0 < self.budget < float("inf"):
            raise UsageError(f"budget={self.budget:g} seconds must be greater than 0 and finite.")
        for name in sorted(given & set(ELSEWHERE)):
            raise UsageError(
                f"--{name} has no effect beside --search-plan, which chooses a plan for this machine. hint: leave "
                "one of the two out."
            )


class PlanSearchFailed(RollmillError):
    """The search before a training ended without a plan; it has said why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("the search for a plan failed, see above; nothing was written.")
        self.exit_code = exit_code


def without_options(arguments: Sequence[str], names: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    """The arguments without these options and their values."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", dest=name, action="append")
    for name in flags:
        parser.add_argument(f"--{name}", f"--no-{name}", dest=name, action="store_true")
    return parser.parse_known_args(list(arguments))[1]


def training_words(arguments: Sequence[str]) -> list[str]:
    """Arguments of `rollmill train` without those of a search, and without what it decides."""
    names = ("budget", "objective", *DECIDED)
    return without_options(arguments, names, (*FLAGS, *DECIDED_FLAGS))


@contextlib.contextmanager
def planned(arguments: list[str]) -> Iterator[list[str]]:
    """The arguments of a training; if they ask for a search, with the plan that it found in their place.

    The search runs in a process of its own, because it starts JAX with other devices than the training may need.

    Raises:
        UsageError: the search cannot be made; or another error with its exit code, if it failed.
    """
    given = given_options(arguments)
    searches = [word for word in arguments if word in ("--search-plan", "--no-search-plan")]
    if searches[-1:] != ["--search-plan"] or {"-h", "--help"} & set(arguments):
        yield arguments
        return
    SearchOptions(search_plan=True).check(given)
    with temporary_folder("plan") as folder:
        file = folder / "plan.json"
        _search(without_options(arguments, ("run-dir",)), file)
        grows = ("num-envs",) if values_of("--objective", arguments)[-1:] == ["grow-batch"] else ()
        yield [*without_options(training_words(arguments), grows), "--plan", str(file)]


def _search(arguments: Sequence[str], file: Path) -> None:
    trial = ("-m", "rollmill.cli.trial", str(os.getpid()), "")
    search = start_python(*trial, "plan", *arguments, "--output", str(file))
    try:
        code = search.wait()
    except BaseException:
        search.terminate()
        search.wait()
        raise
    if code or not file.is_file():
        raise PlanSearchFailed(code or 1)
