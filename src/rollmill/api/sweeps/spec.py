"""The description of a sweep, as `sweep.json` holds it, and the trials that follow from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollmill.core.errors import UsageError
from rollmill.planning import Axis, HalvingRule

QUIETLY = ("--no-tensorboard", "--quiet")
MOST_SEEDS = 2**14
"""Seeds of one run."""
TRUTHS = {"true": True, "True": True, "false": False, "False": False}


@dataclass(frozen=True)
class Trial:
    """One training of a sweep."""

    name: str
    point: dict[str, str]
    """The values that it was given, by option."""
    words: tuple[str, ...]
    """Arguments of `rollmill train`, without the directory."""

    @property
    def seeds(self) -> range | None:
        """The seeds that it trains in one program, where they are grouped."""
        return seeds_of(self.point.get("seed", ""))

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(f'{option}={value}' for option, value in self.point.items())})"


@dataclass(frozen=True)
class SweepSpec:
    """All that a sweep was asked for; it never changes."""

    algorithm: str
    environment: str
    options: tuple[str, ...]
    """Words of `rollmill train` that all trials have in common."""
    axes: tuple[Axis, ...]
    num_trials: int
    points: tuple[tuple[str, ...], ...] = ()
    """Values of each trial, in the order of the axes; empty if a sampler proposes them."""
    sampler: str | None = None
    """Proposes the values of the trials, from the results of those before."""
    seed: int = 0
    """Seed of draws and proposals."""
    metric: str = "final_return"
    """Result by which trials are compared; the largest is the best."""
    flags: tuple[str, ...] = ()
    """Options of the axes that are given as `--NAME` or `--no-NAME`."""
    lists: tuple[str, ...] = ()
    """Options of the axes whose values have several words."""
    early_stopping: HalvingRule | None = None

    @property
    def options_varied(self) -> tuple[str, ...]:
        """Names of the options that differ from trial to trial."""
        return tuple(axis.option for axis in self.axes)

    def trials(self, points: Sequence[Sequence[str]]) -> list[Trial]:
        """The trials with these values, which are all trials so far."""
        width = len(str(self.num_trials - 1))
        named = [dict(zip(self.options_varied, point, strict=True)) for point in points]
        return [Trial(f"{index:0{width}}", point, self.words(point)) for index, point in enumerate(named)]

    def words(self, point: Mapping[str, str]) -> tuple[str, ...]:
        """Arguments of `rollmill train` for one combination of values.

        Raises:
            UsageError: a flag is neither true nor false.
        """
        environment, given = self.environment, []
        for option, value in point.items():
            if option == "environment":
                environment = value
            elif option.startswith("env-option."):
                given += ["--env-option", f"{option.removeprefix('env-option.')}={value}"]
            elif option == "seed" and (seeds := seeds_of(value)) is not None:
                given += ["--seed", str(seeds.start), "--num-seeds", str(len(seeds))]
            elif option in self.flags:
                given.append(flag(option, value))
            else:
                given += [f"--{option}", *(value.split() if option in self.lists else [value])]
        return (self.algorithm, environment, *self.options, *QUIETLY, *given)


def seeds_of(text: str) -> range | None:
    """The seeds of `FIRST..LAST`; None if the text is of another form.

    Raises:
        UsageError: there are none, or more than a run can have.
    """
    first, dots, last = text.partition("..")
    if not (dots and first.isdecimal() and last.isdecimal()):
        return None
    seeds = range(int(first), int(last) + 1)
    if not 1 <= len(seeds) <= MOST_SEEDS:
        raise UsageError(f"seed={text} has to be at least one seed, and at most {MOST_SEEDS:,}.")
    return seeds


def flag(option: str, value: str) -> str:
    """The word for an option that is on or off: `--anneal-lr`, `--no-anneal-lr`, `--network.no-shared-torso`.

    Raises:
        UsageError: the value is neither true nor false.
    """
    if value not in TRUTHS:
        raise UsageError(f"{option}={value} has to be true or false.")
    holder, dot, name = option.rpartition(".")
    return f"--{holder}{dot}{name}" if TRUTHS[value] else f"--{holder}{dot}no-{name}"
