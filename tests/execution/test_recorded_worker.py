"""Recordings of a worker, on the clock of its host and of another one."""

import time

from rollmill.core.machine import host_id
from rollmill.execution.protocol import StopRecording
from rollmill.execution.recorded_worker import window_here

WINDOW = 300_000_000
"""Nanoseconds of the window that the coordinator asks for."""


def test_a_window_on_the_coordinator_s_host_is_that_of_its_clock():
    assert window_here(StopRecording(3, 1_000, 1_000 + WINDOW, host_id())) == (1_000, 1_000 + WINDOW)


def test_a_window_on_another_host_is_as_long_and_ends_as_the_request_arrives():
    before = time.monotonic_ns()
    begin, end = window_here(StopRecording(3, 1_000, 1_000 + WINDOW, "another"))
    assert end - begin == WINDOW and before <= end <= time.monotonic_ns()
