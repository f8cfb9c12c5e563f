"""Compares an exported policy with the original policy before a file is written."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from rollmill.core.errors import UsageError
from rollmill.policies.exporting.example_inputs import situations
from rollmill.policies.exporting.interface import ACTION, LOGITS, Q_VALUES, ExportedFunction
from rollmill.policies.policy import Policy

OBSERVATIONS = 1000
"""Number of observations on which policies are compared."""

ACTION_TOLERANCE = 1e-5
"""Largest permitted difference between continuous actions, relative to the action or the batch's largest."""

OUTPUT_TOLERANCE = 1e-4
"""Largest permitted relative difference between all other outputs."""

TIE = 1e-5
"""Relative difference of logits below which two actions count as equally likely up to rounding."""

Run = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
"""Maps the inputs of a batch to the outputs, by the exported function."""


class Comparison(NamedTuple):
    """The result of a successful comparison between an exported policy and the original."""

    num_observations: int
    largest_difference: float
    """Largest difference between continuous actions, relative to the largest action. It is 0 for discrete actions,
    which must be equal."""
    num_ties: int
    """Number of observations for which two actions were equally likely and the policies chose differently."""


def compare(policy: Policy, exported: ExportedFunction, run: Run) -> Comparison:
    """Compares an exported policy with the original, on a batch and on a single observation.

    Raises:
        UsageError: an output differs. The message names the output and the difference.
    """
    given = situations(policy.loaded, OBSERVATIONS)
    leaves = jax.tree.leaves(tuple(given))
    inputs = [np.asarray(leaves[position]) for position in exported.arguments]
    with jax.default_matmul_precision("highest"):
        expected = [np.asarray(leaf) for leaf in jax.jit(jax.vmap(exported.function))(*inputs)]
        mask = given.mask if jax.tree.leaves(given.mask) else None
        action, _ = policy.action(given.observation, memory=given.memory, action_mask=mask, search=False)
    actions = jax.tree.leaves(action)
    expected[: len(actions)] = actions
    found, alone = run(inputs), run([each[:1] for each in inputs])
    names = [output.name for output in exported.outputs]
    by_name = dict(zip(names, expected, strict=True))
    largest, ties = 0.0, 0
    for name, wanted, got, single in zip(names, expected, found, alone, strict=True):
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            raise _differs(
                name,
                f"the exported result is {got.dtype} {list(got.shape)}, expected {wanted.dtype} "
                f"{list(wanted.shape)}",
            )
        if name.partition(".")[0] != ACTION:
            _check_close(name, wanted, got, OUTPUT_TOLERANCE)
            _check_close(name, wanted[:1], single, OUTPUT_TOLERANCE, batch=wanted)
        elif np.issubdtype(wanted.dtype, np.floating):
            largest = max(largest, _check_close(name, wanted, got, ACTION_TOLERANCE))
            _check_close(name, wanted[:1], single, ACTION_TOLERANCE, batch=wanted)
        else:
            ties += _check_equal(name, wanted, got, by_name)
            _check_equal(name, wanted[:1], single, {key: each[:1] for key, each in by_name.items()})
    return Comparison(OBSERVATIONS, largest, ties)


def _check_close(
    name: str, wanted: np.ndarray, got: np.ndarray, tolerance: float, batch: np.ndarray | None = None
) -> float:
    """Compares values up to rounding. Returns the largest difference, relative to the batch's largest value.

    A value near zero may be a sum of larger values that cancel, with rounding errors of their size. Differences
    are therefore relative to the largest value of `batch`, by default of `wanted`.
    """
    batch = np.abs((wanted if batch is None else batch).astype(np.float64))
    # masked logits are huge, and say nothing about the size of the others
    scale = max(float(batch.max(initial=0, where=batch < 1e30)), 1e-6)
    wanted, got = wanted.astype(np.float64), got.astype(np.float64)
    # logits of impossible choices are infinite, and must be equal
    difference = np.abs(np.subtract(wanted, got, out=np.zeros_like(wanted), where=wanted != got))
    allowed = np.where(np.isfinite(wanted), tolerance * np.maximum(np.abs(wanted), scale), 0)
    if not (difference <= allowed).all():  # also fails for NaN
        raise _differs(
            name, f"the difference is {np.max(difference):.3g}, more than the limit of {tolerance * scale:.3g}"
        )
    return float(np.max(difference / np.maximum(np.abs(wanted), scale), initial=0))


def _check_equal(name: str, wanted: np.ndarray, got: np.ndarray, outputs: dict[str, np.ndarray]) -> int:
    """Checks discrete actions, and returns the number of observations whose choices were equally likely."""
    differs = wanted != got
    if not differs.any():
        return 0
    path = name.partition(".")[2]
    logits = next((outputs[each] for kind in (LOGITS, Q_VALUES) if (each := _join(kind, path)) in outputs), None)
    is_tie = np.zeros_like(differs) if logits is None else _ties(logits, wanted.shape)
    rows = lambda flags: int(flags.reshape(len(wanted), -1).any(-1).sum())
    if (wrong := rows(differs & ~is_tie)) > 0:
        raise _differs(name, f"{wrong} of {len(wanted)} observations give another result")
    return rows(differs)


def _ties(logits: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns whether the two best choices are equally likely up to rounding, in the shape of the actions."""
    if logits.shape == shape:  # one logit per bit
        return np.abs(logits) <= TIE
    best = np.sort(logits, axis=-1)[..., -2:]
    return best[..., -1] - best[..., 0] <= TIE * np.maximum(np.abs(best[..., -1]), 1)


def _join(name: str, path: str) -> str:
    return f"{name}.{path}" if path else name


def _differs(name: str, how: str) -> UsageError:
    return UsageError(
        f"the exported policy differs from the original in {name}: {how}. Nothing was written. hint: try the "
        "other format."
    )
