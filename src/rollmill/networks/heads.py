"""Action heads, which map features to a distribution over the action space.

Their weights are initialised orthogonally with a gain of 0.01, so that the first policy is nearly uniform
(Andrychowicz et al. 2021, "What Matters for On-Policy Deep Actor-Critic Methods?").
"""

import math
from typing import Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Float

from rollmill.core.errors import UsageError
from rollmill.core.spaces import space_text
from rollmill.core.types import Key
from rollmill.networks.base import Distribution, LegalActions
from rollmill.networks.distributions import (
    MASKED_LOGIT,
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    TanhGaussian,
)
from rollmill.networks.layers import Linear, linear

POLICY_GAIN = 0.01
LOG_STD_RANGE = (-5.0, 2.0)


@runtime_checkable
class ActionHead(Protocol):
    """Protocol of an actor's last layer, which maps features to an action distribution."""

    def __call__(self, features: Float[Array, " features"], action_mask: LegalActions = None, /) -> Distribution:
        """Returns the action distribution. True in `action_mask` marks a legal action."""
        ...


class CategoricalHead(eqx.Module):
    """Action head for `Discrete` spaces. Logits and masks are `[n]`."""

    layer: Linear
    start: int = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)

    def __call__(self, features: Float[Array, " features"], action_mask: LegalActions = None) -> Categorical:
        """Returns the distribution over the legal choices."""
        return Categorical(_mask(self.layer(features), action_mask), self.start, self.dtype)


class MultiCategoricalHead(eqx.Module):
    """Action head for `MultiDiscrete` spaces. Logits and masks are `[*shape, max(nvec)]`.

    Logits beyond a choice's number of categories are minus infinity, regardless of the action mask.
    """

    layer: Linear
    sizes: tuple[int, ...] = eqx.field(static=True)
    start: tuple[int, ...] = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)

    def __call__(self, features: Float[Array, " features"], action_mask: LegalActions = None) -> MultiCategorical:
        """Returns the distribution over the legal choices."""
        padded = (*self.shape, max(self.sizes))
        is_choice = np.arange(max(self.sizes)) < np.asarray(self.sizes)[:, None]
        # Padding comes last and is infinite, whereas masked logits are finite. A choice without legal values
        # therefore
        # never becomes padding.
        logits = _mask(self.layer(features).reshape(padded), action_mask)
        logits = jnp.where(jnp.asarray(is_choice.reshape(padded)), logits, -jnp.inf)
        return MultiCategorical(logits, self.start, self.dtype)


class BernoulliHead(eqx.Module):
    """Action head for `MultiBinary` spaces, with one logit per bit."""

    layer: Linear
    shape: tuple[int, ...] = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)

    def __call__(self, features: Float[Array, " features"], action_mask: LegalActions = None) -> Bernoulli:
        """Returns the distribution over the bits."""
        _refuse_mask(action_mask, "MultiBinary")
        return Bernoulli(self.layer(features).reshape(self.shape), self.dtype)


class FreeLogStd(eqx.Module):
    """A learned log standard deviation that does not depend on the state."""

    weight: Float[Array, " size"]

    def __call__(self, features: Float[Array, " features"]) -> Float[Array, " size"]:
        """Returns the weight, whatever the features."""
        return self.weight


class FixedLogStd(eqx.Module):
    """A constant logarithm of the standard deviation, which is not trained."""

    weight: Float[Array, " size"]

    def __call__(self, features: Float[Array, " features"]) -> Float[Array, " size"]:
        """Returns the weight, which has no gradient, whatever the features."""
        return jax.lax.stop_gradient(self.weight)


class StateLogStd(eqx.Module):
    """A log standard deviation computed from the features and clipped to [-5, 2]."""

    layer: Linear

    def __call__(self, features: Float[Array, " features"]) -> Float[Array, " size"]:
        """Returns the clipped output of the layer."""
        return jnp.clip(self.layer(features), *LOG_STD_RANGE)


class GaussianHead(eqx.Module):
    """Action head for `Box` spaces of any shape: a Gaussian, or a `TanhGaussian` within the bounds.

    Samples of the plain Gaussian may exceed the bounds of a `Box`. They are clipped when the environment is
    stepped, not here. Store the unclipped action, and use it for log-probabilities.
    """

    mean: Linear
    log_std: FreeLogStd | FixedLogStd | StateLogStd
    shape: tuple[int, ...] = eqx.field(static=True)
    bounds: tuple[tuple[float, ...], tuple[float, ...]] | None = eqx.field(static=True)

    def __call__(
        self, features: Float[Array, " features"], action_mask: LegalActions = None
    ) -> DiagonalGaussian | TanhGaussian:
        """Returns the distribution over actions, float32 in the shape of the space."""
        _refuse_mask(action_mask, "Box")
        mean, log_std = self.mean(features).reshape(self.shape), self.log_std(features).reshape(self.shape)
        return TanhGaussian(mean, log_std, *self.bounds) if self.bounds else DiagonalGaussian(mean, log_std)


