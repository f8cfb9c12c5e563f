"""Every primitive on the edges of its types: by the reference and as machine code, beside XLA's unfused program.

`benchmarks/fusion_edges.py` asks the same of a GPU's kernels.
"""

import pytest
from code_runs import evaluate_by_code
from edges import Case, by_operands, cases, compare

from rollmill.fusion import evaluate
from rollmill.fusion.lower.rules import RULES

WAYS = {"reference": evaluate, "machine code": evaluate_by_code}
CHUNK = 12

MOVES = {  # fmt: skip
    "broadcast_in_dim",
    "call_hi_primitive",
    "checkpoint",
    "closed_call",
    "column_major",
    "composite",
    "concatenate",
    "cond",
    "copy",
    "copy_p",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "device_put",
    "eval_jaxpr",
    "expand_dims",
    "iota",
    "jit",
    "layout_constraint",
    "mesh_cast",
    "name",
    "optimization_barrier",
    "pad",
    "pcast",
    "pjit",
    "pvary",
    "random_bits",
    "random_clone",
    "random_fold_in",
    "random_gamma",
    "random_seed",
    "random_split",
    "random_unwrap",
    "random_wrap",
    "remat",
    "remat2",
    "reshape",
    "reshard",
    "rev",
    "scan",
    "sharding_constraint",
    "split",
    "squeeze",
    "stack",
    "stop_gradient",
    "threefry2x32",
    "tile",
    "transpose",
    "unstack",
    "while",
}
"""Primitives that move numbers, call functions or draw random bits, as synthetic_functions.py has them."""

OF_SEVERAL_OPERATIONS = {
    "cholesky",
    "conv_general_dilated",
    "custom_linear_solve",
    "lu",
    "lu_pivots_to_permutation",
    "reduce_window",
    "reduce_window_max",
    "reduce_window_min",
    "reduce_window_sum",
    "triangular_solve",
}
"""Primitives that are written out in operations of other cases, as synthetic_functions.py has them too."""

SAME_RULE = {
    "add_any": "add",
    "one_minus_square": "mul",
    "polynomial": "mul",
    "eq_to": "eq",
    "le_to": "le",
    "lt_to": "lt",
    "select": "select_n",
    "round": "round away",
    "round_away": "round away",
    "round_even": "round even",
    "reduce_precision": "reduce_precision bfloat16",
    "integer_pow": "integer_pow 2",
    "scatter_sub": "scatter_add",
    "psum": "reduce_sum",
    "pmax": "reduce_max",
    "pmin": "reduce_min",
}
"""Primitives whose operations are those of a case of another name."""

ORDINARY = ("float32", "int32", "uint8", "bool")
"""Types that the ordinary run of the tests has; the others take as long again, three times."""


DIFFERS_BY_EMITTERS = ("cbrt",)
"""Primitives whose last bits depend on XLA's code generator (`emitters`): slow tests have that of users."""


def chunks() -> list[list[Case]]:
    apart = lambda case: case.primitive in DIFFERS_BY_EMITTERS
    every = list(cases())
    groups = by_operands([case for case in every if not apart(case)])
    groups += by_operands([case for case in every if apart(case)])
    return [group[first : first + CHUNK] for group in groups for first in range(0, len(group), CHUNK)]


def is_ordinary(group: list[Case]) -> bool:
    if group[0].primitive in DIFFERS_BY_EMITTERS:
        return False
    types = group[0].types.partition(" to ")[0]
    return types in ORDINARY or group[0].primitive in ("gather", "scatter", "dynamic_slice")


def parameters() -> list:
    marks = lambda group: () if is_ordinary(group) else (pytest.mark.slow,)
    return [
        pytest.param(group, id=f"{group[0].name} and {len(group) - 1}", marks=marks(group)) for group in chunks()
    ]


@pytest.mark.parametrize("group", parameters())
@pytest.mark.slow_beyond(16)
def test_as_unfused(group):
    outcomes = compare(group, WAYS)
    assert len(outcomes) == 2 * len(group)
    assert [outcome for outcome in outcomes if outcome.differing or outcome.refusal] == []


def test_every_primitive_has_a_case():
    own = {case.primitive.replace("-", "_") for case in cases()}
    elsewhere = MOVES | OF_SEVERAL_OPERATIONS
    missing = [name for name in RULES if name.replace("-", "_") not in own and name not in elsewhere]
    assert [name for name in missing if SAME_RULE.get(name.replace("-", "_")) not in own] == []
