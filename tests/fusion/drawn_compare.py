"""Computes drawn programs in several ways, beside XLA's unfused program, and makes smaller what differs."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import drawn_control  # noqa: F401  registers its operations
import drawn_operations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from code_runs import run_code
from drawn_programs import OPERATIONS, Expr, arguments_of, constant, function_of, parts_of, program
from drawn_types import arguments
from fused_runs import is_key, lowered_for

from emitters import AS_USERS
from rollmill.fusion import CannotFuse, LoweredFunction, Program, evaluate
from rollmill.fusion.lower.rules import control
from rollmill.fusion.lower.values import Const, KeyPair, PrologueOutput, RowArray, is_output

SAMPLES = 8
"""Environments of a comparison, a power of two."""

AS_UNFUSED = {"xla_allow_excess_precision": False, **AS_USERS}
"""The options of Rollmill's own unfused programs."""
QUICKLY = {**AS_UNFUSED, "xla_backend_optimization_level": 0}
"""The same passes of XLA's, and half the time: LLVM does not optimise what they give."""

TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Of operations that round: of 16-bit floats, two units of their last place."""

Way = Callable[..., Sequence[Any]]
"""`(program, inputs, uniforms, *, block) -> outputs`, as `evaluate`."""


def reference(program: Program, inputs: Sequence[Any], uniforms: Sequence[Any], *, block: int) -> list[Any]:
    """The evaluator, one operation after the other: compiling a program for one call takes longer."""
    with jax.disable_jit():
        return evaluate(program, list(map(jnp.asarray, inputs)), list(map(jnp.asarray, uniforms)), block=block)


WAYS: dict[str, Way] = {"reference": reference, "machine code": run_code}


class Verdict(NamedTuple):
    """What became of a program in one way."""

    way: str
    """The way; `lowering` where a program is refused before any."""
    outcome: str
    """`equal`, `differs`, `refused` or `failed`."""
    detail: str = ""


class Case(NamedTuple):
    """A program and what it is called with."""

    outputs: tuple[Expr, ...]
    arguments: dict[int, Any]
    keeps_loops: bool = False
    """Whether short loops stay loops as well, which are written out otherwise."""


def case_of(seed: int) -> Case:
    """The program of a seed."""
    return as_case(program(seed), seed)


def as_case(outputs: Sequence[Expr], seed: int) -> Case:
    """Some outputs, with arguments drawn from a seed."""
    given = arguments(seed, SAMPLES)
    return Case(
        tuple(outputs), {number: given[number] for number in (arguments_of(outputs) or [0])}, seed % 2 == 1
    )


def compare(case: Case, ways: dict[str, Way], options: dict[str, Any]) -> list[Verdict]:
    """One verdict for each way; one alone where the program cannot be lowered."""
    return compare_with(lambda: unfused(case, options), case, ways)


def compare_with(expect: Callable[[], list[Any]], case: Case, ways: dict[str, Way]) -> list[Verdict]:
    """Verdicts as `compare` gives them, beside results that `expect` gives."""
    try:
        lowered = lowered_case(case)
    except Exception as error:
        return [_failed("lowering", error)]
    expected = expect()
    return [_verdict(way, run, lowered, case, expected) for way, run in ways.items()]


def lowered_case(case: Case) -> LoweredFunction:
    """The program of a case."""
    with pytest.MonkeyPatch.context() as patch:
        if case.keeps_loops:
            for name in ("SHORT", "MAX_NODES", "MAX_NODES_SHORT"):
                patch.setattr(control, name, -1)
        return lowered_for(function_of(case.outputs), (case.arguments,))


def is_wrong(verdicts: Sequence[Verdict]) -> bool:
    """Whether some way differs, or fails with an error that is no refusal."""
    return any(verdict.outcome in ("differs", "failed") for verdict in verdicts)


def unfused(case: Case, options: dict[str, Any], *, device: Any = None) -> list[Any]:
    """The results of XLA's program, on a device or on JAX's default one."""
    with jax.default_device(device), pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawn_operations, "ZEROS_NAMED", True)
        run = jax.jit(jax.vmap(function_of(case.outputs)), compiler_options=options)
        return list(map(plain, run(case.arguments)))


def _verdict(way: str, run: Way, lowered: LoweredFunction, case: Case, expected: list[Any]) -> Verdict:
    try:
        found = results(run, lowered, case.arguments)
    except Exception as error:
        return _failed(way, error)
    return verdict_on(way, found, case, expected)


def verdict_on(way: str, found: Sequence[np.ndarray], case: Case, expected: Sequence[np.ndarray]) -> Verdict:
    """Whether the results of a way are those that are expected."""
    for number, (own, other) in enumerate(zip(found, expected, strict=True)):
        operation = OPERATIONS.get(case.outputs[number].op)
        rounds = operation is not None and operation.kind == "rounded"
        tolerance = TOLERANCE.get(own.dtype.name, 0.0) if rounds else 0.0
        places = _unequal(own, other, tolerance)
        if places.any():
            first = np.argwhere(places)[0]
            return Verdict(
                way, "differs", f"output {number} at {first}: {own[tuple(first)]}; XLA {other[tuple(first)]}"
            )
    return Verdict(way, "equal")


def _failed(way: str, error: Exception) -> Verdict:
    lines = str(error).splitlines() or [""]
    if isinstance(error, CannotFuse):
        return Verdict(way, "refused", lines[0])
    return Verdict(way, "failed", f"{type(error).__name__}: {lines[0]}")


def _unequal(own: np.ndarray, other: np.ndarray, tolerance: float) -> np.ndarray:
    assert own.dtype == other.dtype and own.shape == other.shape, (own.dtype, other.dtype, own.shape, other.shape)
    if not jnp.issubdtype(own.dtype, jnp.floating):
        return own != other
    x, y = own.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        near = np.abs(x - y) <= tolerance * (1 + np.abs(y))
    return ~((x == y) | near | np.isnan(x) & np.isnan(y))


def plain(x: Any) -> np.ndarray:
    """An array of JAX's as one of NumPy's; of keys, their data."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


