"""Which requests make a batch, when it begins, and its padding."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollmill.serving.batching import Batcher, BatchingRule, check_rule, pad_batch, padded_size, padded_sizes
from wordings import raises


def test_a_batch_is_due_when_it_is_full_or_the_oldest_request_has_waited():
    batcher = Batcher(BatchingRule(4, 0.5))
    assert batcher.due_at() is None
    batcher.add("a", rows=1, now=10.0)
    assert batcher.due_at() == 10.5
    batcher.add("b", rows=2, now=10.4)
    assert batcher.due_at() == 10.5
    batcher.add("c", rows=1, now=10.45)
    assert batcher.due_at() == 10.0
    assert batcher.take() == ["a", "b", "c"] and batcher.rows == 0 and batcher.due_at() is None


def test_without_a_wait_whatever_is_there_is_due():
    batcher = Batcher(BatchingRule(4, 0.0))
    batcher.add("a", rows=1, now=3.0)
    assert batcher.due_at() == 3.0


def test_requests_stay_whole_and_in_order():
    batcher = Batcher(BatchingRule(4, 0.0))
    for name, rows in (("a", 3), ("b", 2), ("c", 1)):
        batcher.add(name, rows=rows, now=0.0)
    assert batcher.take() == ["a"]  # b does not fit, and c came after b
    assert batcher.take() == ["b", "c"]


def test_a_session_is_in_a_batch_once_and_its_requests_keep_their_order():
    batcher = Batcher(BatchingRule(8, 0.0))
    for name, slots in (("a1", [1]), ("b1", [2]), ("a2", [1]), ("ab", [1, 3]), ("c1", [3]), ("d1", [4])):
        batcher.add(name, rows=len(slots), slots=slots, now=0.0)
    assert batcher.take() == ["a1", "b1", "d1"]  # c1 follows ab, which follows a2, which follows a1
    assert batcher.take() == ["a2"]
    assert batcher.take() == ["ab"]
    assert batcher.take() == ["c1"]
    assert batcher.rows == 0


@given(
    st.lists(st.tuples(st.integers(1, 8), st.lists(st.integers(0, 3), max_size=2, unique=True)), max_size=40),
    st.sampled_from([8, 16]),
)
def test_every_request_is_taken_once_in_full_batches_without_a_session_twice(requests, max_batch):
    batcher = Batcher(BatchingRule(max_batch, 0.0))
    for number, (rows, slots) in enumerate(requests):
        batcher.add(number, rows=rows, slots=slots, now=float(number))
    taken = []
    while batcher.rows:
        batch = batcher.take()
        assert batch and sum(requests[number][0] for number in batch) <= max_batch
        slots = [slot for number in batch for slot in requests[number][1]]
        assert len(slots) == len(set(slots))
        taken += batch
    assert sorted(taken) == list(range(len(requests)))
    for slot in range(4):  # the requests of a session in the order in which they came
        of_session = [number for number in taken if slot in requests[number][1]]
        assert of_session == sorted(of_session)


def test_sizes_are_the_powers_of_two():
    assert padded_sizes(1) == [1] and padded_sizes(64) == [1, 2, 4, 8, 16, 32, 64]
    assert [padded_size(rows) for rows in (1, 2, 3, 4, 5, 33, 64)] == [1, 2, 4, 4, 8, 64, 64]


def test_padding_is_zeros_after_the_rows():
    parts = [
        {"x": np.float32([[1, 2]]), "n": np.int32([7])},
        {"x": np.float32([[3, 4], [5, 6]]), "n": np.int32([8, 9])},
    ]
    found = pad_batch(parts, 4)
    np.testing.assert_array_equal(found["x"], np.float32([[1, 2], [3, 4], [5, 6], [0, 0]]))
    np.testing.assert_array_equal(found["n"], np.int32([7, 8, 9, 0]))
    assert found["x"].dtype == np.float32 and found["n"].dtype == np.int32
    assert pad_batch([()], 4) == ()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (BatchingRule(100, 0.0), ("max-batch-has-to-be", "100", "128")),
        (BatchingRule(0, 0.0), ("max-batch-has-to-be", "0", "1")),
        (BatchingRule(2**17, 0.0), ("max-batch-has-to-be", "65536")),
        (BatchingRule(8, -0.001), ("max-wait-ms-has-to", "-1")),
        (BatchingRule(8, float("nan")), ("max-wait-ms-has-to", "nan")),
    ],
)
def test_rules_out_of_bounds_are_refused(rule, message):
    with raises(*message):
        check_rule(rule)
