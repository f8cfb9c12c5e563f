"""Population-based training in one program, whose lanes copy each other's states at rungs.

The decisions at a rung depend only on the results. A rung is written first to the file of the population, and then
to the configurations of the runs. The checkpoints of the same iteration contain the states after the copies. A
killed population continues from the newest iteration that all runs have in a checkpoint, and reaches the same
rungs again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PyTree

from rollmill.algorithms.hyperparameters import numbers_of
from rollmill.core.errors import CheckpointError
from rollmill.core.folder import Folder
from rollmill.core.json_data import writable
from rollmill.core.schema import read_as
from rollmill.dataflow import Graph
from rollmill.record.checkpoints import Checkpoints
from rollmill.record.json_files import plain, read_json, write_json
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.saved_run import Change, with_changes
from rollmill.runs.specification import config_from_json, find_algorithm
from rollmill.runs.trust import rewrite_config
from rollmill.training.evolution import Evolution, EvolutionRule, next_rung

EVOLUTION = "evolution.json"
MAX_BYTES = 64 * 2**20


def read_evolution(folder: Path) -> Evolution:
    """Reads the rungs of a population from its folder. Raises a `CheckpointError` if their file is damaged."""
    if not Folder(folder).has(EVOLUTION):
        return Evolution()
    described = read_json(Folder(folder), EVOLUTION, limit=MAX_BYTES)
    return read_as(Evolution, described, where=str(folder / EVOLUTION), error=CheckpointError)


class CommonPoint(NamedTuple):
    """The iteration from which a population continues, and the runs that continue."""

    iteration: int | None
    """The newest iteration of which all members have an intact checkpoint, or None if there is none yet."""
    members: tuple[int, ...]
    """Indices of the runs that have this checkpoint. The other runs were resumed separately."""


def common_point(runs: Sequence[Path]) -> CommonPoint:
    """Finds the newest iteration from which the runs of a population can continue together.

    At least two runs must have an intact checkpoint of that iteration. Any other run must have a newer checkpoint,
    which shows that it was resumed separately, and is left out. Raises a `CheckpointError` if there is no such
    iteration, unless no run has a checkpoint after iteration 0. In that case, all runs start from the beginning.
    """
    everyone = tuple(range(len(runs)))
    stores = {
        number: Checkpoints(RunDirectory(run).checkpoints, read_only=True)
        for number, run in enumerate(runs)
        if run.exists()
    }
    present = {number: set(store.iterations()) for number, store in stores.items()}
    for iteration in sorted(set[int]().union(*present.values()), reverse=True):
        holders = tuple(number for number, each in present.items() if iteration in each)
        ahead = all(max(present.get(number, {0}), default=0) > iteration for number in {*everyone} - {*holders})
        if len(holders) > 1 and ahead and not any(stores[number].check(iteration) for number in holders):
            return CommonPoint(iteration, holders)
    if any(each - {0} for each in present.values()):
        raise CheckpointError(
            f"the trials in {runs[0].parent} have no intact checkpoint in common, so they cannot be resumed "
            "together. hint: `rollmill resume TRIAL` resumes each on its own."
        )
    return CommonPoint(None, everyone)


class Evolving:
    """Decides and records the rungs of a population while it trains."""

    def __init__(
        self, rule: EvolutionRule, folder: Path, graphs: Sequence[Graph], members: Sequence[int], total: int
    ) -> None:
        """`members` are the indices of the graphs among the `total` members that the population began with."""
        first: list[dict[str, Any]] = [{} for _ in range(total)]
        for number, graph in zip(members, graphs, strict=True):
            first[number] = {name: graph.settings["config"][name] for name in rule.names}
        self._rule, self._folder, self._first = rule, folder, first
        self._members = list(members)
        self._evolution = Evolution()
        self._kind = find_algorithm(graphs[0].settings["algorithm"]).config
        self._config = plain(writable(graphs[0].settings["config"]))

    def go_on(self, iteration: int, runs: Sequence[RunDirectory]) -> None:
        """Continues after an iteration, and removes later rungs from the configurations of the runs."""
        self._evolution = read_evolution(self._folder).until(iteration)
        for takeover in (takeover for rung in self._evolution.rungs for takeover in rung.takeovers):
            places = {takeover.training, takeover.source}
            if not places <= set(range(len(self._first))) or takeover.after.keys() != set(self._rule.names):
                raise CheckpointError(
                    f"{self._folder / EVOLUTION} is damaged: a takeover names a trial or a rung that does not "
                    "exist."
                )
        for number, run in zip(self._members, runs, strict=True):
            self._write_run(number, run)

    def rung(
        self,
        iteration: int,
        results: Sequence[float | None],
        runs: Sequence[RunDirectory],
        state: PyTree[Array | np.ndarray],
        *,
        broken: Collection[int] = (),
        only_broken: bool = False,
    ) -> tuple[PyTree[Array | np.ndarray], dict[int, int]]:
        """Decides and records the rung after an iteration. Lanes have the order of `runs`.

        Args:
            iteration: number of completed iterations.
            results: result of each lane.
            runs: run of each lane.
            state: states of all lanes, in host memory.
            broken: lanes with non-finite values, each of which copies another lane.
            only_broken: whether only the broken lanes copy others.

        Returns:
            The states to continue with, without environments, and a dictionary from each lane that copied another
            to the copied lane.
        """
        lane_of = {number: lane for lane, number in enumerate(self._members)}
        every = [results[lane_of[number]] if number in lane_of else None for number in range(len(self._first))]
        rung = next_rung(
            self._rule,
            iteration,
            every,
            self._evolution.values(self._first),
            broken=[self._members[lane] for lane in broken],
            left_out=set(range(len(self._first))) - lane_of.keys(),
            only_broken=only_broken,
        )
        self._evolution = Evolution((*self._evolution.until(iteration - 1).rungs, rung))
        write_json(Folder(self._folder), EVOLUTION, asdict(self._evolution))
        takeovers = {lane_of[takeover.training]: takeover for takeover in rung.takeovers}
        for lane, takeover in takeovers.items():
            self._write_run(takeover.training, runs[lane])
        sources = {lane: lane_of[takeover.source] for lane, takeover in takeovers.items()}
        numbers = {lane: self._numbers(takeover.after) for lane, takeover in takeovers.items()}
        return _hand_on(state, sources, numbers, broken), sources

    def _numbers(self, values: dict[str, Any]) -> dict[str, float]:
        """Returns the values held by a learner for some hyperparameters."""
        config = config_from_json(self._kind, {**self._config, **plain(values)})
        names = values.keys()
        return {key: number for key, number in numbers_of(config).items() if key.partition(":")[0] in names}

    def _write_run(self, number: int, run: RunDirectory) -> None:
        """Writes the hyperparameters of a run, and how it came to them, to its configuration."""
        changes = [
            Change(rung.iteration, takeover.before, takeover.after, source=str(takeover.source))
            for rung in self._evolution.rungs
            for takeover in rung.takeovers
            if takeover.training == number
        ]
        config, values = run.read_config(), self._evolution.values(self._first)[number]
        if not changes and not config.get("changes"):
            return
        described = {**config["graph"], "config": {**config["graph"]["config"], **plain(values)}}
        rewrite_config(run, with_changes({**config, "graph": described}, changes))


def _hand_on(
    state: Any, sources: Mapping[int, int], numbers: Mapping[int, Mapping[str, float]], broken: Collection[int]
) -> Any:
    """Returns the states with copied learners and their new hyperparameters.

    A broken lane also copies the experience of its source.
    """
    if not sources:
        return state
    lanes = np.arange(len(state.iteration))
    lanes[list(sources)] = list(sources.values())
    learner = jax.tree.map(lambda leaf: leaf[lanes], state.learner)
    held = {name: np.array(each) for name, each in learner.hyperparameters.items()}
    for lane, new in numbers.items():
        for name, number in new.items():
            held[name][lane] = number
    learner = eqx.tree_at(lambda learner: learner.hyperparameters, learner, held)
    kept = np.asarray([lanes[lane] if lane in broken else lane for lane in range(len(lanes))])
    rings = jax.tree.map(lambda leaf: leaf[kept], state.rings) if broken else state.rings
    return replace(state, learner=learner, rings=rings)
