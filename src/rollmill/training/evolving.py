"""Population-based training in one program: states are handed on between its lanes at rungs.

A rung depends only on the results. It is written to the file of the population, then to the configurations
of the runs, and the checkpoints of its iteration hold the states after it. A killed population continues from the
newest iteration checkpointed by all runs, and reaches the same rungs.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
from rollmill.training.evolution import Evolution, EvolutionRule, Rung, next_rung

EVOLUTION = "evolution.json"
MAX_BYTES = 64 * 2**20


def read_evolution(folder: Path) -> Evolution:
    """Returns the rungs of a population. Raises a `CheckpointError` if their file is damaged."""
    if not Folder(folder).has(EVOLUTION):
        return Evolution()
    described = read_json(Folder(folder), EVOLUTION, limit=MAX_BYTES)
    return read_as(Evolution, described, where=str(folder / EVOLUTION), error=CheckpointError)


def common_iteration(runs: Sequence[Path]) -> int | None:
    """Returns the newest iteration of which all runs have an intact checkpoint; None before there is one.

    Raises a `CheckpointError` if runs have checkpoints, and none in common.
    """
    stores = [Checkpoints(RunDirectory(run).checkpoints, read_only=True) for run in runs if run.exists()]
    present = [set(store.iterations()) for store in stores]
    if len(stores) == len(runs):
        for iteration in sorted(set.intersection(*present), reverse=True):
            if not any(store.check(iteration) for store in stores):
                return iteration
    if any(each - {0} for each in present):
        raise CheckpointError(
            f"the trials in {runs[0].parent} have no intact checkpoint in common, so that they cannot go on "
            "together. hint: each goes on alone by `rollmill resume TRIAL`."
        )
    return None


class Evolving:
    """A population with members that copy each other."""

    def __init__(self, rule: EvolutionRule, folder: Path, graphs: Sequence[Graph]) -> None:
        first = [{name: graph.settings["config"][name] for name in rule.names} for graph in graphs]
        self._rule, self._folder, self._first = rule, folder, first
        self._evolution = Evolution()
        self._kind = find_algorithm(graphs[0].settings["algorithm"]).config
        self._config = plain(writable(graphs[0].settings["config"]))

    def go_on(self, iteration: int, runs: Sequence[RunDirectory]) -> None:
        """Continues after this iteration, and removes later rungs from the runs' configurations."""
        self._evolution = read_evolution(self._folder).until(iteration)
        for takeover in (takeover for rung in self._evolution.rungs for takeover in rung.takeovers):
            places = {takeover.training, takeover.source}
            if not places <= set(range(len(runs))) or takeover.after.keys() != set(self._rule.names):
                raise CheckpointError(
                    f"{self._folder / EVOLUTION} is damaged: a takeover names what is not there."
                )
        for number, run in enumerate(runs):
            self._write_run(number, run)

    def rung(
        self,
        iteration: int,
        results: Sequence[float | None],
        runs: Sequence[RunDirectory],
        state: PyTree[Array | np.ndarray],
    ) -> PyTree[Array | np.ndarray]:
        """Decides and records the rung after this iteration.

        Args:
            iteration: number of completed iterations.
            results: result of each member.
            runs: run of each member.
            state: states of all members, on the host.

        Returns:
            The states to continue with.
        """
        rung = next_rung(self._rule, iteration, results, self._evolution.values(self._first))
        self._evolution = Evolution((*self._evolution.rungs, rung))
        write_json(Folder(self._folder), EVOLUTION, asdict(self._evolution))
        for takeover in rung.takeovers:
            self._write_run(takeover.training, runs[takeover.training])
        return self._handed_on(rung, state)

    def _handed_on(self, rung: Rung, state: Any) -> Any:
        """Returns the states with copied learners and their new hyperparameters."""
        if not rung.takeovers:
            return state
        sources = np.arange(len(rung.results))
        for takeover in rung.takeovers:
            sources[takeover.training] = takeover.source
        learner = jax.tree.map(lambda leaf: leaf[sources], state.learner)
        held = {name: np.array(numbers) for name, numbers in learner.hyperparameters.items()}
        for takeover in rung.takeovers:
            for name, number in self._numbers(takeover.after).items():
                held[name][takeover.training] = number
        learner = eqx.tree_at(lambda learner: learner.hyperparameters, learner, held)
        return eqx.tree_at(lambda state: state.learner, state, learner)

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
