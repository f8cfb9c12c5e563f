"""Orders to a command's child processes: train one or several runs, resume a run, search for a plan."""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollmill.core.children import python_environment, start_python
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
    """A search for a plan."""

    request: TrainingRequest
    """The training. Placement that it gives narrows the search."""
    output: str
    """File that the plan is written to."""
    objective: Objective = "keep-batch"
    budget: float = DEFAULT_BUDGET
    """Seconds."""
    fresh: bool = False
    """Search although there is a result of an earlier search."""


@dataclass(frozen=True)
class PopulationOrder:
    """Rules by which the members of a population copy each other."""

    rule: EvolutionRule
    folder: str
    """Directory of their file of rungs."""
    members: tuple[int, ...]
    """Numbers of these members among all."""
    total: int
    """Number of members at the beginning."""


@dataclass(frozen=True)
class Order:
    """An order to a child process: one of its kinds, and what belongs to it."""

    train: TrainingRequest | None = None
    resume: str | None = None
    """The directory of the run to resume."""
    track: tuple[str, ...] = ()
    """Trackers of the run to resume."""
    search: SearchOrder | None = None
    together: tuple[TrainingRequest, ...] = ()
    """Trainings to run side by side in one program."""
    population: PopulationOrder | None = None
    """How these take over from each other, if they do."""

    @property
    def trained(self) -> TrainingRequest:
        """Returns the training request of an order. Raises a `UsageError` if the order has none."""
        if self.train is None:
            raise UsageError(f"{SOURCE} says nothing.")
        return self.train


def read_order(data: bytes) -> Order:
    """Reads an order. Raises a `UsageError` if the data holds none."""
    return read_as(Order, parse_json(data, where=SOURCE, error=UsageError), where=SOURCE, error=UsageError)


def start_child(
    order: Order, *, name: str, cores: Sequence[int] = (), forks: Forks | None = None, **options: Any
) -> Child:
    """Starts a process that does what an order says, with a name for lists of processes, on some or all cores.

    Takes the options of `core.children.start_python`. If `forks` can fork the process, it is in a session of its
    own, and writes errors where it writes its output. A request for a checkpoint never ends the process, not even
    while it starts. Raises an `OSError` if no process can be started.
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
