"""Programs of one environment that are drawn at random, as trees of operations.

A program has a nest of control flow, and small outputs that each show one form of an operation. Programs of
successive seeds show all forms in turn. A tree can be stored as JSON, made smaller part by part, and run by JAX.
Floats are small whole numbers, infinities or NaN, on which arithmetic is exact, so that every way of computing a
program gives the same bits. Operations that round stand at the root of a tree alone.
"""

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from drawn_types import ARGUMENTS, FLOATS, NUMBERS, UNSIGNED, Type, edges_of


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


# --- drawing ------------------------------------------------------------------------------------------------

SHAPES = ((), (), (3,), (4,), (4,), (2,), (2, 3), (3, 2))
WIDE = Type("float32", (40,))
FEW_DRAWS, MAX_VARIANTS = 8, 100
"""Draws of one type that find an operation's forms; those that round have one type alone."""


class Limits(NamedTuple):
    """How large programs are."""

    operations: int = 11
    """Operations of the first output, which has control flow at its root."""
    features: int = 8
    """Forms of operations that further outputs show."""
    feature: int = 4
    """Operations of each of these."""
    surrounded: float = 0.4
    """Share of these that stand in control flow."""
    varied: float = 0.5
    """Share of those with two operands of one type that are shown again with these exchanged, equal, or known."""
    nests: int = 3
    """Control flow inside of control flow."""


MIXED = Limits()
"""The limits of most programs."""


# --- forms --------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """An operation with the choices among its parameters; each form is drawn as often as any other."""

    op: str
    variant: tuple
    """The first word, and the flags, among the parameters."""
    types: tuple[Type, ...]
    """Types of results."""

    @property
    def is_nested(self) -> bool:
        """Whether it may stand in other operations."""
        return OPERATIONS[self.op].kind != "rounded"

    def type(self, draw: random.Random) -> Type:
        """A type of a result: all data types are equally likely."""
        dtype = draw.choice(list(dict.fromkeys(own.dtype for own in self.types)))
        return draw.choice([own for own in self.types if own.dtype == dtype])


def variant(params: tuple) -> tuple:
    """The first word, and the flags, among parameters."""
    words = [x for x in params if isinstance(x, str)]
    return (*words[:1], *(x for x in params if isinstance(x, bool)))


@functools.cache
def forms() -> tuple[Form, ...]:
    """All forms of all operations."""
    draw = random.Random(0)
    shapes = [*dict.fromkeys(SHAPES)]
    of_all = [*(Type(dtype, shape) for dtype in NUMBERS for shape in shapes), Type("key"), WIDE]
    found: dict[tuple, dict[Type, None]] = {}
    for name, own in OPERATIONS.items():
        for wanted in [Type("float32")] if own.kind == "rounded" else of_all:
            for _ in range(MAX_VARIANTS if own.kind == "rounded" else FEW_DRAWS):
                drawn = own.draw(draw, wanted)
                if drawn is not None:
                    found.setdefault((name, variant(drawn[0])), {})[wanted] = None
    return tuple(Form(name, own, tuple(types)) for (name, own), types in found.items())


def forms_of(seed: int, count: int) -> Iterator[Form]:
    """The forms that a program shows: programs of successive seeds show all forms in turn, in changing orders."""
    for place in range(seed * count, (seed + 1) * count):
        turn, number = divmod(place, len(forms()))
        yield random.Random(turn).sample(forms(), len(forms()))[number]


