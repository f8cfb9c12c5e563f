"""Files of strangers end in a sentence or harm nothing: a sample in the suite, all of them as a slow test."""

from collections import Counter

import pytest
from hostile_files import cases, exports
from hostile_runs import healthy
from hostile_trial import Case, tried

ALL = list(cases())
EVERY = 80
"""The suite tries one case of so many."""


def wrong(chosen: list[Case], root) -> list[str]:
    """The faults of cases."""
    found = []
    for number, case in enumerate(chosen):
        (root / str(number)).mkdir()
        outcome = tried(case, root / str(number))
        found += [f"{case.kind}: {case.name}: {fault}" for fault in outcome.faults]
    return found


def test_there_are_enough_cases_of_each_kind():
    counts = Counter(case.kind.partition(":")[0] for case in ALL)
    assert len({(case.kind, case.name, id(case.call)) for case in ALL}) == len(ALL) > 3000
    assert min(counts[kind] for kind in ("plans", "profiles", "caches", "curves", "options")) >= 300


def test_a_sample_of_hostile_files_does_no_harm(tmp_path):
    assert wrong(ALL[::EVERY], tmp_path) == []


@pytest.mark.slow
def test_no_hostile_file_does_harm(tmp_path):
    assert wrong(ALL, tmp_path) == []


@pytest.mark.slow
def test_no_hostile_run_or_place_does_harm_in_an_export(tmp_path):
    (tmp_path / "source").mkdir()
    assert wrong(list(exports(healthy(tmp_path / "source"))), tmp_path) == []
