"""Crossings: points at which a program sends data to a remote fragment and waits for its answer.

Fragments in the same group are one program. If a fragment belongs to another group, a crossing replaces it:
`cross("environment", actions, timesteps)` declares the data to send and the shapes of the answer. The program
around it is traced as usual, including under `vmap`, and is then cut into segments between its crossings. Each
segment can be compiled. The caller that runs the segments decides how a crossing is answered.

A crossing itself cannot be compiled or placed inside a loop of the program. Loops around it run on the host.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import batching
from jaxtyping import Array, PyTree

from rollmill.core.errors import ContractError

Handlers: TypeAlias = Mapping[str, Callable[[PyTree[Array]], PyTree[Any]]]
"""Maps the name of a crossing to the function that answers it."""

_cross = core.Primitive("cross")
_cross.multiple_results = True


def cross(name: str, operands: PyTree[Array], answer: PyTree[jax.ShapeDtypeStruct]) -> PyTree[Array]:
    """Declares a crossing: sends `operands` out of the program, and returns arrays with the shapes of `answer`.

    Under `vmap`, operands and answer get a leading batch axis. `name` identifies the fragment that answers.
    """
    leaves, taken = jax.tree.flatten(operands)
    shapes, given = jax.tree.flatten(answer)
    kinds = tuple((tuple(shape.shape), shape.dtype) for shape in shapes)
    found = _cross.bind(*map(jnp.asarray, leaves), name=name, taken=taken, given=given, kinds=kinds)
    return jax.tree.unflatten(given, found)


class Piece(NamedTuple):
    """A part of a program between two crossings."""

    program: core.ClosedJaxpr
    inputs: tuple[int, ...]
    """Numbers of the values that the piece reads."""
    outputs: tuple[int, ...]
    """Numbers of the values that the piece computes."""
    crossing: "Crossing | None"
    """Crossing that follows the piece, or None at the end of the program."""
    unused_after: tuple[int, ...]
    """Numbers of the values that no later piece reads."""


class Crossing(NamedTuple):
    """One crossing of a program: the operands that it sends, and the answer that it receives."""

    name: str
    inputs: tuple[int, ...]
    input_tree: Any
    outputs: tuple[int, ...]
    output_tree: Any


class DividedProgram(NamedTuple):
    """A program divided at its crossings. Values are numbered, beginning with the arguments."""

    pieces: tuple[Piece, ...]
    argument_tree: Any
    """Tree structure of all arguments together."""
    results: tuple[int, ...]
    result_tree: Any
    constants: dict[int, Any]
    """Values of constants, by number."""

    @property
    def crossings(self) -> tuple[str, ...]:
        """Returns the names of the crossings, in the order in which the program reaches them."""
        return tuple(piece.crossing.name for piece in self.pieces if piece.crossing is not None)


def divide_at_crossings(function: Callable[..., PyTree[Array]], *examples: PyTree) -> DividedProgram:
    """Traces a function and divides it at its crossings.

    Args:
        function: the function to divide. It may call `cross` outside of loops and branches.
        *examples: its arguments, or their shapes.

    Raises:
        ContractError: a crossing lies inside a loop, a branch or another function's program.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*examples)
    whole = traced.jaxpr.replace(eqns=_live(traced.jaxpr))
    inputs = [*whole.invars, *whole.constvars]
    numbers = {var: n for n, var in enumerate(inputs)}
    for equation in whole.eqns:
        numbers.update({var: len(numbers) + n for n, var in enumerate(equation.outvars)})
    constants = dict(enumerate(traced.consts, start=len(whole.invars)))
    results = _numbers(whole.outvars, numbers, constants)
    pieces = _pieces(whole, numbers, constants, set(results))
    structure = jax.tree.structure(examples)
    return DividedProgram(pieces, structure, results, jax.tree.structure(shapes), constants)


Run: TypeAlias = Callable[[Piece, Sequence[Any]], Sequence[Any]]
"""Computes one piece from its input values."""


def evaluate(piece: Piece, values: Sequence[Any]) -> Sequence[Any]:
    """Evaluates one piece of a program operation by operation, as a reference for compiled pieces."""
    return core.jaxpr_as_fun(piece.program)(*values)


