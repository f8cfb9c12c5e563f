"""Fragments with structure that the compiler can use, and policies that it cannot compile.

Shape letters: `N` samples, or sequences, of a minibatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from rollmill.dataflow.graph import Batch, Decision, Learner, Metrics, Weights

LossOfOne: TypeAlias = Callable[
    [PyTree[Array], Learner, PyTree[Array], PyTree[Array]], tuple[Float[Array, ""], Metrics]
]
"""`(network, learner, sample, sequence) -> (loss, metrics)`. `network` is the trained part of `learner`."""


@dataclass(frozen=True)
class MeanGradients:
    """Fragment `gradients` of an algorithm with a loss that is a mean over samples."""

    loss: LossOfOne
    network: Callable[[Learner], PyTree[Array]]
    """Returns the part of the learner to differentiate with respect to."""

    def __call__(self, learner: Learner, minibatch: Batch) -> tuple[Weights, Metrics]:
        """Computes gradients of the mean loss over a minibatch, and metrics."""

        def mean_loss(network: PyTree[Array]) -> tuple[Float[Array, ""], Metrics]:
            each = partial(self.loss, network, learner)
            losses, metrics = jax.vmap(each)(minibatch.samples, minibatch.sequences)
            return jnp.mean(losses), jax.tree.map(jnp.mean, metrics)

        (total, metrics), slopes = jax.value_and_grad(mean_loss, has_aux=True)(self.network(learner))
        return slopes, {"losses/total": total, **metrics}

    def of_one(
        self, learner: Learner, sample: PyTree[Array], sequence: PyTree[Array] = ()
    ) -> tuple[Weights, Metrics]:
        """Computes gradients and metrics of ONE sample. Their mean over a minibatch is the result of calling."""
        loss = jax.value_and_grad(self.loss, has_aux=True)
        (total, metrics), slopes = loss(self.network(learner), learner, sample, sequence)
        return slopes, {"losses/total": total, **metrics}


@dataclass(frozen=True)
class ElementwiseUpdate:
    """Fragment `update` of an optimiser that treats all parameters alike, apart from global norms.

    The structure of the network does not matter to `function`: kernels pass a learner with its network as one
    vector.
    """

    function: Callable[..., Learner]

    def __call__(self, learner: Learner, gradients: Weights, *, share: float = 1.0) -> Learner:
        """Returns the learner after one optimiser step."""
        return self.function(learner, gradients, share=share)


@dataclass(frozen=True)
class UnfusedPolicy:
    """Fragment `policy` of an algorithm with decisions that a kernel cannot compute."""

    function: Callable[..., Decision]
    """The policy, a `Decide`."""
    reason: str
    """Why a kernel cannot compute it, as the end of a sentence for the user."""

    def __call__(self, *arguments: Any) -> Decision:
        """Returns the decision of `function`."""
        return self.function(*arguments)
