"""Programs of one environment that are drawn at random, as trees of operations.

A tree can be stored as JSON, made smaller part by part, and run by JAX. Floats are small whole numbers, infinities
or NaN, on which arithmetic is exact, so that every way of computing a program gives the same bits. Operations that
round stand at the root of a tree alone.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("float32", "float16", "bfloat16")
SIGNED, UNSIGNED = ("int8", "int16", "int32"), ("uint8", "uint16", "uint32")
INTEGERS = (*SIGNED, *UNSIGNED)
NUMBERS = (*FLOATS, *INTEGERS, "bool")

HELD = {"float32": 50, "float16": 16, "bfloat16": 4}
"""Magnitudes up to which sums and products of a few whole numbers are exact."""

EDGES = {
    "float32": [0, -0.0, 1, -1, 2, 3, -7, 50, 2.5, -0.5, np.nan, np.inf, -np.inf, 2.0**31, -(2.0**31), 300],
    "float16": [0, -0.0, 1, -1, 2, 3, -7, np.nan, np.inf, -np.inf, 300, -60000],
    "bfloat16": [0, -0.0, 1, -1, 2, 3, -4, np.nan, np.inf, -np.inf, 256, -(2.0**31)],
    "bool": [False, True],
}
SOME_INTEGERS = [0, 1, 2, 3, -1, 7, 31, 32, 33, -2, -9, 100]


class Type(NamedTuple):
    """Type and shape of an array; the type `key` is that of random keys."""

    dtype: str
    shape: tuple[int, ...] = ()


class Expr(NamedTuple):
    """An operation on the results of others."""

    op: str
    type: Type
    params: tuple = ()
    parts: tuple["Expr", ...] = ()
    binds: tuple[tuple[int, ...], ...] = ()
    """For each part, the variables that the operation gives to it."""


class Part(NamedTuple):
    """What an operation asks for: an expression of a type, which may read variables of these types."""

    type: Type
    binds: tuple[Type, ...] = ()
    op: str = ""
    """The operation that the expression has at its root, where it must be that one."""


class Operation(NamedTuple):
    """How an operation is drawn and run."""

    kind: str
    """`plain`, `control` or `random`."""
    weight: float
    draw: Callable[[random.Random, Type], tuple[tuple, list[Part]] | None]
    """From the wanted type to parameters and parts; None where the operation does not give such a type."""
    run: Callable[..., Any]
    """`run(params, type, *parts)`, each part a function of what it is given."""


OPERATIONS: dict[str, Operation] = {}


def operation(name: str, draw: Callable, *, kind: str = "plain", weight: float = 1.0) -> Callable:
    """Registers an operation whose parts are functions."""

    def add(run: Callable) -> Callable:
        OPERATIONS[name] = Operation(kind, weight, draw, run)
        return run

    return add


def of_values(name: str, draw: Callable, run: Callable, *, kind: str = "plain", weight: float = 1.0) -> None:
    """Registers an operation `run(params, type, *values)`."""
    OPERATIONS[name] = Operation(
        kind, weight, draw, lambda params, own, *parts: run(params, own, *(part() for part in parts))
    )


# --- running ------------------------------------------------------------------------------------------------


def run(expr: Expr, variables: Mapping[int, Any]) -> Any:
    """The result of an expression; to be traced by JAX."""
    if expr.op == "variable":
        return variables[expr.params[0]]
    binds = expr.binds or ((),) * len(expr.parts)
    parts = [_function(part, own, variables) for part, own in zip(expr.parts, binds, strict=True)]
    result = OPERATIONS[expr.op].run(expr.params, expr.type, *parts)
    if expr.type.dtype != "key" and OPERATIONS[expr.op].kind != "rounded":
        assert (result.dtype.name, result.shape) == tuple(expr.type), (expr.op, expr.type, result)
    return result


def _function(part: Expr, own: tuple[int, ...], variables: Mapping[int, Any]) -> Callable[..., Any]:
    return lambda *given: run(part, {**variables, **dict(zip(own, given, strict=True))})


# --- arguments ----------------------------------------------------------------------------------------------

ARGUMENTS = (
    Type("float32", (4,)),
    Type("float32", (2, 3)),
    Type("float32", (40,)),
    Type("float16", (3,)),
    Type("bfloat16", (3,)),
    *(Type(dtype, (3 + n % 2,)) for n, dtype in enumerate(INTEGERS)),
    Type("int32"),
    Type("bool", (4,)),
    Type("key"),
)


def edges_of(dtype: str) -> list[Any]:
    """Values at which ways of computing could disagree."""
    if dtype in EDGES:
        return EDGES[dtype]
    limits = np.iinfo(dtype)
    return [n for n in SOME_INTEGERS if n >= limits.min] + [limits.min, limits.max, limits.max - 1]


def arguments(seed: int, samples: int) -> dict[int, Any]:
    """Arrays `[samples, ...]` for the arguments, half of them ordinary numbers and half edges."""
    draw = np.random.default_rng(seed)
    found = {}
    for number, (dtype, shape) in enumerate(ARGUMENTS):
        if dtype == "key":
            found[number] = jax.random.split(jax.random.key(seed), samples)
            continue
        size = (samples, *shape)
        edges = draw.choice(np.asarray(edges_of(dtype), object), size)
        low, high = (0, 2) if dtype == "bool" else (0, 9) if dtype in UNSIGNED else (-4, 8)
        ordinary = draw.integers(low, high, size)
        mixed = np.where(draw.random(size) < 0.5, edges, ordinary)
        found[number] = jnp.asarray(mixed.astype(jnp.dtype(dtype)))
    return found


# --- drawing ------------------------------------------------------------------------------------------------

SHAPES = ((), (), (3,), (4,), (4,), (2,), (2, 3), (3, 2))


class Limits(NamedTuple):
    """How large programs are."""

    operations: int = 11
    """Operations of one output."""
    nests: int = 3
    """Control flow inside of control flow."""


MIXED = Limits()
"""The limits of most programs."""


class Drawing:
    """Draws the expressions of one program."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self.random = random.Random(seed)
        self.limits = limits
        self.left = 0
        self.following = len(ARGUMENTS)

    def output(self, number: int) -> Expr:
        """An output: the first has control flow at its root, the second an operation that rounds."""
        self.left = self.limits.operations
        scope = dict(enumerate(ARGUMENTS))
        if number:
            name = self.random.choice([name for name, own in OPERATIONS.items() if own.kind == "rounded"])
            own = Type("float32")
            return self._of(name, OPERATIONS[name].draw(self.random, own), scope, 0, own)
        return self.expression(self.type(), scope, 0, force="control")

    def type(self) -> Type:
        """A type of a result."""
        wide = self.random.random() < 0.04
        return Type("float32", (40,)) if wide else Type(self.random.choice(NUMBERS), self.random.choice(SHAPES))

    def expression(
        self, wanted: Type, scope: dict[int, Type], nests: int, *, force: str = "", op: str = ""
    ) -> Expr:
        """An expression of a type, which reads the variables of a scope."""
        self.left -= 1
        drawn = OPERATIONS[op].draw(self.random, wanted) if op else None
        if drawn is not None:
            return self._of(op, drawn, scope, nests, wanted)
        if self.left > 0 or force:
            kind = force or self._kind(nests)
            names = [name for name, own in OPERATIONS.items() if own.kind == kind]
            for _ in range(12):
                (name,) = self.random.choices(names, [OPERATIONS[name].weight for name in names])
                drawn = OPERATIONS[name].draw(self.random, wanted)
                if drawn is not None:
                    return self._of(name, drawn, scope, nests, wanted)
        return self._leaf(wanted, scope)

    def _kind(self, nests: int) -> str:
        share = self.random.random()
        if nests < self.limits.nests and share < 0.45:
            return "control"
        return "random" if share > 0.94 else "plain"

    def _of(
        self, name: str, drawn: tuple[tuple, list[Part]], scope: dict[int, Type], nests: int, wanted: Type
    ) -> Expr:
        params, parts = drawn
        deeper = nests + (OPERATIONS[name].kind == "control")
        binds: list[tuple[int, ...]] = [()] * len(parts)
        found: list[Any] = [None] * len(parts)
        # Bodies of loops and lanes first: what is left of the operations is for what they begin with.
        for place in sorted(range(len(parts)), key=lambda n: not parts[n].binds):
            part = parts[place]
            own = {self.following + n: type_ for n, type_ in enumerate(part.binds)}
            self.following += len(own)
            binds[place] = tuple(own)
            found[place] = self.expression(part.type, {**scope, **own}, deeper, op=part.op)
        return Expr(name, wanted, params, tuple(found), tuple(binds))

    def _leaf(self, wanted: Type, scope: dict[int, Type]) -> Expr:
        # Variables that control flow gives are read more often than the program's arguments.
        own = {
            number: type_ for number, type_ in scope.items() if number >= len(ARGUMENTS) and type_.dtype != "key"
        }
        share = self.random.random()
        if own and share < 0.65 and wanted.dtype != "key":
            return fitted(self.random.choice(list(own)), own, wanted)
        same = [number for number, type_ in scope.items() if type_ == wanted]
        if same and (share < 0.75 or wanted.dtype == "key"):
            return variable(self.random.choice(same), wanted)
        alike = [number for number, type_ in scope.items() if type_.dtype == wanted.dtype]
        if alike and share < 0.85 and wanted.dtype != "key":
            return fitted(self.random.choice(alike), scope, wanted)
        return constant(wanted, self.random)


