"""How many drawn programs it takes to find a fault of the compiler."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import pytest
from code_runs import kernel_of, run_code
from drawn_compare import QUICKLY, SAMPLES, Case, case_of, compare_with, is_wrong, lowered_case, plain, unfused
from drawn_programs import Expr, arguments_of, function_of
from faults import FAULTS, PRIMITIVES

from rollmill.fusion.backends.cpu.target import processor
from rollmill.fusion.lower.values import Const, is_output

KEPT = 400
"""Programs that one process keeps for further faults."""


class Finding(NamedTuple):
    """The first program that a fault makes wrong."""

    programs: int
    """Programs that were drawn, with that one."""
    outcome: str
    detail: str


def found(name: str, most: int) -> Finding | None:
    """The first of so many programs whose machine code a fault makes wrong; None where there is none.

    Of each program, only outputs are computed that contain a primitive which the fault names, and only where their
    code is another one with the fault.
    """
    for seed in range(most):
        places = tuple(n for n, own in enumerate(_primitives(seed)) if _concerns(name, own))
        if not places:
            continue
        case, code = _part(seed, places)
        with pytest.MonkeyPatch.context() as patch:
            FAULTS[name](patch)
            if code_of(case) == code:
                continue
        expected = unfused(case, QUICKLY)
        with pytest.MonkeyPatch.context() as patch:
            FAULTS[name](patch)
            verdicts = compare_with(lambda own=expected: own, case, {"machine code": run_code})
        if is_wrong(verdicts):
            return Finding(seed + 1, verdicts[0].outcome, verdicts[0].detail)
    return None


def _concerns(name: str, primitives: frozenset[str]) -> bool:
    return name not in PRIMITIVES or bool(primitives & set(PRIMITIVES[name]))


_case = functools.lru_cache(maxsize=KEPT)(case_of)


@functools.lru_cache(maxsize=KEPT)
def _part(seed: int, places: tuple[int, ...]) -> tuple[Case, Any]:
    """The program of a seed with some of its outputs alone, and its code."""
    whole = _case(seed)
    outputs = tuple(whole.outputs[n] for n in places)
    read = arguments_of(outputs) or [min(whole.arguments)]
    case = whole._replace(outputs=outputs, arguments={number: whole.arguments[number] for number in read})
    return case, code_of(case)


def code_of(case: Case) -> Any:
    """All that the results of a program depend on; the error where it has no code."""
    try:
        lowered = lowered_case(case)
        slots, shared = lowered.prologue()
        values = jax.tree.leaves(lowered.outputs, is_leaf=is_output)
        known = [value.array for value in values if isinstance(value, Const)]
        program, lanes = lowered.program, min(processor().lanes, SAMPLES)
        text = str(kernel_of(program, len(program.inputs), len(slots), SAMPLES, lanes).module)
        return text, [plain(array).tobytes() for array in (*slots, *shared, *known)]
    except Exception as error:
        return repr(error)


@functools.lru_cache(maxsize=KEPT)
def _primitives(seed: int) -> tuple[frozenset[str], ...]:
    """Names of the primitives in each output of a program."""
    case = _case(seed)
    each = {n: jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for n, array in case.arguments.items()}
    return tuple(primitives_of(output, each) for output in case.outputs)


def primitives_of(output: Expr, arguments: dict[int, Any]) -> frozenset[str]:
    """Names of the primitives that an output is traced to."""
    return frozenset(_names(jax.make_jaxpr(function_of([output]))(arguments).jaxpr))


def _names(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
        for own in inner:
            if hasattr(own, "eqns"):
                yield from _names(own)
