"""Requests of strangers leave the owner in: a sample in the suite, all of them as a slow test."""

import contextlib

import pytest

from .conftest import serving
from .hostile_requests import TOKEN, Request, Strangers, requests

ALL = list(requests())
EVERY = 9
"""The suite sends one request of so many."""


def wrong(run, chosen: list[Request]) -> list[str]:
    """The faults of a server's answers."""
    with serving(run, token=TOKEN.encode()) as server, contextlib.closing(Strangers(server)) as strangers:
        return [
            f"{request.kind}: {request.name}: {fault}"
            for request in chosen
            for fault in strangers.tried(request).faults
        ]


def test_there_are_enough_requests():
    assert len(ALL) >= 700 and len({request.kind for request in ALL}) == 7


def test_a_sample_of_hostile_requests_leaves_the_owner_in(cartpole):
    assert wrong(cartpole, ALL[::EVERY]) == []


@pytest.mark.slow
def test_no_hostile_request_keeps_the_owner_out(cartpole):
    assert wrong(cartpole, ALL) == []
