"""The specification of a sweep, as stored in `sweep.json`, and its trials."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rollmill.core.json_data import writable
from rollmill.sweeps.halving import HalvingRule
from rollmill.sweeps.search_space import Axis
from rollmill.training.evolution import EvolutionRule
from rollmill.training.request import TrainingRequest, seeds_of

QUIETLY = {"tensorboard": False, "quiet": True}
"""Settings of all trials that suppress their output, since the sweep's report contains their curves."""


@dataclass(frozen=True)
class Trial:
    """One trial of a sweep, with its name and its values."""

    name: str
    point: dict[str, Any]
    """Values of the trial by option."""
    request: TrainingRequest
    """Training request of the trial, without its run directory."""

    @property
    def seeds(self) -> range | None:
        """The seeds that the trial trains in one program, if seeds are grouped."""
        return seeds_of(self.point.get("seed"))

    def __str__(self) -> str:
        values = (f"{option}={text_of(value)}" for option, value in self.point.items())
        return f"{self.name} ({', '.join(values)})"


DEFAULTS = 1
"""Version of the default hyperparameters. A sweep without this field was created when PPO did not normalise
observations by default."""


@dataclass(frozen=True)
class SweepSpec:
    """The specification of a sweep: the request of all trials and the varied options. It never changes."""

    request: TrainingRequest
    """The settings that all trials have in common."""
    axes: tuple[Axis, ...]
    num_trials: int
    points: tuple[tuple[Any, ...], ...] = ()
    """Values of each trial in the order of the axes. Empty if a sampler proposes them."""
    sampler: str | None = None
    """Name of the Optuna sampler that proposes values, or None."""
    seed: int = 0
    """Seed of random and proposed values."""
    metric: str = "final_return"
    """Result by which trials are compared. The largest is the best."""
    early_stopping: HalvingRule | None = None
    evolution: EvolutionRule | None = None
    """Settings of population-based training, or None."""
    defaults: int = DEFAULTS
    """Version of the default hyperparameters that the sweep uses."""
    import_files: dict[str, str] = field(default_factory=dict)
    """Files of the modules that the trials import and that are not installed."""

    @property
    def options_varied(self) -> tuple[str, ...]:
        """Names of the options that differ between trials."""
        return tuple(axis.option for axis in self.axes)

    def trials(self, points: Sequence[Sequence[Any]]) -> list[Trial]:
        """Returns the trials with these values, in the same order."""
        width = len(str(self.num_trials - 1))
        named = [dict(zip(self.options_varied, hashable(point), strict=True)) for point in points]
        return [Trial(f"{index:0{width}}", point, self.request_at(point)) for index, point in enumerate(named)]

    def request_at(self, point: Mapping[str, Any]) -> TrainingRequest:
        """Returns the training request for one combination of values. Raises a `UsageError` if its seeds are
        invalid.
        """
        return self.request.changed(QUIETLY).at(point)

    def to_json(self) -> dict[str, Any]:
        """Returns the specification as a JSON object."""
        return writable(asdict(self)) | {"axes": [writable(axis) for axis in self.axes]}


def hashable(value: Any) -> Any:
    """Converts a JSON value to a hashable value, with tuples instead of lists, in order to compare points."""
    return tuple(map(hashable, value)) if isinstance(value, list | tuple) else value


def text_of(value: Any) -> str:
    """Returns a value as tables show it: `64 64` for a list of layer sizes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(map(text_of, value)) if isinstance(value, list | tuple) else str(value)
