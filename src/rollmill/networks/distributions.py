"""Action distributions, as pytrees of their parameters.

Log-probabilities and entropies are sums over all components of an action. Shape letters: `*shape` shape of the
action, `n` categories. Use `jax.vmap` for batches.
"""

import itertools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from rollmill.core.types import Key

# Finite, so that entropies and gradients never compute 0 * inf. Its exponential is exactly zero.
MASKED_LOGIT = float(np.finfo(np.float32).min)

# Up to this many categories, a cumulative sum takes less time than one random number per category.
_INVERSE_CDF_MAX = 32

# tanh(6) is 1.2e-5 below 1, where float32 can still recover the Gaussian value from an action.
_TANH_LIMIT = 6.0
_TANH_MARGIN = 1.0 / (1.0 + math.exp(2.0 * _TANH_LIMIT))

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(20)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


class Categorical(eqx.Module):
    """A distribution over the integers `start, ..., start + n - 1`, with probabilities `softmax(logits)`.

    A category with a logit of minus infinity or `MASKED_LOGIT` is never sampled.
    """

    logits: Float[Array, " n"]
    start: int = eqx.field(static=True, default=0)
    dtype: np.dtype = eqx.field(static=True, default=np.dtype(np.int32))

    def sample(self, key: Key) -> Int[Array, ""]:
        """Samples an action, by inverting the cumulative probabilities or, if `n` is large, with Gumbel noise."""
        return (_draw(key, self.logits) + self.start).astype(self.dtype)

    def sample_and_log_prob(self, key: Key) -> tuple[Int[Array, ""], Float[Array, ""]]:
        """Samples an action, and returns it with its log-probability."""
        action = self.sample(key)
        return action, self.log_prob(action)

    def log_prob(self, action: Int[Array, ""]) -> Float[Array, ""]:
        """Returns the log-probability of an action, `logits[action - start] - logsumexp(logits)`."""
        return _categorical_log_prob(self.logits, action.astype(jnp.int32) - self.start)

    def entropy(self) -> Float[Array, ""]:
        """Returns the entropy `-sum(p log p)`. Masked categories contribute nothing."""
        return _categorical_entropy(self.logits)

    def mode(self) -> Int[Array, ""]:
        """Returns the most probable action."""
        return (jnp.argmax(self.logits) + self.start).astype(self.dtype)


class MultiCategorical(eqx.Module):
    """Independent categorical distributions with different numbers of categories.

    Logits are padded with minus infinity to the largest number of categories. `start` holds the first value of
    each choice, flattened in row-major order. An empty `start` means zeros.
    """

    logits: Float[Array, "*shape n"]
    start: tuple[int, ...] = eqx.field(static=True, default=())
    dtype: np.dtype = eqx.field(static=True, default=np.dtype(np.int32))

    def sample(self, key: Key) -> Int[Array, "*shape"]:
        """Samples all choices with one call of the random number generator."""
        return (_draw(key, self.logits) + self._start()).astype(self.dtype)

    def sample_and_log_prob(self, key: Key) -> tuple[Int[Array, "*shape"], Float[Array, ""]]:
        """Samples an action, and returns it with its log-probability."""
        action = self.sample(key)
        return action, self.log_prob(action)

    def log_prob(self, action: Int[Array, "*shape"]) -> Float[Array, ""]:
        """Returns the log-probability of an action, summed over its choices."""
        return _categorical_log_prob(self.logits, action.astype(jnp.int32) - self._start())

    def entropy(self) -> Float[Array, ""]:
        """Returns the entropy of the distribution, summed over all choices."""
        return _categorical_entropy(self.logits)

    def mode(self) -> Int[Array, "*shape"]:
        """Returns the most probable category of each choice."""
        return (jnp.argmax(self.logits, axis=-1) + self._start()).astype(self.dtype)

    def _start(self) -> Int[Array, "*shape"]:
        shape = self.logits.shape[:-1]
        start = np.asarray(self.start or np.zeros(shape), np.int32)
        return jnp.asarray(start.reshape(shape))