def walk(
    program: DividedProgram, *arguments: PyTree, run: Run = evaluate
) -> Generator[tuple[str, PyTree], PyTree, PyTree]:
    """Runs the pieces of a divided program. Yields each crossing's name and operands, and receives the answer.

    Several walks can be interleaved, because the caller chooses when to send each answer.
    """
    leaves, structure = jax.tree.flatten(arguments)
    if structure != program.argument_tree:
        raise ContractError(
            f"the program was traced with arguments of structure {program.argument_tree}, got {structure}."
        )
    found = yield from walk_leaves(program, leaves, run=run)
    return jax.tree.unflatten(program.result_tree, found)


def walk_leaves(
    program: DividedProgram, leaves: Sequence[Any], *, run: Run = evaluate
) -> Generator[tuple[str, PyTree], PyTree, list[Any]]:
    """Runs the pieces of a divided program like `walk`, on flat lists of leaves.

    Flattening trees of modules at each crossing would be slow.
    """
    values = {**program.constants, **dict(enumerate(leaves))}
    for piece in program.pieces:
        if piece.outputs:
            made = run(piece, [values[n] for n in piece.inputs])
            values.update(zip(piece.outputs, made, strict=True))
        if piece.crossing is not None:
            answer = yield _operands(piece.crossing, values)
            values.update(zip(piece.crossing.outputs, _answer(piece.crossing, answer), strict=True))
        for n in piece.unused_after:
            values.pop(n, None)
    return [values[n] for n in program.results]


def answer_crossings(walk: Generator[tuple[str, PyTree], PyTree, PyTree], handlers: Handlers) -> PyTree:
    """Answers every crossing of a `walk` with its handler, and returns the program's result."""
    try:
        name, operands = next(walk)
        while True:
            name, operands = walk.send(handlers[name](operands))
    except StopIteration as end:
        return end.value


# --- cutting ------------------------------------------------------------------------------------------


class _Stretch(NamedTuple):
    equations: list[core.JaxprEqn]
    crossing: core.JaxprEqn | None


def _live(program: core.Jaxpr) -> list[core.JaxprEqn]:
    """Returns the equations that a result or a crossing depends on."""
    wanted, live = set(_variables(program.outvars)), []
    for equation in reversed(program.eqns):
        crosses = equation.primitive is _cross or any(map(_holds_crossing, _inner_programs(equation)))
        if crosses or equation.effects or wanted.intersection(equation.outvars):
            wanted.update(_variables(equation.invars))
            live.append(equation)
    return live[::-1]


def _stretches(equations: Sequence[core.JaxprEqn]) -> list[_Stretch]:
    """Divides equations at each crossing. Equations that it does not need move behind it, as late as possible."""
    rest, stretches = list(equations), list[_Stretch]()
    while (place := _next_crossing(rest)) is not None:
        needed = _find_needed(rest[:place], rest[place])
        stretches.append(_Stretch([e for n, e in enumerate(rest[:place]) if n in needed], rest[place]))
        rest = [e for n, e in enumerate(rest[:place]) if n not in needed] + rest[place + 1 :]
    if stretches and not _follows(rest, stretches[-1].crossing):
        *stretches, last = stretches  # nothing depends on the answer, so the last two stretches become one program
        return [*stretches, last._replace(equations=last.equations + rest), _Stretch([], None)]
    return [*stretches, _Stretch(rest, None)]


def _follows(equations: Sequence[core.JaxprEqn], crossing: core.JaxprEqn | None) -> bool:
    """Returns whether any equation reads the crossing's answer."""
    answers = set(crossing.outvars if crossing else ())
    return any(answers.intersection(_variables(equation.invars)) for equation in equations)


def _next_crossing(equations: Sequence[core.JaxprEqn]) -> int | None:
    for n, equation in enumerate(equations):
        if equation.primitive is _cross:
            return n
        if any(_holds_crossing(inner) for inner in _inner_programs(equation)):
            raise ContractError(
                f"a crossing to another group lies inside {equation.primitive.name}, but the loop or branch "
                "around a crossing must run on the host."
            )
    return None


