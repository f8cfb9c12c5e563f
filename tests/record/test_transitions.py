"""Files of recorded transitions that are damaged."""

import jax
import numpy as np
import pytest

from rollmill.record.transitions import read_transitions, write_transitions
from wordings import raises

EXPECTED = {"observation": jax.ShapeDtypeStruct((4,), np.float32)}


@pytest.fixture
def rows():
    numbers, never = np.random.default_rng(0), np.zeros(500, bool)
    observation, reward = numbers.random((500, 4), np.float32), numbers.random(500, np.float32)
    return {"observation": observation, "reward": reward, "terminated": never, "truncated": never}


def test_damaged_bytes_are_no_archive(rows, tmp_path):
    file = tmp_path / "rows.npz"
    write_transitions(file, rows)
    assert [*read_transitions(file, EXPECTED)] == [*rows]
    intact = file.read_bytes()
    for place in (100, 200, 1000, len(intact) - 60):  # in a header of NumPy, in numbers, and in the directory
        file.write_bytes(intact[:place] + bytes(60) + intact[place + 60 :])
        with raises("is-no-archive-numpy-arrays"):
            read_transitions(file, EXPECTED)
    with file.open("wb") as array:
        np.save(array, rows["reward"])  # not an archive of arrays, but one array
    with raises("is-no-archive-numpy-arrays"):
        read_transitions(file, EXPECTED)


def test_one_reward_of_all_transitions_is_refused(rows, tmp_path):
    write_transitions(tmp_path / "rows.npz", {**rows, "reward": np.float32(1)})
    with raises("has-shape-expected-with-one", "observation"):
        read_transitions(tmp_path / "rows.npz", EXPECTED)
