"""Represents the values of actions as means, or as distributions of returns (C51 and quantile regression).

Shape letters: `n` actions, `K` atoms of a distribution.
"""

from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rollmill.core.errors import UsageError

ValueDistribution: TypeAlias = Literal["none", "c51", "quantiles"]

ATOMS = 51
"""Atoms of a distribution, as published for C51."""

SUPPORT = (-100.0, 100.0)
"""Least and greatest return of C51's atoms, for returns of a hundred steps with rewards of 1 (CleanRL)."""

KAPPA = 1.0
"""Error at which the quantile loss turns from a square into a line, as published."""


class ValueLoss(NamedTuple):
    """Loss and error from comparing an action's value with its target."""

    loss: Float[Array, ""]
    error: Float[Array, ""]
    """Error that determines the priority of a transition."""
    clipped: Float[Array, ""] | None = None
    """Probability of targets outside the range of returns, which are moved to its ends. None without a range."""


@runtime_checkable
class ValueHead(Protocol):
    """Protocol that interprets the outputs of an action-value network."""

    @property
    def atoms(self) -> int | None:
        """Number of outputs per action, or None for a single number without an axis."""
        ...

    def means(self, outputs: Float[Array, "n ..."], /) -> Float[Array, " n"]:
        """Returns the expected return of each action, given the network's outputs."""
        ...

    def compare(
        self,
        outputs: Float[Array, "..."],
        next_outputs: Float[Array, "..."],
        reward: Float[Array, ""],
        discount: Float[Array, ""],
        /,
    ) -> ValueLoss:
        """Compares an action's outputs with a target, given the target network's outputs for the next action."""
        ...


class Mean(NamedTuple):
    """A `ValueHead` whose outputs are expected returns (Mnih et al., 2015)."""

    huber: bool
    """Whether the slope of the loss is bounded at 1."""

    @property
    def atoms(self) -> int | None:
        """None, because each action has a single number without an axis."""
        return None

    def means(self, outputs: Float[Array, " n"], /) -> Float[Array, " n"]:
        """Returns the outputs themselves, which are the expected returns of the actions."""
        return outputs

    def compare(
        self,
        outputs: Float[Array, ""],
        next_outputs: Float[Array, ""],
        reward: Float[Array, ""],
        discount: Float[Array, ""],
        /,
    ) -> ValueLoss:
        """Compares an action's value with its target. The error is the temporal difference."""
        error = jax.lax.stop_gradient(reward + discount * next_outputs) - outputs
        squared = 0.5 * jnp.square(error)
        size = jnp.abs(error)
        return ValueLoss(jnp.where(size <= 1, squared, size - 0.5) if self.huber else squared, error)


class CategoricalReturns(NamedTuple):
    """A `ValueHead` whose outputs are logits of fixed returns, the atoms (Bellemare et al., "C51", ICML 2017)."""

    size: int
    low: float
    high: float

    @property
    def atoms(self) -> int | None:
        """Number of atoms for each action."""
        return self.size

    @property
    def support(self) -> Float[Array, " K"]:
        """The return that each atom stands for, in increasing order."""
        return jnp.linspace(self.low, self.high, self.size, dtype=jnp.float32)

    def means(self, outputs: Float[Array, "n K"], /) -> Float[Array, " n"]:
        """Returns the expected return of each action: the mean of the atoms under their probabilities."""
        return jnp.sum(jax.nn.softmax(outputs) * self.support[None], axis=-1)

    def projected(
        self, probabilities: Float[Array, " K"], reward: Float[Array, ""], discount: Float[Array, ""]
    ) -> Float[Array, " K"]:
        """Returns the distribution of `reward + discount * return` on the atoms (algorithm 1 of the C51 paper).

        The probability of each shifted atom is divided between the two atoms nearest to it.
        """
        gap = (self.high - self.low) / (self.size - 1)
        moved = jnp.clip(reward + discount * self.support, self.low, self.high)
        distance = jnp.abs(moved[:, None] - self.support[None, :]) / gap
        return jnp.sum(probabilities[:, None] * jnp.maximum(1 - distance, 0), axis=0)

    def clipped(
        self, probabilities: Float[Array, " K"], reward: Float[Array, ""], discount: Float[Array, ""]
    ) -> Float[Array, ""]:
        """Returns the probability that `reward + discount * return` lies outside the range of the atoms.

        Differences within rounding do not count.
        """
        margin = 1e-3 * (self.high - self.low) / (self.size - 1)
        moved = reward + discount * self.support
        beyond = (moved < self.low - margin) | (moved > self.high + margin)
        return jnp.sum(probabilities * beyond.astype(jnp.float32))

    def compare(
        self,
        outputs: Float[Array, " K"],
        next_outputs: Float[Array, " K"],
        reward: Float[Array, ""],
        discount: Float[Array, ""],
        /,
    ) -> ValueLoss:
        """Compares an action's distribution with its projected target. Loss and error are the KL divergence."""
        target = jax.lax.stop_gradient(self.projected(jax.nn.softmax(next_outputs), reward, discount))
        # The target's entropy has no gradient. It makes the loss of a perfect prediction zero.
        log_target = jnp.log(jnp.maximum(target, 1e-30))
        loss = jnp.sum(target * (log_target - jax.nn.log_softmax(outputs)))
        return ValueLoss(loss, loss, self.clipped(jax.nn.softmax(next_outputs), reward, discount))


