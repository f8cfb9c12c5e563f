"""Control flow of drawn programs; see `drawn_operations`. Importing this module registers all operations."""

from collections.abc import Callable
from typing import Any

import drawn_functions  # noqa: F401
import drawn_indexing  # noqa: F401
import drawn_random  # noqa: F401
import drawn_shapes  # noqa: F401
import jax
import jax.numpy as jnp
from drawn_operations import ANY, Draw, finite, held, ordered
from drawn_programs import Part, operation
from drawn_types import FLOATS, INTEGERS, NUMBERS, Type

lax = jax.lax

INDEX = Type("int32")
COUNTERS = ("int32", "int32", "uint8", "int16", "float32")
TURNS = (1, 2, 3, 4, 5, 10)


def control(name: str, draw: Callable, *, weight: float = 1.0) -> Callable:
    return operation(name, draw, kind="control", weight=weight)


def mixed(before: Any, after: Any) -> Any:
    """What a loop carries on: as different after each turn as can be, so that the number of turns shows."""
    if after.dtype.name == "bool":
        return before ^ after
    if after.dtype.name in INTEGERS:
        return before * after.dtype.type(5) + after
    return finite(after) - finite(before) if after.dtype.name in FLOATS else after


# --- branches -----------------------------------------------------------------------------------------------


@control("cond", lambda rng, own: ((), [Part(Type("bool")), Part(own), Part(own)]))
def _cond(params: tuple, own: Type, condition: Callable, one: Callable, other: Callable) -> Any:
    return lax.cond(condition(), one, other)


def _branches(rng: Draw, own: Type) -> Any:
    return (), [Part(Type(rng.choice(("int32", "int32", "int8", "uint32")))), *[Part(own)] * rng.choice((2, 3, 4))]


@control("switch", _branches)
def _switch(params: tuple, own: Type, index: Callable, *branches: Callable) -> Any:
    return lax.switch(index(), branches)


# --- loops --------------------------------------------------------------------------------------------------


def _carried(rng: Draw, own: Type) -> list[Type]:
    """The types of what a loop carries beside its result."""
    more = [Type(rng.choice(NUMBERS), rng.choice(((), (3,)))), Type("bool"), Type("key")]
    return [own, *rng.sample(more, rng.choice((0, 0, 1, 2)))]


def _loop(rng: Draw, own: Type) -> Any:
    carried, counter = _carried(rng, own), Type(rng.choice(COUNTERS))
    forms = ("bound", "bound", "and", "or")
    starts = [Part(type_) for type_ in carried]
    turns = [Part(type_, (counter, *carried)) for type_ in carried]
    asked = Part(Type("bool"), (counter, *carried))
    return (rng.choice(forms), counter.dtype), [Part(counter), Part(counter), asked, *starts, *turns]


@control("while", _loop, weight=5)
def _while(params: tuple, own: Type, first: Callable, last: Callable, asked: Callable, *parts: Callable) -> Any:
    """A loop whose counter goes on to a bound below eight, or for as long as something else holds as well."""
    form, dtype = params
    few = lambda x: jnp.clip(finite(x) if dtype == "float32" else x, x.dtype.type(0), x.dtype.type(7))
    count = len(parts) // 2
    starts, turns = parts[:count], parts[count:]
    bound = few(last())

    def goes_on(carry: Any) -> jax.Array:
        counter, *rest = carry
        below = counter < bound
        if form == "bound":
            return below
        own = asked(counter, *rest)
        return below & own if form == "and" else (counter < bound.dtype.type(5)) & (below | own)

    def turn(carry: Any) -> Any:
        counter, *rest = carry
        after = [part(counter, *rest) for part in turns]
        return counter + counter.dtype.type(1), mixed(rest[0], after[0]), *after[1:]

    return lax.while_loop(goes_on, turn, (few(first()), *(part() for part in starts)))[1]


def _range(rng: Draw, own: Type) -> Any:
    counter = INDEX
    known = rng.choice(("", "first", "first", "both"))
    return (known, rng.choice(TURNS)), [Part(counter), Part(counter), Part(own), Part(own, (counter, own))]


