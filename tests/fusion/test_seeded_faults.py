"""Drawn programs find rules that are wrong; `benchmarks/fusion_programs.py --faults` asks it of all faults."""

import pytest
from fault_runs import found
from faults import FAULTS

SOME = (
    "a loop of lanes asks the first lane",
    "a loop of lanes ends with its first lane",
    "lanes that have ended go on",
    "branches are exchanged",
    "all indices are clamped",
    "the last place is out of bounds",
)
MOST = 12
"""Programs that are tried."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning"),
]


@pytest.mark.parametrize("name", SOME)
def test_a_fault_is_found(name):
    assert found(name, MOST) is not None


def test_there_are_many_faults():
    assert len(FAULTS) >= 60
