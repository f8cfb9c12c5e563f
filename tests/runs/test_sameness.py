"""Values and functions that are certainly the same, and those that may differ."""

import dataclasses
import functools
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from rollmill.runs.equality import certainly_same


def scaled(factor, *, bias=0.0):
    def scale(x, power=1):
        return x**power * factor + bias

    return scale


def countdown():
    def count(n):
        return 0 if n == 0 else count(n - 1)

    return count


class Pair(NamedTuple):
    first: object
    second: object


class Layer(eqx.Module):
    weight: object
    name: str = eqx.field(static=True, default="layer")


@dataclasses.dataclass
class Sized:
    size: int = 0


class WithMore(Sized):
    """Has an attribute that is no field."""

    def __init__(self, more):
        super().__init__()
        self.more = more


class Opaque:
    """An object of a kind that is not known."""


SAME = {
    "closures": lambda: scaled(2.0),
    "functions that call themselves": countdown,
    "partials": lambda: functools.partial(scaled(2.0), power=3),
    "tuples with names": lambda: Pair(scaled(1), [1, {"a": None}]),
    "modules": lambda: Layer(jnp.ones(3)),
    "arrays": lambda: np.arange(3, dtype=np.int8),
    "not a number": lambda: float("nan"),
    "spaces": lambda: Dict({"a": Box(0, 1, (2,)), "b": Discrete(3)}),
    "methods": lambda: Layer(1.0).__init__,
}
DIFFERENT = {
    "what is closed over": (scaled(2.0), scaled(3.0)),
    "keywords that are closed over": (scaled(2.0), scaled(2.0, bias=1.0)),
    "code": (lambda x: x + 1, lambda x: x + 2),
    "defaults": (lambda x=1: x, lambda x=2: x),
    "arguments of partials": (functools.partial(max, 1), functools.partial(max, 2)),
    "integers and floats": (1, 1.0),
    "signs of zeros": (0.0, -0.0),
    "values of arrays": (np.ones(2), np.zeros(2)),
    "types of arrays": (np.ones(2), np.ones(2, np.float32)),
    "classes": (Pair(1, 2), (1, 2)),
    "names in modules": (Layer(1, "a"), Layer(1, "b")),
    "bounds that are close": (
        Box(0, np.float32(1), (1,)),
        Box(0, np.nextafter(np.float32(1), np.float32(2)), (1,)),
    ),
    "lengths": ((1, 2), (1, 2, 3)),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "kinds that are not known": (Opaque(), Opaque()),
    "the last of many closures": ([scaled(i) for i in range(50)], [scaled(min(i, 48)) for i in range(50)]),
    "the last of many spaces": tuple(
        Dict({f"{i}": Box(0, 1 + k * (i == 19), (2,)) for i in range(20)}) for k in (0, 1)
    ),
    "attributes beside the fields": (WithMore(1), WithMore(2)),
    "weak types": (jnp.asarray(1.0), jnp.float32(1.0)),
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_what_is_made_twice_in_the_same_way_is_the_same(make):
    assert certainly_same(make(), make())


def test_a_space_stays_the_same_when_it_is_printed_and_sampled():
    printed = SAME["spaces"]()
    assert "Box" in repr(printed) and printed.sample().keys() == {"a", "b"}
    assert certainly_same(SAME["spaces"](), printed)


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_in_a_part_may_differ(one, other):
    assert not certainly_same(one, other)
    assert not certainly_same(other, one)
