"""The snapshot of wordings is that of the source, and codes outlive rewording."""

import pytest

from rollmill.algorithms.sizes import check_positive, check_shards
from rollmill.core.errors import CheckpointError, UsageError
from wordings import SNAPSHOT, WORDINGS, Wording, raises, source_wordings, tells, updated


def test_the_snapshot_is_that_of_the_source():
    there, recorded = source_wordings(), set(WORDINGS.values())
    hint = f"write {SNAPSHOT.name} anew by `python tests/wordings.py`, and look at its difference"
    assert not there ^ recorded, f"{hint}: {sorted(there - recorded)} are new, {sorted(recorded - there)} are gone"


def test_a_code_stays_with_a_reworded_error():
    old = {
        "too-small": Wording("UsageError", "{}={} is too small."),
        "gone": Wording("UsageError", "no such name {}"),
    }
    new = {Wording("UsageError", "{}={} is much too small."), Wording("UsageError", "a file is missing")}
    assert updated(old, new) == {
        "too-small": Wording("UsageError", "{}={} is much too small."),
        "file-is-missing": Wording("UsageError", "a file is missing"),
    }
    assert updated(old, old.values()) == dict(sorted(old.items()))


def test_codes_tell_errors_apart():
    with raises("must-be-at-least-1", "num_envs=0"):
        check_positive({"num_envs": 0})
    others = [
        ("num-shards-does-not-divide", (), "expected num_shards"),
        ("must-be-at-least-1", ("num_envs=1",), "with"),
    ]
    for code, values, why in others:
        with pytest.raises(AssertionError, match=why), raises(code, *values):
            check_positive({"num_envs": 0})
    with pytest.raises(AssertionError, match="is a UsageError"), raises("must-be-at-least-1"):
        raise CheckpointError("num_envs=0 must be at least 1.")


def test_a_wording_is_found_within_a_longer_text():
    code = next(
        code for code, wording in WORDINGS.items() if wording.text == "num_shards={} does not divide num_envs={}."
    )
    text = "rollmill: config.toml: num_shards=3 does not\n  divide num_envs=4."
    assert tells(code, text, 3, "num_envs=4") and not tells(code, text, 5) and not tells(code, "num_shards=3")
    with pytest.raises(UsageError) as caught:
        check_shards(3, 4, rows_per_env=1, num_minibatches=1)
    assert tells(code, str(caught.value), "num_shards=3")
