"""A candidate plan as options of `rollmill train`, with its expected seconds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from rollmill.planning.plan import Place

WIDTHS = ("num_envs", "devices", "learners", "actors", "workers", "instances")
"""Fields along which a branch grows. Candidates that differ in one of them alone are of one branch."""


@dataclass(frozen=True)
class Candidate:
    """Everything that a way to run consists of. None is left to the command's default."""

    distribution: str = "gpu-only"
    place: Place = "program"
    devices: int = 1
    """Devices that share one program."""
    workers: int | None = None
    actors: int | None = None
    learners: int | None = None
    asynchronous: bool = False
    fusion: str | None = None
    num_envs: int | None = None
    """Environments instead of the user's own number, where the batch may grow."""
    gpus: int = 0
    """GPUs that it computes on, or 0 on a machine without."""
    instances: int = 1
    """Instances of each GPU: learners that share it."""

    @property
    def settings(self) -> dict[str, Any]:
        """Returns the fields that differ from the command's defaults, by name.

        GPUs and instances are left out: workers share GPUs if there are fewer.
        """
        default = asdict(Candidate())
        given = {name: value for name, value in asdict(self).items() if value != default[name]}
        return {name: value for name, value in given.items() if name not in ("gpus", "instances")}

    @property
    def given(self) -> dict[str, Any]:
        """Settings of the training request for this candidate, by name."""
        return {"distribution": self.distribution, "place": self.place, **self.settings}

    @property
    def words(self) -> tuple[str, ...]:
        """Returns the candidate as options of `rollmill train`, to print."""
        words: list[str] = []
        for name, value in self.given.items():
            option = f"--{name.replace('_', '-')}"
            words += [option] if value is True else [option, str(value)]
        return tuple(words)

    @property
    def processes(self) -> int:
        """Number of processes, including the coordinator of several."""
        if self.place in ("program", "threads"):
            return 1
        return 1 + sum(count for count in (self.workers, self.actors, self._learning) if count)

    @property
    def ranks(self) -> int:
        """Number of replicas that average their gradients."""
        if self.distribution == "central":
            return self.actors or 1
        return self.devices if self.place == "program" else self._learning

    @property
    def kind(self) -> tuple[str, ...]:
        """Distribution, place, fusion and asynchrony. Candidates of one kind have the same overheads.

        The numbers in `WIDTHS`, such as `devices` and `workers`, do not count.
        """
        return (self.distribution, self.place, self.fusion or "", str(self.asynchronous))

    def branch(self, width: str) -> tuple[Any, ...]:
        """Returns a key shared by all candidates that differ only in this width and its consequences."""
        follows = "learners" if width == "instances" else "gpus"
        return tuple(value for name, value in asdict(self).items() if name not in (width, follows))

    def __str__(self) -> str:
        shown = {"fusion": self.fusion or "auto", **self.settings} if self.place == "program" else self.settings
        rest = [
            name if value is True else f"{name}={value}"
            for name, value in shown.items()
            if name not in ("distribution", "place")
        ]
        place = "" if self.place == "processes" else f" ({self.place})"
        return " ".join([f"{self.distribution}{place}", *rest])

    @property
    def _learning(self) -> int:
        return self.learners or 1


def width_of(candidate: Candidate, width: str) -> int:
    """Returns the value of a width, or 1 if it is not set."""
    value = getattr(candidate, width)
    return 1 if value is None else int(value)


def restricted(found: list[Candidate], fixed: Mapping[str, Any]) -> list[Candidate]:
    """Returns the candidates that have these values. Processes that are to have no kernels say so."""
    chosen = [each for each in found if all(_has(each, name, value) for name, value in fixed.items())]
    if fixed.get("fusion") != "off":
        return chosen
    return [replace(each, fusion="off") if each.fusion is None else each for each in chosen]


def _has(candidate: Candidate, name: str, value: Any) -> bool:
    """Returns whether it has the value. Where fusion is left open, processes and a mesh choose it themselves."""
    own = getattr(candidate, name)
    if name == "fusion" and own is None:
        return value == "auto" or (value == "off" and candidate.place == "processes")
    return bool(own == value)


class StageTimes(NamedTuple):
    """Seconds of the two stages of an iteration, for all environments in one program on one device."""

    collect: float
    learn: float


def placed_seconds(candidate: Candidate, times: StageTimes, *, cores: int) -> float:
    """Returns the seconds of an iteration of a placement, at the same number of environments.

    This is a lower bound: replicas divide their stage evenly among the cores, replicas on a GPU do not slow each
    other down, and messages cost nothing. Stages that wait for each other run one after another. A search corrects
    the estimate by its first measurement of each kind.
    """
    collecting = min(_collecting(candidate), cores)
    learning = min(candidate.ranks, cores)
    collect, learn = times.collect / collecting, times.learn / learning
    return max(collect, learn) if candidate.asynchronous else collect + learn


def _collecting(candidate: Candidate) -> int:
    """Replicas that collect side by side."""
    if candidate.distribution in ("single-learner-coarse", "central"):
        return candidate.actors or 1
    return max(candidate.workers or 1, candidate.ranks)