class Bernoulli(eqx.Module):
    """A distribution over independent bits, each of which is 1 with probability `sigmoid(logits)`."""

    logits: Float[Array, "*shape"]
    dtype: np.dtype = eqx.field(static=True, default=np.dtype(np.int8))

    def sample(self, key: Key) -> Int[Array, "*shape"]:
        """Samples all bits of an action."""
        return jax.random.bernoulli(key, jax.nn.sigmoid(self.logits)).astype(self.dtype)

    def sample_and_log_prob(self, key: Key) -> tuple[Int[Array, "*shape"], Float[Array, ""]]:
        """Samples all bits, and returns them with their log-probability."""
        action = self.sample(key)
        return action, self.log_prob(action)

    def log_prob(self, action: Int[Array, "*shape"]) -> Float[Array, ""]:
        """Returns the log-probability of all bits: the sum of `log sigmoid(l)`, with `-l` for zeros."""
        return jnp.sum(jax.nn.log_sigmoid(jnp.where(action == 1, self.logits, -self.logits)))

    def entropy(self) -> Float[Array, ""]:
        """Returns the entropy `sum(softplus(l) - l sigmoid(l))` for the logits `l`."""
        return jnp.sum(jax.nn.softplus(self.logits) - self.logits * jax.nn.sigmoid(self.logits))

    def mode(self) -> Int[Array, "*shape"]:
        """Returns the more probable value of each bit."""
        return (self.logits > 0).astype(self.dtype)


class DiagonalGaussian(eqx.Module):
    """Independent normal distributions. Samples are unbounded even if the action space has bounds.

    Actions are not clipped, so that log-probabilities are exact. Clip an action only when it is passed to the
    environment, and store the unclipped action.
    """

    mean: Float[Array, "*shape"]
    log_std: Float[Array, "*shape"]

    def sample(self, key: Key) -> Float[Array, "*shape"]:
        """Samples `mean + std * noise`, which is differentiable in both parameters."""
        return self.mean + jnp.exp(self.log_std) * jax.random.normal(key, self.mean.shape, self.mean.dtype)

    def sample_and_log_prob(self, key: Key) -> tuple[Float[Array, "*shape"], Float[Array, ""]]:
        """Samples an action, and returns it with its log-density."""
        action = self.sample(key)
        return action, self.log_prob(action)

    def log_prob(self, action: Num[Array, "*shape"]) -> Float[Array, ""]:
        """Returns the log-density of an action.

        It is `-sum(z**2 / 2 + log_std + log(2 pi) / 2)` with `z = (action - mean) / std`.
        """
        z = (action.astype(self.mean.dtype) - self.mean) * jnp.exp(-self.log_std)
        return -jnp.sum(0.5 * z**2 + self.log_std + 0.5 * math.log(2.0 * math.pi))

    def entropy(self) -> Float[Array, ""]:
        """Returns the entropy `sum(log_std + log(2 pi e) / 2)`."""
        return jnp.sum(self.log_std + 0.5 * math.log(2.0 * math.pi * math.e))

    def mode(self) -> Float[Array, "*shape"]:
        """Returns the mean, which is the most probable action."""
        return self.mean