def action_head(
    key: Key,
    space: spaces.Space,
    in_features: int,
    *,
    state_dependent_std: bool = False,
    squash: bool = False,
    initial_log_std: float = 0.0,
    learn_std: bool = True,
) -> ActionHead:
    """Makes the head for an action space. The last four options apply to a `Box` only.

    Args:
        key: random key of the weights.
        space: `Discrete`, `MultiDiscrete`, `MultiBinary` or a `Box` of floats.
        in_features: length of the feature vector.
        state_dependent_std: compute the log standard deviation from the features, clipped to [-5, 2], instead of
            learning one for all states.
        squash: keep actions within the bounds with a `TanhGaussian`.
        initial_log_std: initial log standard deviation.
        learn_std: learn the standard deviation. Otherwise it keeps its initial value.

    Raises:
        UsageError: the space is of another kind, or `squash` is set and it has no bounds.
    """
    dtype = jax.dtypes.canonicalize_dtype(space.dtype) if space.dtype else np.dtype(np.float32)
    match space:
        case spaces.Discrete():
            layer = linear(key, in_features, int(space.n), gain=POLICY_GAIN)
            return CategoricalHead(layer, int(space.start), dtype)
        case spaces.MultiDiscrete():
            sizes, start = (_integers(np.broadcast_to(v, space.shape)) for v in (space.nvec, space.start))
            layer = linear(key, in_features, len(sizes) * max(sizes), gain=POLICY_GAIN)
            return MultiCategoricalHead(layer, sizes, start, space.shape, dtype)
        case spaces.MultiBinary():
            layer = linear(key, in_features, math.prod(space.shape), gain=POLICY_GAIN)
            return BernoulliHead(layer, space.shape, dtype)
        case spaces.Box() if np.issubdtype(dtype, np.floating):
            mean_key, std_key = jax.random.split(key)
            mean = linear(mean_key, in_features, math.prod(space.shape), gain=POLICY_GAIN)
            log_std = _log_std(std_key, mean, initial_log_std, state_dependent=state_dependent_std)
            log_std = FixedLogStd(log_std.weight) if isinstance(log_std, FreeLogStd) and not learn_std else log_std
            return GaussianHead(mean, log_std, space.shape, finite_bounds(space) if squash else None)
    raise UsageError(
        f"the action space {space_text(space)} is not supported. Supported: Discrete, MultiDiscrete, "
        "MultiBinary and Box of floats. hint: flatten a Dict or Tuple into one of these in the environment."
    )


def _log_std(key: Key, mean: Linear, initial: float, *, state_dependent: bool) -> FreeLogStd | StateLogStd:
    start = jnp.full(mean.bias.shape, initial, jnp.float32)
    if not state_dependent:
        return FreeLogStd(start)
    layer = linear(key, *mean.weight.shape, gain=POLICY_GAIN)
    return StateLogStd(Linear(layer.weight, layer.bias + start))


def finite_bounds(space: spaces.Box) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the lower and upper bounds of a `Box`, flattened.

    Raises a `UsageError` if a bound is infinite, or if a lower bound is not less than its upper bound.
    """
    low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (space.low, space.high))
    # A range that overflows float32 counts as unbounded, because some environments give the largest float as
    # bound.
    if not np.all((high > low) & (high - low <= np.finfo(np.float32).max)):
        raise UsageError(
            "squash_actions needs a finite lower bound and a larger upper bound for every action, got "
            f"{space_text(space)}. hint: give the Box such bounds, or leave squash_actions off."
        )
    return tuple(low.tolist()), tuple(high.tolist())


def _mask(logits: Float[Array, "..."], mask: LegalActions) -> Float[Array, "..."]:
    """Sets the logits of illegal choices to `MASKED_LOGIT`. If no choice is legal, all are equally likely."""
    if mask is None or isinstance(mask, tuple):
        return logits
    if mask.shape != logits.shape:
        raise UsageError(f"the action mask has shape {mask.shape}, but the logits have shape {logits.shape}.")
    return jnp.where(mask, logits, MASKED_LOGIT)


def _refuse_mask(mask: LegalActions, kind: str) -> None:
    if mask is not None and not isinstance(mask, tuple):
        raise UsageError(f"an action mask needs a Discrete or MultiDiscrete action space, got {kind}.")


def _integers(values: np.ndarray) -> tuple[int, ...]:
    return tuple(int(value) for value in values.reshape(-1))
