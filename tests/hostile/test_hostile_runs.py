"""Runs and plans of strangers end in one sentence."""

from pathlib import Path

import pytest
from hostile_runs import Case, cases, faults, healthy

ALL = list(cases())


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return healthy(tmp_path_factory.mktemp("runs"))


def test_there_are_enough_cases():
    assert len(ALL) >= 200 and len({(case.kind, case.name) for case in ALL}) == len(ALL)


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.kind}: {case.name}")
def test_every_case_ends_in_its_sentence(case: Case, source, tmp_path):
    assert faults(case, source, tmp_path) == []
