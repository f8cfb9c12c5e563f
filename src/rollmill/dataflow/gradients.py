"""Defines fragments with a structure that the kernel compiler uses, and marks policies that it cannot compile.

Shape letters: `N` samples or sequences of a minibatch, `T` steps of a sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from rollmill.dataflow.fragment_results import TOTAL, check_loss, value_and_gradients
from rollmill.dataflow.graph import Batch, Decision, Learner, Metrics, Weights

LossOfOne: TypeAlias = Callable[
    [PyTree[Array], Learner, PyTree[Array], PyTree[Array]], tuple[Float[Array, ""], Metrics]
]
"""`(network, learner, sample, sequence) -> (loss, metrics)`. `network` is the trained part of `learner`."""


@dataclass(frozen=True)
class MeanGradients:
    """Fragment `gradients` of an algorithm whose loss is a mean over samples."""

    loss: LossOfOne
    network: Callable[[Learner], PyTree[Array]]
    """Returns the part of the learner to differentiate with respect to."""

    def __call__(self, learner: Learner, minibatch: Batch) -> tuple[Weights, Metrics]:
        """Computes gradients of the mean loss over a minibatch, and metrics."""

        def mean_loss(network: PyTree[Array]) -> tuple[Float[Array, ""], Metrics]:
            each = partial(self._compute_loss, network, learner)
            losses, metrics = jax.vmap(each)(minibatch.samples, minibatch.sequences)
            return jnp.mean(losses), jax.tree.map(jnp.mean, metrics)

        (total, metrics), slopes = value_and_gradients(mean_loss, self.network(learner))
        return slopes, {TOTAL: total, **metrics}

    def sample_gradients(
        self, learner: Learner, sample: PyTree[Array], sequence: PyTree[Array] = ()
    ) -> tuple[Weights, Metrics]:
        """Computes gradients and metrics of ONE sample. Calling the object returns their mean over a minibatch."""
        loss = jax.value_and_grad(self._compute_loss, has_aux=True)
        (total, metrics), slopes = loss(self.network(learner), learner, sample, sequence)
        return slopes, {TOTAL: total, **jax.tree.map(_term_of_mean, metrics)}

    def _compute_loss(self, *args: Any) -> tuple[Float[Array, ""], Metrics]:
        returned = self.loss(*args)
        check_loss(returned)
        return returned


class UnrolledSteps(NamedTuple):
    """Results for all steps of a minibatch of sequences, with leaves `[N, T, ...]`."""

    memory_before: PyTree[Array]
    """Memory before each step."""
    memory_after: PyTree[Array]
    """Memory after each step."""
    outputs: PyTree[Array]


@dataclass(frozen=True)
class SequenceGradients:
    """Fragment `gradients` of an algorithm whose loss is a mean over the steps of sequences.

    The loss of a step depends on earlier steps only through a memory. All other inputs of the loss are constants
    without gradients, such as the targets of V-trace.
    """

    step: Callable[..., tuple[PyTree[Array], PyTree[Array]]]
    """`(network, learner, memory, sample) -> (memory, outputs)` of ONE step."""
    loss: Callable[..., tuple[Float[Array, ""], Metrics]]
    """`(learner, sample, constants, outputs) -> (loss, metrics)` of ONE step."""
    network: Callable[[Learner], PyTree[Array]]
    """Returns the part of the learner to differentiate with respect to."""
    start_memory: Callable[[PyTree[Array]], PyTree[Array]]
    """Maps ONE element of a batch's `sequences` to the memory before the first step."""
    constants: Callable[[Learner, Batch, UnrolledSteps], PyTree[Array]] = lambda learner, minibatch, unrolled: ()
    """Maps a minibatch of sequences, and the results of its steps, to constants `[N, T, ...]`."""
    recurrent: bool = True
    """Whether steps change the memory."""
    unfused_reason: str | None = None
    """Reason why a kernel cannot compute the gradients, as the end of a sentence for the user. None if it can."""

    def __call__(self, learner: Learner, minibatch: Batch) -> tuple[Weights, Metrics]:
        """Computes gradients of the mean loss over a minibatch, and metrics."""

        def mean_loss(network: PyTree[Array]) -> tuple[Float[Array, ""], Metrics]:
            unrolled = self.unroll(network, learner, minibatch)
            constants = jax.lax.stop_gradient(self.constants(learner, minibatch, unrolled))
            each = jax.vmap(jax.vmap(partial(self._compute_loss, learner)))
            losses, metrics = each(minibatch.samples, constants, unrolled.outputs)
            return jnp.mean(losses), jax.tree.map(jnp.mean, metrics)

        (total, metrics), slopes = value_and_gradients(mean_loss, self.network(learner))
        return slopes, {TOTAL: total, **metrics}

    def unroll(self, network: PyTree[Array], learner: Learner, minibatch: Batch) -> UnrolledSteps:
        """Computes the network's outputs for all steps of a minibatch of sequences.

        With a memory, it scans over the steps. Without one, it computes all steps at once.
        """
        step = partial(self.step, network, learner)

        def scan_step(memory: PyTree[Array], sample: PyTree[Array]) -> tuple[PyTree[Array], UnrolledSteps]:
            after, outputs = step(memory, sample)
            return after, UnrolledSteps(memory, after, outputs)

        def unroll_one(samples: PyTree[Array], sequence: PyTree[Array]) -> UnrolledSteps:
            start = self.start_memory(sequence)
            if not self.recurrent:
                return jax.vmap(lambda sample: UnrolledSteps(start, *step(start, sample)))(samples)
            return jax.lax.scan(scan_step, start, samples)[1]

        return jax.vmap(unroll_one)(minibatch.samples, minibatch.sequences)

    def sample_gradients(
        self,
        learner: Learner,
        slope: PyTree[Array],
        sample: PyTree[Array],
        constants: PyTree[Array],
        memory: PyTree[Array],
    ) -> tuple[PyTree[Array], tuple[Weights, Metrics]]:
        """Computes gradients and metrics of ONE step of a sequence, whose last step must come first.

        Args:
            learner: learner that contains the network.
            slope: gradient of the loss of all later steps with respect to the memory after this one.
            sample: sample of the step.
            constants: constants of the step.
            memory: memory before the step.

        Returns:
            The gradient with respect to the memory before the step, and gradients and metrics. Calling the object
            returns their mean over all steps of a minibatch.
        """

        def loss_from_here(network: PyTree[Array], memory: PyTree[Array]) -> tuple[Float[Array, ""], Any]:
            after, outputs = self.step(network, learner, memory, sample)
            total, metrics = self._compute_loss(learner, sample, constants, outputs)
            later = [jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(slope), jax.tree.leaves(after), strict=True)]
            return sum(later, start=total), (total, metrics)

        of_both = jax.grad(loss_from_here, argnums=(0, 1), has_aux=True)
        (slopes, before), (total, metrics) = of_both(self.network(learner), memory)
        return before, (slopes, {TOTAL: total, **jax.tree.map(_term_of_mean, metrics)})

    def _compute_loss(self, *args: Any) -> tuple[Float[Array, ""], Metrics]:
        returned = self.loss(*args)
        check_loss(returned)
        return returned


def _term_of_mean(metric: Any) -> Float[Array, ""]:
    """Returns a metric of one sample in the dtype of its mean, which is float32 for integers and booleans."""
    value = jnp.asarray(metric)
    return value if jnp.issubdtype(value.dtype, jnp.inexact) else value.astype(jnp.float32)


@dataclass(frozen=True)
class ElementwiseUpdate:
    """Fragment `update` of an optimiser that treats all parameters alike, apart from global norms.

    `function` does not depend on the structure of the network. Kernels pass it a learner whose network is one
    vector.
    """

    function: Callable[..., Learner]

    def __call__(self, learner: Learner, gradients: Weights, *, share: float = 1.0) -> Learner:
        """Returns the learner after one optimiser step."""
        return self.function(learner, gradients, share=share)


@dataclass(frozen=True)
class UnfusedPolicy:
    """Fragment `policy` of an algorithm whose decisions a kernel cannot compute, such as a tree search."""

    function: Callable[..., Decision]
    """The policy, a `PolicyFunction`."""
    reason: str
    """Reason why a kernel cannot compute the policy, as the end of a sentence for the user."""

    def __call__(self, *arguments: Any) -> Decision:
        """Returns the decision of `function`."""
        return self.function(*arguments)