class Quantiles(NamedTuple):
    """A `ValueHead` whose outputs are quantiles of returns (Dabney et al., "QR-DQN", AAAI 2018)."""

    size: int

    @property
    def atoms(self) -> int | None:
        """Number of quantiles for each action."""
        return self.size

    def means(self, outputs: Float[Array, "n K"], /) -> Float[Array, " n"]:
        """Returns the expected return of each action: the mean of its quantiles."""
        return jnp.mean(outputs, axis=-1)

    def compare(
        self,
        outputs: Float[Array, " K"],
        next_outputs: Float[Array, " K"],
        reward: Float[Array, ""],
        discount: Float[Array, ""],
        /,
    ) -> ValueLoss:
        """Compares an action's quantiles with its target's. Loss and error are the quantile Huber loss."""
        target = jax.lax.stop_gradient(reward + discount * next_outputs)
        error = target[None, :] - outputs[:, None]
        size = jnp.abs(error)
        huber = jnp.where(size <= KAPPA, 0.5 * jnp.square(error), KAPPA * (size - 0.5 * KAPPA)) / KAPPA
        level = (jnp.arange(self.size, dtype=jnp.float32) + 0.5) / self.size
        slope = jnp.abs(level[:, None] - (error < 0).astype(jnp.float32))
        loss = jnp.sum(slope * huber) / self.size
        return ValueLoss(loss, loss)


def bounds_of_returns(low: float | None, high: float | None) -> tuple[float, float]:
    """Returns the least and the greatest return of C51's atoms. A bound of None is that of `SUPPORT`."""
    return SUPPORT[0] if low is None else low, SUPPORT[1] if high is None else high


def value_head(
    kind: ValueDistribution, *, huber: bool, atoms: int | None, low: float | None, high: float | None
) -> ValueHead:
    """Returns the `ValueHead` of a kind: `none`, `c51` or `quantiles`.

    Raises a `UsageError` for options that the kind does not use, or for an empty range of returns.
    """
    unread = {"c51": {"huber": huber or None}, "quantiles": {"huber": huber or None}, "none": {"num_atoms": atoms}}
    if kind != "c51":
        unread[kind] |= {"min_value": low, "max_value": high}
    for name, value in unread[kind].items():
        if value is not None:
            readers = {"huber": "none", "num_atoms": "c51 or quantiles"}.get(name, "c51")
            raise UsageError(
                f"{name}={value} has no effect with value_distribution={kind}. hint: leave {name} out, or use "
                f"value_distribution={readers}."
            )
    if kind == "none":
        return Mean(huber)
    size = ATOMS if atoms is None else atoms
    if kind == "quantiles":
        return Quantiles(size)
    low, high = bounds_of_returns(low, high)
    if not low < high:
        raise UsageError(
            f"min_value={low:g} must be less than max_value={high:g}, because they are the bounds of the returns."
        )
    return CategoricalReturns(size, low, high)
