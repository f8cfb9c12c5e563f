"""The action distribution of a policy, for a single observation or for a batch.

Shape letter: `*batch` leading axes of the observations, and for multi-agent policies an agent axis.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from rollmill.core.errors import UsageError
from rollmill.core.types import Key
from rollmill.policies.policy_arguments import (
    Shape,
    as_batch,
    holds_jax,
    is_traced,
    key_or_seed,
    on_host,
    spread_key,
)


class ActionDistribution(eqx.Module):
    """A distribution over actions, or a batch of distributions, as returned by `Policy.distribution`.

    It is a pytree, so `jax.jit` and `jax.vmap` accept and return it. Its arrays are of the same kind as the
    observation: NumPy or JAX.
    """

    parameters: PyTree
    """The distribution (`rollmill.networks.Categorical` and others), with leaves `[*batch, ...]`."""
    ranks: tuple[int, ...] = eqx.field(static=True)
    """Number of axes that each of these leaves has in a single distribution."""

    @property
    def batch_shape(self) -> Shape:
        """Leading axes `*batch` of the distribution."""
        leaves = jax.tree.leaves(self.parameters)
        shapes = [leaf.shape[: leaf.ndim - rank] for leaf, rank in zip(leaves, self.ranks, strict=True)]
        return next(iter(shapes), ())

    @property
    def logits(self) -> Any:
        """Logits of discrete actions, very low for illegal actions.

        The shape is `[*batch, n]` for a `Discrete` space, `[*batch, *shape, max(nvec)]` for `MultiDiscrete`, and
        `[*batch, *shape]` for `MultiBinary`.

        Raises:
            UsageError: the actions are continuous.
        """
        return self._parameter("logits")

    @property
    def mean(self) -> Any:
        """Mean of the Gaussian of continuous actions, `[*batch, *shape]`, before the tanh of squashed actions.

        Raises:
            UsageError: the actions are discrete.
        """
        return self._parameter("mean")

    @property
    def scale(self) -> Any:
        """Standard deviation of continuous actions, `[*batch, *shape]`, before the tanh of squashed actions.

        Raises:
            UsageError: the actions are discrete.
        """
        return self._outward(jnp.exp(jnp.asarray(self._parameter("log_std"))))

    def log_probability(self, action: Any) -> Any:
        """Returns the logarithm of an action's probability or probability density, `[*batch]`.

        Args:
            action: action `[*batch, ...]`, before `Policy.action` would clip it to its bounds.
        """
        expected = jax.eval_shape(lambda one: one.mode(), self._single())
        array, found = as_batch("the action", expected, action)
        if found != self.batch_shape:
            raise UsageError(
                f"the action has the leading axes {list(found)}, but the distribution has the leading axes "
                f"{list(self.batch_shape)}."
            )
        return self._lift(lambda one, each: one.log_prob(each), jax.tree.map(jnp.asarray, array))

    def entropy(self) -> Any:
        """Returns the entropy of the distribution in nats, `[*batch]`."""
        return self._lift(lambda one: one.entropy())

    def mode(self) -> Any:
        """Returns the most likely action, `[*batch, ...]`.

        For a Gaussian, this is its mean, which is not clipped to the bounds of the action space.
        """
        return self._lift(lambda one: one.mode())

    def sample(self, key: Key | None = None, *, seed: Any = None) -> Any:
        """Samples an action for each observation, `[*batch, ...]`.

        Samples of a Gaussian are not clipped to the bounds of the action space.

        Args:
            key: a random key, which is split over a batch.
            seed: an integer seed instead of a key.

        Raises:
            UsageError: neither a key nor a seed is given, or both are.
        """
        if (key := key_or_seed(key, seed)) is None:
            raise UsageError("sampling an action needs a key or a seed: distribution.sample(seed=0).")
        return self._lift(lambda one, each: one.sample(each), spread_key(key, self.batch_shape))

    def _parameter(self, name: str) -> Any:
        if not hasattr(self.parameters, name):
            kind, own = type(self.parameters).__name__, ("logits", "mean")
            there = ", ".join(each for each in own if hasattr(self.parameters, each)) or "parameters"
            raise UsageError(
                f"this distribution, a {kind}, has no {name.replace('log_std', 'scale')}. It has {there}."
            )
        return getattr(self.parameters, name)

    def _single(self) -> PyTree:
        """Shapes of a single distribution."""
        leaves, structure = jax.tree.flatten(self.parameters)
        cut = lambda leaf, rank: jax.ShapeDtypeStruct(leaf.shape[leaf.ndim - rank :], leaf.dtype)
        return jax.tree.unflatten(structure, map(cut, leaves, self.ranks))

    def _lift(self, function: Callable, *inputs: PyTree) -> Any:
        for _ in self.batch_shape:
            function = jax.vmap(function)
        return self._outward(function(jax.tree.map(jnp.asarray, self.parameters), *inputs), *inputs)

    def _outward(self, result: Any, *inputs: PyTree) -> Any:
        stays = holds_jax(self.parameters) or is_traced(inputs)
        return result if stays else on_host(result)


def action_distribution(parameters: PyTree, batch: Shape) -> ActionDistribution:
    """Wraps the parameters of a distribution, with leaves `[*batch, ...]`, in an `ActionDistribution`."""
    return ActionDistribution(parameters, tuple(leaf.ndim - len(batch) for leaf in jax.tree.leaves(parameters)))
