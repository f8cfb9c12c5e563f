"""Fragments with a known structure: gradients that are means over samples, element-wise updates, and policies that
are no part of a kernel.

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
"""`(network, learner, sample, sequence) -> loss, metrics`; the network is what is learned, of the same learner."""


@dataclass(frozen=True)
class MeanGradients:
    """The fragment `gradients` of an algorithm whose loss is a mean over samples."""

    loss: LossOfOne
    network: Callable[[Learner], PyTree[Array]]
    """The part of the learner that gradients are taken with respect to."""
    untried: str = ""
    """Why no kernel computes them even where one could, as the end of a sentence for the user; or empty."""

    def __call__(self, learner: Learner, minibatch: Batch) -> tuple[Weights, Metrics]:
        """Gradients of the mean loss over a minibatch, with respect to the network; and metrics."""

        def mean_loss(network: PyTree[Array]) -> tuple[Float[Array, ""], Metrics]:
            each = partial(self.loss, network, learner)
            losses, metrics = jax.vmap(each)(minibatch.samples, minibatch.sequences)
            return jnp.mean(losses), jax.tree.map(jnp.mean, metrics)

        (total, metrics), slopes = jax.value_and_grad(mean_loss, has_aux=True)(self.network(learner))
        return slopes, {"losses/total": total, **metrics}

    def of_one(
        self, learner: Learner, sample: PyTree[Array], sequence: PyTree[Array] = ()
    ) -> tuple[Weights, Metrics]:
        """Gradients and metrics of ONE sample; their mean over a minibatch is the result of calling."""
        loss = jax.value_and_grad(self.loss, has_aux=True)
        (total, metrics), slopes = loss(self.network(learner), learner, sample, sequence)
        return slopes, {"losses/total": total, **metrics}


@dataclass(frozen=True)
class ElementwiseUpdate:
    """The fragment `update` of an optimiser that treats every number of the network alike, but for norms of all.

    The network may be of any structure: `function`, an `Update`, takes learners in which it is one vector too.
    """

    function: Callable[..., Learner]

    def __call__(self, learner: Learner, gradients: Weights, *, share: float = 1.0) -> Learner:
        """The learner one step further."""
        return self.function(learner, gradients, share=share)


@dataclass(frozen=True)
class UnfusedPolicy:
    """The fragment `policy` of an algorithm whose decisions no kernel can compute."""

    function: Callable[..., Decision]
    """A `Decide`."""
    reason: str
    """Why no kernel can, as the end of a sentence for the user."""

    def __call__(self, *arguments: Any) -> Decision:
        """The decision of `function`."""
        return self.function(*arguments)