class Drawing:
    """Draws the expressions of one program."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self.random = random.Random(seed)
        self.limits = limits
        self.left = 0
        self.following = len(ARGUMENTS)

    def nest(self) -> Expr:
        """An output that has control flow at its root."""
        self.left = self.limits.operations
        return self.expression(self.type(), dict(enumerate(ARGUMENTS)), 0, force="control")

    def feature(self, form: Form) -> Iterator[Expr]:
        """Small outputs that show one form of an operation: alone, in control flow, or twice."""
        self.left = self.limits.feature
        if form.is_nested and self.random.random() < self.limits.surrounded:
            for _ in range(12):
                if (shown := self._surrounded(form)) is not None:
                    yield shown
                    return
        shown = self._form(form, form.type(self.random), dict(enumerate(ARGUMENTS)), 0)
        yield from self._variations(shown)

    def _surrounded(self, form: Form) -> Expr | None:
        """Control flow with a form in it, best in what it repeats or branches to; None where it fits nowhere."""
        wanted, name = self.type(), self._name("control")
        drawn = OPERATIONS[name].draw(self.random, wanted)
        places = [n for n, part in enumerate(drawn[1]) if part.type in form.types] if drawn else []
        if drawn is None or not places:
            return None
        inside = max(places, key=lambda n: (len(drawn[1][n].binds) > 0, self.random.random()))
        return self._of(name, drawn, dict(enumerate(ARGUMENTS)), 0, wanted, {inside: form})

    def _variations(self, shown: Expr) -> Iterator[Expr]:
        """An operation; beside it, where two operands are of one type, these exchanged, equal, or one known."""
        yield shown
        parts = shown.parts
        free = [n for n in range(len(parts)) if not shown.binds[n]]
        pairs = [(a, b) for a in free for b in free if a != b and parts[a].type == parts[b].type]
        if not pairs or parts[pairs[0][0]].type.dtype == "key":
            return
        for changed in (
            lambda a, b: (parts[b], parts[a]),
            lambda a, b: (parts[a], parts[a]),
            lambda a, b: (parts[a], same_constant(parts[b].type, self.random)),
        ):
            if self.random.random() < self.limits.varied:
                a, b = self.random.choice(pairs)
                yield shown._replace(parts=with_parts(parts, (a, b), changed(a, b)))

    def type(self) -> Type:
        """A type of a result."""
        wide = self.random.random() < 0.04
        return WIDE if wide else Type(self.random.choice(NUMBERS), self.random.choice(SHAPES))

    def expression(
        self, wanted: Type, scope: dict[int, Type], nests: int, *, force: str = "", op: str = ""
    ) -> Expr:
        """An expression of a type, which reads the variables of a scope."""
        self.left -= 1
        drawn = OPERATIONS[op].draw(self.random, wanted) if op else None
        if drawn is not None:
            return self._of(op, drawn, scope, nests, wanted)
        # An array of no elements is always a leaf: JAX refuses to index it.
        if (self.left > 0 or force) and 0 not in wanted.shape:
            kind = force or self._kind(nests)
            for _ in range(12):
                name = self._name(kind)
                drawn = OPERATIONS[name].draw(self.random, wanted)
                if drawn is not None:
                    return self._of(name, drawn, scope, nests, wanted)
        return self._leaf(wanted, scope)

    def _name(self, kind: str) -> str:
        names = [name for name, own in OPERATIONS.items() if own.kind == kind]
        return self.random.choices(names, [OPERATIONS[name].weight for name in names])[0]

    def _form(self, form: Form, wanted: Type, scope: dict[int, Type], nests: int) -> Expr:
        """An expression of a type with a form of an operation at its root."""
        while True:
            drawn = OPERATIONS[form.op].draw(self.random, wanted)
            if drawn is not None and variant(drawn[0]) == form.variant:
                return self._of(form.op, drawn, scope, nests, wanted)

    def _kind(self, nests: int) -> str:
        share = self.random.random()
        if nests < self.limits.nests and share < 0.45:
            return "control"
        return "random" if share > 0.94 else "plain"

    def _of(
        self,
        name: str,
        drawn: tuple[tuple, list[Part]],
        scope: dict[int, Type],
        nests: int,
        wanted: Type,
        inside: Mapping[int, Form] = MappingProxyType({}),
    ) -> Expr:
        """An operation with its parts, some of which have given forms."""
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
            found[place] = (
                self._form(inside[place], part.type, {**scope, **own}, deeper)
                if place in inside
                else self.expression(part.type, {**scope, **own}, deeper, op=part.op)
            )
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


def same_constant(wanted: Type, draw: random.Random) -> Expr:
    """One number everywhere, which changes nothing or decides all in many operations."""
    of_floats = [0, 1, -1, np.inf, -np.inf]
    numbers = [False, True] if wanted.dtype == "bool" else of_floats if wanted.dtype in FLOATS else [0, 1, -1]
    number = draw.choice(numbers)
    if wanted.dtype in UNSIGNED and number < 0:
        number = int(np.iinfo(wanted.dtype).max)
    return Expr("constant", wanted, (number,) * int(np.prod(wanted.shape, dtype=int)))


def with_parts(parts: tuple[Expr, ...], places: tuple[int, ...], others: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Parts with others in these places."""
    changed = dict(zip(places, others, strict=True))
    return tuple(changed.get(n, part) for n, part in enumerate(parts))


def program(seed: int, limits: Limits = MIXED) -> tuple[Expr, ...]:
    """The outputs of a program: control flow in control flow, and small ones that show forms of operations."""
    drawing = Drawing(seed, limits)
    shown = [output for form in forms_of(seed, limits.features) for output in drawing.feature(form)]
    return drawing.nest(), *shown


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
