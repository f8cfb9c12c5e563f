"""Parts of the planner's benchmarks: candidates that a brief sweep leaves out, and WarpDrive's search."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from rollmill.plan_search.search.candidate import Candidate


@pytest.fixture(scope="module", autouse=True)
def scripts():
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    yield
    sys.path.pop(0)


def actors(count):
    return Candidate("central", "processes", actors=count, gpus=1)


PROGRAM = Candidate(fusion="full")


@pytest.mark.parametrize(
    ("medians", "candidate", "reason"),
    [
        ({}, actors(2), None),
        ({PROGRAM: 100.0, actors(1): 40.0}, actors(2), None),  # it may win by twice the proportion
        ({PROGRAM: 100.0, actors(1): 20.0}, actors(2), "left out: even twice central actors=1 in proportion"),
        (
            {PROGRAM: 100.0, actors(1): 60.0, actors(2): 49.0},
            actors(4),
            "and central actors=2 is 0.49 of the best",
        ),
        ({PROGRAM: 100.0, actors(1): 60.0, actors(2): 55.0}, actors(4), None),  # close enough to be measured
        ({PROGRAM: 100.0, actors(1): 30.0, actors(2): 49.0}, actors(4), None),  # it grows
    ],
)
def test_a_brief_sweep_leaves_out_what_cannot_matter(medians, candidate, reason):
    found = import_module("planner").cannot_matter(candidate, medians)
    assert found == reason if reason is None else reason in found


@pytest.mark.parametrize(("most", "begin", "tried"), [(100, 16, 8), (7, 16, 4), (64, 64, 6)])
def test_the_largest_size_is_found_by_doubling_and_halving(most, begin, tried):
    sizes, kept = [], []

    def succeeds(size):
        sizes.append(size)
        return size <= most

    found = import_module("autoscale").largest(begin, succeeds, kept.append, least=4)
    assert found == max(kept) <= most < found + max(4, found // 16) + 4
    assert len(sizes) <= tried
    assert all(size % 4 == 0 for size in sizes)


def test_failures_for_want_of_memory_are_counted():
    reasons = ["RESOURCE_EXHAUSTED: Out of memory", "std::bad_alloc", "cannot be fused", ""]
    assert import_module("planner").out_of_memory(reasons) == 2
