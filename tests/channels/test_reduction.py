"""The mean over ranks: by value, the same bits in every rank, and no wrong sum when a rank is missing."""

import time

import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.channels.errors import Abandoned, ChannelClosed, TimedOut
from rollmill.channels.layout import Layout
from rollmill.channels.shm.allreduce import ARRIVED
from wordings import raises

SHAPES = [("float32", (700,)), ("float32", (3, 5)), ("float64", (11,)), ("bfloat16", (9,)), ("float32", ())]


def gradients(rank, step):
    random = np.random.default_rng([rank, step])
    return [(random.normal(size=shape) * 10.0**rank).astype(jnp.dtype(dtype)) for dtype, shape in SHAPES]


LAYOUT = Layout.of(gradients(0, 0))


def in_rank_order(step, size):
    """The definition, written out."""
    means = []
    for leaves in zip(*[gradients(rank, step) for rank in range(size)], strict=True):
        wide = np.float64 if leaves[0].dtype == np.float64 else np.float32
        total = leaves[0].astype(wide)
        for leaf in leaves[1:]:
            total = total + leaf.astype(wide)
        means.append((total / wide(size)).astype(leaves[0].dtype))
    return means


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_gets_the_same_bits_and_they_are_the_mean(open_wire, run_together, size):
    def take_part(rank):
        reduction = open_wire().reduction("gradients", rank=rank, size=size, layout=LAYOUT)
        return [reduction.mean(gradients(rank, step), step=step, timeout=10.0) for step in range(12)]

    of_ranks = run_together(*[lambda r=rank: take_part(r) for rank in range(size)])
    for means in of_ranks:
        for step, mean in enumerate(means):
            for got, expected in zip(mean, in_rank_order(step, size), strict=True):
                assert got.dtype == expected.dtype and got.shape == expected.shape
                assert got.tobytes() == expected.tobytes()


def test_shares_of_many_elements_are_summed_in_blocks(open_threads_wire, run_together):
    count = 200_001
    layout = Layout.of(np.zeros(count, np.float32))

    def take_part(rank):
        part = np.arange(count, dtype=np.float32) * (rank + 1)
        return open_threads_wire().reduction("g", rank=rank, size=3, layout=layout).mean(part, timeout=10.0)

    for mean in run_together(*[lambda r=rank: take_part(r) for rank in range(3)]):
        np.testing.assert_array_equal(mean, np.arange(count, dtype=np.float32) * 2)


def test_infinities_and_nans_pass_without_a_warning(open_threads_wire, run_together):
    layout = Layout.of(np.zeros(3, np.float32))
    parts = [np.array([np.inf, np.nan, 3e38], np.float32), np.array([-np.inf, 1, 3e38], np.float32)]

    def take_part(rank):
        return open_threads_wire().reduction("g", rank=rank, size=2, layout=layout).mean(parts[rank], timeout=10.0)

    for mean in run_together(lambda: take_part(0), lambda: take_part(1)):
        np.testing.assert_array_equal(mean, np.array([np.nan, np.nan, np.inf], np.float32))


def open_ranks(open_wire, size=2, **options):
    return [open_wire(**options).reduction("g", rank=rank, size=size, layout=LAYOUT) for rank in range(size)]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_never_arrives_gives_nobody_a_mean_and_ends_the_reduction(open_wire, missing):
    ranks = open_ranks(open_wire)
    present = ranks[1 - missing]
    with pytest.raises(TimedOut):
        present.mean(gradients(0, 0), timeout=0.1)
    for late in (ranks[missing], present):
        with raises("rank-left-reduction"):
            late.mean(gradients(0, 0), timeout=5.0)


def test_a_rank_that_dies_between_arriving_and_summing_gives_nobody_a_mean(open_threads_wire):
    present, dying = open_ranks(open_threads_wire)
    dying._layout.fill(dying._operand, gradients(1, 0))
    dying._lines[1][ARRIVED] = 1
    with pytest.raises(TimedOut):
        present.mean(gradients(0, 0), timeout=0.1)


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_rank_that_leaves_ends_the_waiting_of_the_others(open_wire, run_together, leaving):
    ranks = open_ranks(open_wire)

    def leave():
        time.sleep(0.05)
        ranks[leaving].close()

    def wait():
        with raises("rank-left-reduction", leaving):
            ranks[1 - leaving].mean(gradients(0, 0), timeout=60.0)

    began = time.monotonic()
    run_together(leave, wait)
    assert time.monotonic() - began < 30


def test_a_rank_may_leave_after_the_last_mean(open_wire, run_together):
    ranks = open_ranks(open_wire)

    def take_part(rank):
        mean = ranks[rank].mean(gradients(rank, 0), timeout=10.0)
        ranks[rank].close()
        return mean

    first, second = run_together(lambda: take_part(0), lambda: take_part(1))
    assert first[0].tobytes() == second[0].tobytes()


def test_ranks_that_disagree_about_the_step_get_no_mean(open_wire, run_together):
    ranks = open_ranks(open_wire)

    def take_part(rank):
        with raises("ranks-disagree-about-step-restart", "rank 0 is at 7, rank 1 is at 8"):
            ranks[rank].mean(gradients(rank, 0), step=7 + rank, timeout=10.0)

    run_together(lambda: take_part(0), lambda: take_part(1))


def test_a_rank_that_waits_wakes_up_when_the_run_is_stopped(open_wire):
    ranks = open_ranks(open_wire, abandon=lambda: True)
    for rank in ranks:
        with pytest.raises((Abandoned, ChannelClosed)):
            rank.mean(gradients(0, 0))


def test_a_rank_is_opened_once(open_wire):
    open_wire().reduction("g", rank=1, size=2, layout=LAYOUT)
    with raises("rank-was-opened-before-and", "1"):
        open_wire().reduction("g", rank=1, size=2, layout=LAYOUT)
    with raises("must-be-from-0-to", "rank", "2"):
        open_wire().reduction("g", rank=2, size=2, layout=LAYOUT)


def test_integers_have_no_mean(open_wire):
    with raises("has-no-mean-in-own"):
        open_wire().reduction("g", rank=0, size=2, layout=Layout.of({"count": np.zeros(3, np.int32)}))
