"""Programs drawn at random: control flow in control flow, lanes of lanes, indexing, sorting, random numbers.

Each is computed by XLA, by the reference and as machine code. `benchmarks/fusion_programs.py` draws thousands, and
asks the same of a GPU's kernels. Programs that differed once are kept, made as small as they could be.
"""

import json
from pathlib import Path

import pytest
from drawn_compare import QUICKLY, WAYS, Case, as_case, case_of, compare, reference, smallest
from drawn_programs import Expr, parts_of, program, variable
from drawn_text import from_json, to_json
from drawn_types import Type

from rollmill.fusion.ir import OPERATIONS

FAST, CHUNK = 1, 1
SLOW = 75
CORPUS = json.loads((Path(__file__).parent / "drawn_corpus.json").read_text())

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")


def assert_equal(case: Case) -> None:
    verdicts = compare(case, WAYS, QUICKLY)
    assert [verdict for verdict in verdicts if verdict.outcome not in ("equal", "refused")] == []


@pytest.mark.parametrize("first", range(0, FAST + SLOW, CHUNK))
@pytest.mark.slow_beyond(FAST // CHUNK)
def test_as_unfused(first):
    for seed in range(first, first + CHUNK):
        assert_equal(case_of(seed))


@pytest.mark.parametrize("kept", CORPUS, ids=lambda kept: kept["name"])
@pytest.mark.slow_beyond(12)
def test_what_differed_once(kept):
    assert_equal(as_case(tuple(map(from_json, kept["outputs"])), kept["seed"]))


def test_arrays_of_no_elements_are_leaves():
    """JAX refuses to index them, as the program of this seed did once."""
    empty = [part for output in program(101484) for part in parts_of(output) if 0 in part.type.shape]
    assert empty and {part.op for part in empty} <= {"constant", "fit", "variable"}


def test_programs_are_kept_as_text():
    for seed in range(20):
        for output in program(seed):
            again = from_json(json.loads(json.dumps(to_json(output))))
            assert repr(again) == repr(output)  # NaN is not equal to itself


def test_what_differs_is_made_as_small_as_it_can_be(monkeypatch):
    """A product that is a sum in one way is found, and all that does not matter is left out."""
    monkeypatch.setitem(OPERATIONS, "mul", OPERATIONS["add"])
    numbers = Type("int16", (4,))
    product = Expr("mul", numbers, (), (variable(6, numbers), variable(6, numbers)))
    output = Expr("flip", numbers, (0, True), (Expr("neg", numbers, (), (product,)),))

    def differs(case: Case) -> bool:
        return any(verdict.outcome == "differs" for verdict in compare(case, {"reference": reference}, QUICKLY))

    case = as_case((output,), 3)
    assert differs(case)
    (found,) = smallest(case, differs).outputs
    assert [part.op for part in parts_of(found) if part.op not in ("variable", "constant")] == ["mul"]
