"""Checks values that fragments return, if a wrong value would otherwise go unnoticed."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Float, PyTree

from rollmill.core.contracts import outline
from rollmill.core.errors import ContractError
from rollmill.core.spaces import space_text, struct
from rollmill.dataflow.graph import Batch, Graph, Metrics, Trajectory

RECORDED = (
    "iteration",
    "env_steps",
    "seconds",
    "steps_per_second",
    "epochs",
    "losses/gradient_norm",
    "losses/explained_variance",
    "replay/fill",
)
"""Metrics that every run records, and which an algorithm cannot return."""
RECORDED_PREFIXES = ("episode/", "episodes/", "evaluation/", "finite/", "gpu/")
"""Prefixes of such metrics."""
TOTAL = "losses/total"
"""Metric of the mean loss, which `MeanGradients` and `SequenceGradients` compute from the losses of samples."""
_NUMERIC = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, bool, int, float)


def check_loss(returned: Any) -> None:
    """Raises a `ContractError` unless a loss of ONE sample is a scalar, with scalar metrics in a dictionary."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ContractError(f"the loss of one sample returned {outline(returned)}, expected (loss, metrics).")
    loss, metrics = returned
    if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise ContractError(
            f"the loss of one sample is {outline(loss)}, expected a scalar float32[]. hint: return the sum or "
            "the mean of its parts."
        )
    check_metrics(metrics)
    if TOTAL in metrics:
        raise ContractError(
            f"the loss of one sample returned a metric called {TOTAL!r}, expected another name, because Rollmill "
            "records the mean of the losses under this name. hint: use a name such as losses/mine."
        )


def check_distinct(reported: Metrics, learned: Metrics) -> None:
    """Raises a `ContractError` if `report` returned a metric that the algorithm's other functions return too."""
    if common := sorted(reported.keys() & learned.keys()):
        raise ContractError(
            f"report returned a metric called {common[0]!r}, which gradients or update return too, so that one of "
            "the two would be lost. hint: rename one of them."
        )


def value_and_gradients(
    loss: Callable[[PyTree[Array]], tuple[Float[Array, ""], Any]], network: PyTree[Array]
) -> tuple[tuple[Float[Array, ""], Any], PyTree[Array]]:
    """Returns the value and the metrics of a loss, and its gradients with respect to a network's weights.

    Raises a `ContractError` if the loss does not depend on any weight, so that all gradients would be zero.
    """
    has_slope: list[bool] = []

    @jax.custom_jvp
    def watched(total: Float[Array, ""]) -> Float[Array, ""]:
        return total

    @watched.defjvp
    def _(totals: tuple[Any], slopes: tuple[Any]) -> tuple[Any, Any]:
        has_slope.append(True)  # JAX calls this function only if the value depends on the weights
        return totals[0], slopes[0]

    def with_watch(network: PyTree[Array]) -> tuple[Float[Array, ""], Any]:
        total, metrics = loss(network)
        return watched(total), metrics

    result = jax.value_and_grad(with_watch, has_aux=True)(network)
    if not has_slope:
        raise ContractError(
            "the loss does not depend on the weights of the network, so the gradients of all parameters are "
            "zero and nothing would be learned. hint: compute the loss from the network that the loss function "
            "receives, and look for jax.lax.stop_gradient around it."
        )
    return result


def check_metrics(metrics: Any, origin: str = "gradients") -> None:
    """Raises a `ContractError` unless metrics are a dictionary from names to scalars.

    Names of metrics that every run records are also rejected, because they would replace the recorded values.
    `origin` is the function of the graph that returned the metrics.
    """
    if not isinstance(metrics, Mapping):
        raise ContractError(f"the metrics of {origin} are {outline(metrics)}, expected a dictionary of scalars.")
    for name, metric in metrics.items():
        if not isinstance(name, str) or name in RECORDED or name.startswith(RECORDED_PREFIXES):
            raise ContractError(
                f"{origin} returned a metric called {name!r}, expected a string that names no metric which every "
                "run records. hint: use a name such as losses/mine."
            )
        if not isinstance(metric, _NUMERIC) or jnp.shape(metric) != ():
            raise ContractError(
                f"the metric {name!r} of {origin} is {outline(metric)}, expected a scalar. hint: take its mean."
            )


def algorithm_of(graph: Graph) -> str:
    """Returns the name of a graph's algorithm, for error messages."""
    return graph.settings.get("algorithm", "the algorithm")


def check_batch(graph: Graph, batch: Batch, trajectory: Trajectory) -> None:
    """Raises a `ContractError` unless a batch has samples `[T, E, ...]` and sequences `[E, ...]`.

    With transposed axes, training would run, but on returns of other steps.
    """
    steps_and_envs = jnp.shape(trajectory.steps.terminated)
    parts = {
        "samples": (steps_and_envs, "steps, environments"),
        "sequences": (steps_and_envs[1:], "environments"),
    }
    for part, (lead, axes) in parts.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(batch, part)):
            if jnp.shape(leaf)[: len(lead)] != lead:
                raise ContractError(
                    f"{algorithm_of(graph)}: prepare returned {part}{jax.tree_util.keystr(path)} as "
                    f"{outline(leaf)}, expected leading axes {list(lead)}: {axes}."
                )


def check_action(action: PyTree, space: spaces.Space, where: str) -> None:
    """Raises a `ContractError` unless an action has the structure, shapes and kind of dtype of its space."""
    expected = struct(space)
    if jax.tree.structure(action) != jax.tree.structure(expected) or _kinds(action) != _kinds(expected):
        raise ContractError(
            f"{where} returned the action {outline(action)}, expected {outline(expected)} for {space_text(space)}."
        )


def _kinds(tree: Any) -> list[tuple[tuple[int, ...], bool]]:
    return [
        (jnp.shape(leaf), bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating)))
        for leaf in jax.tree.leaves(tree)
    ]
