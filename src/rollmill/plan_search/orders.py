"""Orders that a command sends to its child processes: to train or resume runs, or to search for a plan."""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollmill.core.child_processes import python_environment, start_python
from rollmill.core.errors import UsageError
from rollmill.core.interruption import holding_checkpoint_requests
from rollmill.core.json_data import parse_json, writable
from rollmill.core.schema import read_as
from rollmill.plan_search.search.machine import DEFAULT_BUDGET, Objective
from rollmill.processes.forks import Child, Forks
from rollmill.record.json_files import plain
from rollmill.training.evolution import EvolutionRule
from rollmill.training.request import TrainingRequest

MODULE = "rollmill.cli.child"
SOURCE = "the order"


@dataclass(frozen=True)
class SearchOrder:
    """An order to search for the fastest plan of a run."""

    request: TrainingRequest
    """The run to plan. Placement options that it contains narrow the search."""
    output: str
    """Path of the file to which the plan is written."""
    objective: Objective = "keep-batch"
    budget: float = DEFAULT_BUDGET
    """Maximum duration of the search in seconds."""
    fresh: bool = False
    """True to search again even if the result of an earlier search is stored."""


@dataclass(frozen=True)
class PopulationOrder:
    """The part of an order that describes population-based training: its rule and its members."""

    rule: EvolutionRule
    folder: str
    """Directory of the file in which the population records its rungs."""
    members: tuple[int, ...]
    """Numbers of the members to train, among all members of the population."""
    total: int
    """Number of members with which the population began."""


@dataclass(frozen=True)
class Order:
    """An order that a child process reads from its standard input: to train, to resume, or to search."""

    train: TrainingRequest | None = None
    resume: str | None = None
    """Directory of the run to resume, or None."""
    track: tuple[str, ...] = ()
    """Names of the trackers of the run to resume."""
    search: SearchOrder | None = None
    together: tuple[TrainingRequest, ...] = ()
    """Runs to train side by side in one program."""
    population: PopulationOrder | None = None
    """Rules by which the runs in `together` copy each other, or None."""

    @property
    def trained(self) -> TrainingRequest:
        """The run to train. Raises a `UsageError` if the order contains none."""
        if self.train is None:
            raise UsageError(f"{SOURCE} says nothing.")
        return self.train


def read_order(data: bytes) -> Order:
    """Reads an order from JSON. Raises a `UsageError` if the data does not contain one."""
    return read_as(Order, parse_json(data, where=SOURCE, error=UsageError), where=SOURCE, error=UsageError)


def start_child(
    order: Order, *, name: str, cores: Sequence[int] = (), forks: Forks | None = None, **options: Any
) -> Child:
    """Starts a process that carries out an order.

    Args:
        order: what the process does.
        name: name of the process in process lists.
        cores: numbers of the cores to run on. Default: all cores.
        forks: forks the process, if possible. A forked process has its own session, and writes errors to its
            output.
        **options: options of `core.child_processes.start_python`.

    Returns:
        The process. A signal that requests a checkpoint never ends it, even while it starts.

    Raises:
        OSError: no process can be started.
    """
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(plain(writable(asdict(order)))).encode())
        file.seek(0)
        words = (",".join(map(str, cores)), name)
        if forks is not None:
            environment = python_environment(options["variables"])
            open_files = [file.fileno(), options["stdout"].fileno(), *options["pass_fds"]]
            if (child := forks.start(words, environment, open_files)) is not None:
                return child
        with holding_checkpoint_requests():
            return start_python("-m", MODULE, str(os.getpid()), *words, stdin=file, **options)