class TanhGaussian(eqx.Module):
    """A diagonal Gaussian `x`, squashed and rescaled into bounds.

    `action = low + (high - low) (tanh(x) + 1) / 2`, with the change of variables of Haarnoja et al. (2018), "Soft
    Actor-Critic", appendix C, in the stable form `log(1 - tanh(x)**2) = 2 (log 2 - x - softplus(-2 x))`.

    `x` is clipped to [-6, 6], both when sampled and when recovered from an action, because float32 cannot
    distinguish larger values after the tanh. A stored action therefore has the log-probability with which it was
    sampled, up to rounding, and an action on a bound has a finite one. Gradients of a sample pass through the
    clipping. The mean is clipped too: otherwise `x` would stay at the limit while the mean moves on, and become
    ever less likely. At the limit only the gradient of the entropy remains, which leads back. `low` and `high` are
    flattened in row-major order. They are static fields, so they are never trained.
    """

    mean: Float[Array, "*shape"]
    log_std: Float[Array, "*shape"]
    low: tuple[float, ...] = eqx.field(static=True)
    high: tuple[float, ...] = eqx.field(static=True)

    def sample(self, key: Key) -> Float[Array, "*shape"]:
        """Samples an action within the bounds, differentiable in both parameters."""
        return self._squash(self._sample_base(key))

    def sample_and_log_prob(self, key: Key) -> tuple[Float[Array, "*shape"], Float[Array, ""]]:
        """Samples an action and its log-density, without the rounding errors of an inverse tanh."""
        x = self._sample_base(key)
        return self._squash(x), self._log_prob_of_base(x, self._bounded_mean())

    def unclipped_sample_and_log_prob(self, key: Key) -> tuple[Float[Array, "*shape"], Float[Array, ""]]:
        """Samples an action, and returns it with the log-density of the Gaussian sample `x` before clipping.

        Gradients pass through both. If `x` were clipped, a mean far beyond the limit would be rewarded as if the
        policy were uncertain.
        """
        x = DiagonalGaussian(self.mean, self.log_std).sample(key)
        return self._squash(x), self._log_prob_of_base(x, self.mean)

    def log_prob(self, action: Num[Array, "*shape"]) -> Float[Array, ""]:
        """Returns the log-density of an action, using the inverse tanh of its position between the bounds."""
        low, high = self._bounds()
        action = action.astype(self.mean.dtype)
        margin = _TANH_MARGIN * (high - low)
        above_low, below_high = jnp.maximum(action - low, margin), jnp.maximum(high - action, margin)
        x = 0.5 * (jnp.log(above_low) - jnp.log(below_high))
        return self._log_prob_of_base(x, self._bounded_mean())

    def entropy(self) -> Float[Array, ""]:
        """Returns the entropy `H[x] + E[log |d action / d x|]`, with Gauss-Hermite quadrature of 20 points.

        There is no closed form. The error is below 0.002 per dimension for `std` up to 2.
        """
        std = jnp.exp(self.log_std)
        log_volume = jax.vmap(lambda node: jnp.sum(self._log_slope(self.mean + std * node)))
        expected = jnp.vdot(jnp.asarray(_WEIGHTS, jnp.float32), log_volume(jnp.asarray(_NODES, jnp.float32)))
        return DiagonalGaussian(self.mean, self.log_std).entropy() + expected

    def mode(self) -> Float[Array, "*shape"]:
        """Returns the squashed mean, which is the median of each component but not the mode."""
        return self._squash(self.mean)

    def _sample_base(self, key: Key) -> Float[Array, "*shape"]:
        x = DiagonalGaussian(self._bounded_mean(), self.log_std).sample(key)
        # Straight-through: the clipped value with the gradient of the unclipped one.
        return x + jax.lax.stop_gradient(jnp.clip(x, -_TANH_LIMIT, _TANH_LIMIT) - x)

    def _bounded_mean(self) -> Float[Array, "*shape"]:
        return jnp.clip(self.mean, -_TANH_LIMIT, _TANH_LIMIT)

    def _log_prob_of_base(self, x: Float[Array, "*shape"], mean: Float[Array, "*shape"]) -> Float[Array, ""]:
        return DiagonalGaussian(mean, self.log_std).log_prob(x) - jnp.sum(self._log_slope(x))

    def _log_slope(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        low, high = self._bounds()
        return jnp.log(0.5 * (high - low)) + 2.0 * (math.log(2.0) - x - jax.nn.softplus(-2.0 * x))

    def _squash(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        low, high = self._bounds()
        return jnp.clip(low + (high - low) * (0.5 * (jnp.tanh(x) + 1.0)), low, high)

    def _bounds(self) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
        low, high = (np.asarray(bound, np.float32) for bound in (self.low, self.high))
        return jnp.asarray(low.reshape(self.mean.shape)), jnp.asarray(high.reshape(self.mean.shape))


def _draw(key: Key, logits: Float[Array, "*shape n"]) -> Int[Array, "*shape"]:
    if logits.shape[-1] > _INVERSE_CDF_MAX:
        return jax.random.categorical(key, logits)
    return _inverse_cdf(logits, jax.random.uniform(key, logits.shape[:-1], logits.dtype))


def _inverse_cdf(logits: Float[Array, "*shape n"], uniform: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Returns the first category whose cumulative weight exceeds `uniform` of the total, for `uniform` in [0, 1).

    A category of weight zero is never chosen: sequential summation leaves the cumulative weight unchanged by
    it, and `uniform * total` is below the total in float32 too.
    """
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    cumulative = list(itertools.accumulate(weights[..., i] for i in range(logits.shape[-1])))
    threshold = uniform * cumulative[-1]
    index = jnp.zeros(uniform.shape, jnp.int32)
    for weight in cumulative[:-1]:
        index = index + (weight <= threshold).astype(jnp.int32)
    return index


def _categorical_log_prob(logits: Float[Array, "*shape n"], index: Int[Array, "*shape"]) -> Float[Array, ""]:
    # XLA fuses a selection and a sum with the softmax. It would not fuse a gather, whose gradient is a scatter.
    chosen = jax.nn.one_hot(index, logits.shape[-1], dtype=jnp.bool_)
    return jnp.sum(jnp.where(chosen, jax.nn.log_softmax(logits), 0.0))


def _categorical_entropy(logits: Float[Array, "*shape n"]) -> Float[Array, ""]:
    log_probs = jax.nn.log_softmax(logits)
    possible = log_probs > MASKED_LOGIT / 2
    return -jnp.sum(jnp.exp(log_probs) * jnp.where(possible, log_probs, 0.0))
