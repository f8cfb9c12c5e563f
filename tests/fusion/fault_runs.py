"""How many drawn programs it takes to find a fault of the compiler."""

import functools
from typing import Any, NamedTuple

import pytest
from code_runs import run_code
from drawn_compare import QUICKLY, Case, case_of, compare_with, is_wrong, unfused
from faults import FAULTS


class Finding(NamedTuple):
    """The first program that a fault makes wrong."""

    programs: int
    """Programs that were tried, with that one."""
    outcome: str
    detail: str


@functools.cache
def _expected(seed: int) -> tuple[Case, list[Any]]:
    case = case_of(seed)
    return case, unfused(case, QUICKLY)


def found(name: str, most: int) -> Finding | None:
    """The first of so many programs whose machine code a fault makes wrong; None where there is none."""
    for seed in range(most):
        case, expected = _expected(seed)
        with pytest.MonkeyPatch.context() as patch:
            FAULTS[name](patch)
            verdicts = compare_with(lambda own=expected: own, case, {"machine code": run_code})
        if is_wrong(verdicts):
            return Finding(seed + 1, verdicts[0].outcome, verdicts[0].detail)
    return None