@control("fori", _range, weight=3)
def _fori(params: tuple, own: Type, first: Callable, last: Callable, start: Callable, turn: Callable) -> Any:
    known, turns = params
    low = 0 if known else first() & 3
    high = turns if known == "both" else last() & 7
    return lax.fori_loop(low, high, lambda n, carry: mixed(carry, turn(jnp.asarray(n, jnp.int32), carry)), start())


def _scanned(rng: Draw, own: Type) -> Any:
    taken = Type(rng.choice(NUMBERS), rng.choice(((), (), (2,))))
    gives = bool(own.shape) and own.dtype != "key" and 40 not in own.shape and rng.random() < 0.5
    turns = own.shape[0] if gives else rng.choice(TURNS)
    carried = Type(rng.choice(NUMBERS), rng.choice(((), (3,)))) if gives else own
    binds = (carried, taken)
    outputs = [Part(Type(own.dtype, own.shape[1:]), binds)] if gives else []
    parts = [Part(Type(taken.dtype, (turns, *taken.shape))), Part(carried), Part(carried, binds), *outputs]
    return (turns, rng.random() < 0.3), parts


@control("scan", _scanned, weight=3)
def _scan(params: tuple, own: Type, taken: Callable, start: Callable, turn: Callable, *gives: Callable) -> Any:
    length, reverse = params

    def step(carry: Any, x: Any) -> Any:
        return mixed(carry, turn(carry, x)), gives[0](carry, x) if gives else None

    carry, given = lax.scan(step, start(), taken(), length, reverse=reverse)
    return given if gives else carry


# --- lanes --------------------------------------------------------------------------------------------------


def _lanes(rng: Draw, own: Type) -> Any:
    if not own.shape or own.dtype == "key":
        return None
    out = rng.randrange(len(own.shape))
    count, body = own.shape[out], Type(own.dtype, own.shape[:out] + own.shape[out + 1 :])
    axes, parts, binds = [], [], []
    for _ in range(rng.choice((1, 2, 2))):
        lane = Type(rng.choice((*NUMBERS, "int32", "int32")), rng.choice(((), (), (3,), (2, 2))))
        axis = rng.randint(0, len(lane.shape))
        axes.append(axis)
        binds.append(lane)
        parts.append(Part(Type(lane.dtype, (*lane.shape[:axis], count, *lane.shape[axis:]))))
    inside = rng.choice(("while", "while", "fori", "", "", ""))
    return (out, tuple(axes)), [*parts, Part(body, tuple(binds), inside)]


@control("vmap", _lanes, weight=12)
def _vmap(params: tuple, own: Type, *parts: Callable) -> Any:
    out, axes = params
    *operands, body = parts
    return jax.vmap(body, tuple(axes), out)(*(operand() for operand in operands))


def _lanes_of_keys(rng: Draw, own: Type) -> Any:
    if not own.shape or own.dtype == "key":
        return None
    return (own.shape[0],), [Part(Type("key")), Part(Type(own.dtype, own.shape[1:]), (Type("key"),))]


@control("vmap keys", _lanes_of_keys)
def _vmap_keys(params: tuple, own: Type, key: Callable, body: Callable) -> Any:
    return jax.vmap(body)(jax.random.split(key(), params[0]))


def _together(rng: Draw, own: Type) -> Any:
    fits = own.shape and own.dtype in ANY
    return ((rng.choice(("psum", "pmax", "pmin", "index")),), [Part(own)]) if fits else None


@control("lanes together", _together)
def _lanes_together(params: tuple, own: Type, x: Callable) -> Any:
    """Lanes that see each other."""
    of_lane = {
        "psum": lambda v: lax.psum(finite(v, 4), "lanes"),
        "pmax": lambda v: lax.pmax(ordered(v), "lanes"),
        "pmin": lambda v: lax.pmin(ordered(v), "lanes"),
        "index": lambda v: held(v) + lax.axis_index("lanes").astype(v.dtype),
    }[params[0]]
    return jax.vmap(of_lane, axis_name="lanes")(x())


@control("map", lambda rng, own: _lanes_of(own))
def _map(params: tuple, own: Type, x: Callable, body: Callable) -> Any:
    return lax.map(body, x())


def _lanes_of(own: Type) -> Any:
    if not own.shape or 40 in own.shape or own.dtype == "key":
        return None
    return (), [Part(own), Part(Type(own.dtype, own.shape[1:]), (Type(own.dtype, own.shape[1:]),))]