def fitted(number: int, scope: Mapping[int, Type], wanted: Type) -> Expr:
    """What a variable holds, in another shape and of another type."""
    own = variable(number, scope[number])
    if own.type.shape != wanted.shape:
        own = Expr("fit", Type(own.type.dtype, wanted.shape), (), (own,))
    return own if own.type.dtype == wanted.dtype else Expr("convert", wanted, (), (own,))


def variable(number: int, own: Type) -> Expr:
    """What a variable holds."""
    return Expr("variable", own, (number,))


def constant(wanted: Type, draw: random.Random) -> Expr:
    """Numbers that are known."""
    if wanted.dtype == "key":
        return Expr("constant", wanted, (draw.randrange(100),))
    return Expr(
        "constant",
        wanted,
        tuple(draw.choice(edges_of(wanted.dtype)) for _ in range(np.prod(wanted.shape, dtype=int))),
    )


def program(seed: int, limits: Limits = MIXED) -> tuple[Expr, ...]:
    """The outputs of a program; one in six has a second one."""
    drawing = Drawing(seed, limits)
    return tuple(drawing.output(number) for number in range(1 + (seed % 6 == 5)))


def function_of(outputs: Sequence[Expr]) -> Callable[..., list[Any]]:
    """The function of one environment; it takes the arguments that the outputs read, by their numbers."""
    return lambda variables: [run(output, variables) for output in outputs]


