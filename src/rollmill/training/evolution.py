"""Population-based training: decides which members copy others, and with which hyperparameters.

Jaderberg et al., "Population Based Training of Neural Networks", 2017, with truncation selection: at each rung,
the worst members copy weights, optimiser state and hyperparameters from one of the best, and perturb the
hyperparameters by a factor.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollmill.core.errors import UsageError

FACTORS = (0.8, 1.2)
"""Factors by which a copied numeric hyperparameter is multiplied, chosen at random."""

DEFAULT_SHARE = 0.2
"""Default share of the members that copy others at a rung."""


@dataclass(frozen=True)
class EvolutionRule:
    """Settings of population-based training."""

    every_steps: int
    """Environment steps between two rungs."""
    share: float = DEFAULT_SHARE
    seed: int = 0
    """Seed for the choice of sources and factors."""
    names: tuple[str, ...] = ()
    """Names of the hyperparameters that are copied."""
    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest value of each hyperparameter that is perturbed."""

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise UsageError(f"every_steps={self.every_steps} must be at least 1.")
        if not 0 < self.share <= 0.5:
            raise UsageError(f"share={self.share} must be greater than 0 and at most 0.5.")

    def rung_iterations(self, batch_size: int, iterations: int) -> int:
        """Returns the iterations between two rungs.

        Args:
            batch_size: environment steps of an iteration.
            iterations: number of iterations of a run.

        Raises:
            UsageError: there is no rung before the end.
        """
        every = -(-self.every_steps // batch_size)
        if every >= iterations:
            raise UsageError(
                f"every_steps={self.every_steps:,} is {every:,} iterations, but training has only "
                f"{iterations:,} iterations, so there would be no rung. hint: lower every_steps."
            )
        return every

    def taking_over(self, num_members: int) -> int:
        """Returns the number of members that copy others at a rung."""
        return int(self.share * num_members)


@dataclass(frozen=True)
class Takeover:
    """One member of a population continues with the state of another member."""

    training: int
    source: int
    before: dict[str, Any]
    """The member's hyperparameters before the copy."""
    after: dict[str, Any]
    """The member's hyperparameters after the copy."""


@dataclass(frozen=True)
class Rung:
    """The results of all members of a population at one iteration, and which members then copy others."""

    iteration: int
    results: tuple[float | None, ...]
    takeovers: tuple[Takeover, ...] = ()
    broken: tuple[int, ...] = ()
    """Members with non-finite values at this rung."""


@dataclass(frozen=True)
class Evolution:
    """The rungs of a population so far: iterations after which some members copied others. Stored in a file."""

    rungs: tuple[Rung, ...] = ()

    def until(self, iteration: int) -> "Evolution":
        """Returns the rungs up to and including an iteration."""
        return Evolution(tuple(rung for rung in self.rungs if rung.iteration <= iteration))

    def values(self, first: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the hyperparameters of each member of the population after all rungs, starting from the initial
        values in `first`.
        """
        values = [dict(each) for each in first]
        for takeover in (takeover for rung in self.rungs for takeover in rung.takeovers):
            values[takeover.training] |= takeover.after
        return values


def next_rung(
    rule: EvolutionRule,
    iteration: int,
    results: Sequence[float | None],
    values: Sequence[Mapping[str, Any]],
    *,
    broken: Collection[int] = (),
    left_out: Collection[int] = (),
    only_broken: bool = False,
) -> Rung:
    """Decides which members copy others at a rung. Equal arguments give equal decisions.

    Members with non-finite values count as the worst, and each of them copies another member. Other members
    without a result neither copy nor are copied. If too few members have a result, only the members with
    non-finite values copy others.

    Args:
        rule: rule of the population.
        iteration: number of completed iterations.
        results: result of each member. Larger is better.
        values: hyperparameters of each member.
        broken: members with non-finite values.
        left_out: members that no longer take part.
        only_broken: whether only the broken members copy others.
    """
    results = [None if number in broken else result for number, result in enumerate(results)]
    count = rule.taking_over(len(results))
    ranked = [-number for _, number in sorted((r, -n) for n, r in enumerate(results) if r is not None)]
    losers = ranked[: max(0, count - len(broken))] if len(ranked) >= 2 * count and not only_broken else []
    whole = [number for number in range(len(results)) if number not in {*broken, *left_out}]
    best = (ranked or whole)[-max(count, 1) :]
    source = random.Random(f"{rule.seed} {iteration}")
    takeovers: list[Takeover] = []
    for number in [*sorted(broken), *losers] if best else []:
        chosen = source.choice(best)
        after = {name: _change(rule, name, value, source) for name, value in values[chosen].items()}
        takeovers.append(Takeover(number, chosen, dict(values[number]), after))
    return Rung(iteration, tuple(results), tuple(takeovers), tuple(sorted(broken)))


def _change(rule: EvolutionRule, name: str, value: Any, source: random.Random) -> Any:
    """Returns a hyperparameter times a factor, within its bounds. A hyperparameter without bounds is unchanged."""
    if name not in rule.bounds:
        return value
    low, high = rule.bounds[name]
    return min(max(float(f"{value * source.choice(FACTORS):.6g}"), low), high)