# --- inputs and outputs of programs, as arrays of NumPy -----------------------------------------------------


def results(run: Way, lowered: LoweredFunction, *given: Any) -> list[np.ndarray]:
    """The results of a program for arguments `[samples, ...]`, in one way; `samples` is a power of two."""
    slots, shared = lowered.prologue()
    kinds = jax.tree.leaves(lowered.inputs, is_leaf=is_output)
    arrays = [plain(array) for array in jax.tree.leaves(given)]
    samples = len(arrays[0])
    inputs = [x for kind, array in zip(kinds, arrays, strict=True) for x in _numbers(kind, array)]
    slots = [np.asarray(x) for x in slots]
    found = run(lowered.program, inputs, slots, block=samples) if lowered.program.outputs else []
    rest = iter(found)
    outputs = jax.tree.leaves(lowered.outputs, is_leaf=is_output)
    return [_joined(value, rest, shared, samples) for value in outputs]


def _numbers(kind: Any, array: np.ndarray) -> Iterator[np.ndarray]:
    tail = (kind.width,) if isinstance(kind, RowArray) else ()
    flat = array.reshape(len(array), -1, *tail)
    return (flat[:, n] for n in range(flat.shape[1]))


def _joined(value: Any, found: Iterator[Any], shared: Sequence[Any], samples: int) -> np.ndarray:
    if isinstance(value, Const | PrologueOutput):
        array = plain(value.array if isinstance(value, Const) else shared[value.number])
        return np.broadcast_to(array, (samples, *array.shape))
    pairs = bool(value.nodes.size) and isinstance(value.nodes.flat[0], KeyPair)
    own = [np.asarray(next(found)) for _ in range(value.nodes.size * (2 if pairs else 1))]
    return np.stack(own, axis=1).reshape(samples, *value.shape, *([2] if pairs else []))


# --- smaller programs ---------------------------------------------------------------------------------------


def smallest(case: Case, is_bad: Callable[[Case], bool], *, most: int = 300) -> Case:
    """A program that is still bad, of which no part can be left out; asks `is_bad` at most so often."""
    asked = 0
    for outputs in ((output,) for output in case.outputs):
        alone = case._replace(outputs=outputs)
        if is_bad(alone):
            case = alone
            break
    shrinking = True
    while shrinking and asked < most:
        shrinking = False
        for outputs in smaller(case.outputs):
            asked += 1
            one = case._replace(outputs=outputs)
            if asked > most:
                break
            if is_bad(one):
                case, shrinking = one, True
                break
    return case


def smaller(outputs: tuple[Expr, ...]) -> Iterator[tuple[Expr, ...]]:
    """Programs with a part replaced by one of its own parts, or by numbers; the largest parts first."""
    for number, output in enumerate(outputs):
        for changed in _smaller(output):
            yield (*outputs[:number], changed, *outputs[number + 1 :])


def _smaller(expr: Expr) -> Iterator[Expr]:
    if expr.op in ("variable", "constant"):
        return
    for part in parts_of(expr):
        if part is not expr and part.type == expr.type and _is_free_of(part, _bound(expr)):
            yield part
    yield constant(expr.type, random.Random(0))
    for number, part in enumerate(expr.parts):
        for changed in _smaller(part):
            yield expr._replace(parts=(*expr.parts[:number], changed, *expr.parts[number + 1 :]))


def _bound(expr: Expr) -> set[int]:
    """All variables that some operation inside gives."""
    return {number for part in parts_of(expr) for own in part.binds for number in own}


def _is_free_of(part: Expr, bound: set[int]) -> bool:
    own = _bound(part)
    read = {each.params[0] for each in parts_of(part) if each.op == "variable"}
    return not (read - own) & bound