def _inner_programs(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    for value in jax.tree.leaves(
        equation.params, is_leaf=lambda leaf: isinstance(leaf, core.Jaxpr | core.ClosedJaxpr)
    ):
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value


def _holds_crossing(program: core.Jaxpr) -> bool:
    return any(
        equation.primitive is _cross or any(map(_holds_crossing, _inner_programs(equation)))
        for equation in program.eqns
    )


def _find_needed(equations: Sequence[core.JaxprEqn], crossing: core.JaxprEqn) -> set[int]:
    """Returns the positions of the equations that the crossing's operands depend on."""
    wanted = set(_variables(crossing.invars))
    needed = set()
    for n in reversed(range(len(equations))):
        if wanted.intersection(equations[n].outvars):
            needed.add(n)
            wanted.update(_variables(equations[n].invars))
    return needed


def _variables(atoms: Sequence[Any]) -> list[core.Var]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _numbers(atoms: Sequence[Any], numbers: Mapping[core.Var, int], constants: dict[int, Any]) -> tuple[int, ...]:
    """Returns the indices of values. Literals become constants, which have negative indices."""
    found = []
    for atom in atoms:
        if isinstance(atom, core.Literal):
            found.append(-len(constants) - 1)
            constants[found[-1]] = jnp.asarray(atom.val, atom.aval.dtype)  # type: ignore[attr-defined]
        else:
            found.append(numbers[atom])
    return tuple(found)


def _pieces(
    whole: core.Jaxpr, numbers: Mapping[core.Var, int], constants: dict[int, Any], results: set[int]
) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    # indices of values that are read after the current stretch, since the loop goes backwards
    later = set(results)
    for stretch in reversed(_stretches(whole.eqns)):
        after = later
        crossing = None if stretch.crossing is None else _crossing(stretch.crossing, numbers, constants)
        wanted = after | set(crossing.inputs if crossing else ())
        program, inputs, outputs = _program(whole, stretch.equations, numbers, wanted)
        held = set(inputs) | set(outputs) | set(crossing.inputs + crossing.outputs if crossing else ())
        pieces.append(Piece(program, inputs, outputs, crossing, tuple(sorted(held - after))))
        later = (wanted - set(outputs) - set(crossing.outputs if crossing else ())) | set(inputs)
    return tuple(reversed(pieces))


def _crossing(equation: core.JaxprEqn, numbers: Mapping[core.Var, int], constants: dict[int, Any]) -> Crossing:
    return Crossing(
        equation.params["name"],
        _numbers(equation.invars, numbers, constants),
        equation.params["taken"],
        tuple(numbers[var] for var in equation.outvars),
        equation.params["given"],
    )


def _program(
    whole: core.Jaxpr, equations: Sequence[core.JaxprEqn], numbers: Mapping[core.Var, int], wanted: set[int]
) -> tuple[core.ClosedJaxpr, tuple[int, ...], tuple[int, ...]]:
    """Builds the closed jaxpr that computes the values in `wanted`, and returns it with its inputs and outputs.

    Inputs and outputs are indices of values.
    """
    made = {var for equation in equations for var in equation.outvars}
    outputs = [var for var in made if numbers[var] in wanted]
    outputs.sort(key=numbers.__getitem__)
    reads = {var for equation in equations for var in _variables(equation.invars)} - made
    inputs = sorted(reads, key=numbers.__getitem__)
    jaxpr = whole.replace(constvars=(), invars=inputs, outvars=outputs, eqns=list(equations))
    closed = core.ClosedJaxpr(jaxpr, ())
    return closed, tuple(numbers[v] for v in inputs), tuple(numbers[v] for v in outputs)


# --- walking ------------------------------------------------------------------------------------------


def _operands(crossing: Crossing, values: Mapping[int, Any]) -> tuple[str, PyTree]:
    return crossing.name, jax.tree.unflatten(crossing.input_tree, [values[n] for n in crossing.inputs])


def _answer(crossing: Crossing, answer: PyTree) -> list[Any]:
    leaves, structure = jax.tree.flatten(answer)
    if structure != crossing.output_tree:
        raise ContractError(f"{crossing.name!r} returned {structure}, expected {crossing.output_tree}.")
    return leaves


# --- the primitive ------------------------------------------------------------------------------------


@_cross.def_impl
def _refuse(*_: Any, name: str, **__: Any) -> None:
    raise ContractError(f"the fragment {name!r} belongs to another program, so this program must run in pieces.")


@_cross.def_abstract_eval
def _shapes(*_: Any, kinds: tuple, **__: Any) -> list[ShapedArray]:
    return [ShapedArray(shape, dtype) for shape, dtype in kinds]


def _lift(operands: Sequence[Array], axes: Sequence[int | None], *, kinds: tuple, **params: Any):
    (size,) = {x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None}

    def lifted(operand: Array, axis: int | None) -> Array:
        if axis is None:
            return jnp.broadcast_to(operand, (size, *operand.shape))
        return jnp.moveaxis(operand, axis, 0)

    wider = tuple(((size, *shape), dtype) for shape, dtype in kinds)
    return _cross.bind(*map(lifted, operands, axes), kinds=wider, **params), [0] * len(wider)


batching.primitive_batchers[_cross] = _lift