def parts_of(expr: Expr) -> Iterator[Expr]:
    """An expression and all that it is made of."""
    yield expr
    for part in expr.parts:
        yield from parts_of(part)


def arguments_of(outputs: Sequence[Expr]) -> list[int]:
    """The numbers of the arguments that are read."""
    read = {part.params[0] for output in outputs for part in parts_of(output) if part.op == "variable"}
    return sorted(number for number in read if number < len(ARGUMENTS))


# --- as text ------------------------------------------------------------------------------------------------


def to_json(expr: Expr) -> list[Any]:
    """An expression as lists, numbers and strings."""
    params = [repr(x) if isinstance(x, float) else x for x in expr.params]
    return [expr.op, [expr.type.dtype, list(expr.type.shape)], params, list(map(to_json, expr.parts)), expr.binds]


def from_json(data: Any) -> Expr:
    """The expression of `to_json`."""
    op, (dtype, shape), params, parts, binds = data
    return Expr(
        op,
        Type(dtype, tuple(shape)),
        tuple(map(_parameter, params)),
        tuple(map(from_json, parts)),
        tuple(map(tuple, binds)),
    )


def _parameter(x: Any) -> Any:
    if isinstance(x, list):
        return tuple(map(_parameter, x))
    try:
        return float(x) if isinstance(x, str) else x
    except ValueError:
        return x
