"""Candidate plans as options of `rollmill train`, and estimates of their speed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from rollmill.planning.placement import ActorDevice
from rollmill.planning.plan import Place

WIDTHS = ("num_envs", "devices", "learners", "actors", "workers", "instances")
"""Fields of a candidate along which a branch grows. Candidates of one branch differ in only one of them."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a training job. None leaves a field to the default of `rollmill train`."""

    distribution: str = "gpu-only"
    place: Place = "program"
    devices: int = 1
    """Number of devices that share one program."""
    workers: int | None = None
    actors: int | None = None
    learners: int | None = None
    asynchronous: bool = False
    actors_on: ActorDevice | None = None
    fusion: str | None = None
    num_envs: int | None = None
    """Number of environments if it differs from the user's, which only `grow-batch` allows. Otherwise None."""
    gpus: int = 0
    """Number of GPUs that the candidate uses, or 0 on a machine without GPUs."""
    instances: int = 1
    """Number of learners that share each GPU."""

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that differ from the defaults of `rollmill train`, by name.

        GPUs and instances are left out, because workers share GPUs automatically if there are fewer GPUs than
        workers.
        """
        default = asdict(Candidate())
        given = {name: value for name, value in asdict(self).items() if value != default[name]}
        return {name: value for name, value in given.items() if name not in ("gpus", "instances")}

    @property
    def given(self) -> dict[str, Any]:
        """The options of a `TrainingRequest` that select this candidate, by name."""
        return {"distribution": self.distribution, "place": self.place, **self.settings}

    @property
    def words(self) -> tuple[str, ...]:
        """The candidate as command-line options of `rollmill train`, for printing."""
        words: list[str] = []
        for name, value in self.given.items():
            option = f"--{name.replace('_', '-')}"
            words += [option] if value is True else [option, str(value)]
        return tuple(words)

    @property
    def processes(self) -> int:
        """Number of processes, including the coordinator if there are several."""
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
        """Key of distribution policy, place, fusion, asynchrony and the actors' device.

        Candidates of one kind have similar overheads. The fields in `WIDTHS`, such as `devices` and `workers`, are
        not part of the kind.
        """
        return (
            self.distribution,
            self.place,
            self.fusion or "",
            str(self.asynchronous),
            self.actors_on or "",
        )

    def branch(self, width: str) -> tuple[Any, ...]:
        """Returns a key shared by all candidates that differ only in the field `width` and in fields derived from
        it.
        """
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
    """Returns the value of a field in `WIDTHS`, or 1 if the candidate does not set it."""
    value = getattr(candidate, width)
    return 1 if value is None else int(value)


def select_candidates(found: list[Candidate], fixed: Mapping[str, Any]) -> list[Candidate]:
    """Returns the candidates whose fields have the values in `fixed`.

    If `fusion` is fixed to `off`, the result sets it explicitly in candidates that leave it open.
    """
    chosen = [each for each in found if all(_has(each, name, value) for name, value in fixed.items())]
    if fixed.get("fusion") != "off":
        return chosen
    return [replace(each, fusion="off") if each.fusion is None else each for each in chosen]


def _has(candidate: Candidate, name: str, value: Any) -> bool:
    """Returns whether a candidate has a value. If no fusion is set, processes and a mesh choose it themselves."""
    own = getattr(candidate, name)
    if name == "fusion" and own is None:
        return value == "auto" or (value == "off" and candidate.place == "processes")
    return bool(own == value)


class StageTimes(NamedTuple):
    """Seconds of collecting and learning in an iteration, with all environments in one program on one device."""

    collect: float
    learn: float


def placed_seconds(candidate: Candidate, times: StageTimes, *, cores: int) -> float:
    """Estimates the seconds of an iteration under a candidate's placement, with the same number of environments.

    The estimate is a lower bound: replicas divide their stage evenly among the cores, replicas on a GPU do not
    slow each other down, and messages cost nothing. Stages that wait for each other run one after another. A
    search corrects the estimate with its first measurement of each kind of candidate.
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
