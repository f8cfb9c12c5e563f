"""Writes the kernel of a rollout."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rollmill.fusion.beside import ONE_EACH, ONE_EACH_BOTH_WAYS
from rollmill.fusion.leaves import Leaf
from rollmill.fusion.prelude import Numerics, columns
from rollmill.fusion.triton_operations import TYPES
from rollmill.fusion.triton_source import Writer

if TYPE_CHECKING:
    from rollmill.fusion.rollout import RolloutStep


def rollout_source(step: "RolloutStep", num_steps: int, num_envs: int, block: int, numerics: Numerics) -> str:
    """The function `kernel` of a rollout; its arguments are pointers, and `N`, `T` and `BLOCK`.

    Pointers: the collector's leaves, the keys, uniform arrays; then leaves after the rollout that have changed,
    and the leaves of the trajectory.
    """
    program, slots = step.scalarised.program, range(len(step.scalarised.uniforms))
    taken = [*step.carried, *step.fixed]
    changes = step.changed
    before, uniform = [f"in{n}" for n in range(len(taken))], [f"uniform{n}" for n in slots]
    after = [f"after{n}" for n, does in enumerate(changes) if does]
    out = [f"step{n}" for n, leaf in enumerate(step.step) if leaf.places]
    writer = Writer(numerics, uniform, apart=ONE_EACH_BOTH_WAYS if numerics == "float32" else ONE_EACH)
    mask = "" if num_envs % block == 0 else "here"

    inputs = [
        name for pointer, leaf in zip(before, taken, strict=True) for name in _load(writer, pointer, leaf, mask)
    ]
    opening, writer.lines = writer.lines, []
    writer.line("for t in range(T):")
    writer.deeper()
    writer.line(f"at = {_wide_enough('t', step, num_steps * num_envs)} * N + env")
    found = writer.write(program, [*inputs, *_turn(writer)])
    for n, leaf in enumerate(step.step):
        if leaf.places:
            _store(writer, f"step{n}", "at", leaf, [found[place] for place in leaf.places], mask)
    _advance(writer, step, changes, inputs, found)
    writer.deeper(-1)
    for n, (leaf, does) in enumerate(zip(step.carried, changes, strict=True)):
        if does:
            _store(writer, f"after{n}", "env", leaf, [inputs[place] for place in leaf.places], mask)
    arguments = ", ".join([*before, *uniform, *after, *out])
    head = [
        "@triton.jit",
        f"def kernel({arguments}, N: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr):",
        "    env = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        *(["    here = env < N"] if mask else []),
    ]
    return "\n".join([*head, *writer.before.lines, *opening, *writer.lines]) + "\n"


def _wide_enough(t: str, step: "RolloutStep", rows: int) -> str:
    """A step's number in 32 bits, where places in so many rows of every leaf of the trajectory fit into them."""
    most = max((int(np.prod(leaf.shape)) for leaf in step.step), default=1)
    return t if rows * most < 2**31 else f"{t}.to(tl.int64)"


def _turn(writer: Writer) -> list[str]:
    writer.line("turn = tl.full([BLOCK], t, tl.int32)")
    return ["turn"]


def _advance(
    writer: Writer, step: "RolloutStep", changes: Sequence[bool], inputs: list[str], found: list[str]
) -> None:
    """Gives the carried numbers their values after a step, all at once."""
    moves = []
    for before, after, does in zip(step.carried, step.after, changes, strict=True):
        if does:
            news = [found[place] for place in after.places] or [_same(after, k) for k in range(len(before.places))]
            moves += zip([inputs[place] for place in before.places], news, [before] * len(news), strict=True)
    held = []
    for _, new, leaf in moves:
        held.append(writer.fresh())
        shape = "[BLOCK]" if leaf.width is None else f"[BLOCK, {columns(leaf.width)}]"
        writer.line(f"{held[-1]} = tl.broadcast_to({new}, {shape}).to({TYPES[leaf.dtype.name]})")
    for (name, _, _), new in zip(moves, held, strict=True):
        writer.line(f"{name} = {new}")


def _same(leaf: Leaf, k: int) -> str:
    number = np.asarray(leaf.same).reshape(-1)[k].item()
    return f"tl.full([BLOCK], {number}, {TYPES[leaf.dtype.name]})"


def _load(writer: Writer, pointer: str, leaf: Leaf, mask: str) -> list[str]:
    """Names of a leaf's numbers or rows."""
    names = []
    for n in range(len(leaf.places)):
        names.append(writer.fresh())
        place, masks = _place(writer, "env", leaf, n, mask)
        other = f", mask={masks}, other=0" if masks else ""
        writer.line(f"{names[-1]} = tl.load({pointer} + {place}{other})")
    return names


def _store(writer: Writer, pointer: str, row: str, leaf: Leaf, names: Sequence[str], mask: str) -> None:
    """Writes a leaf to rows of an array; neighbouring numbers leave together, four or two at a time."""
    size = int(np.prod(leaf.shape))
    together = 1 if leaf.width is not None else next(n for n in (4, 2, 1) if size % n == 0)
    if together > 1:
        for first in range(0, size, together):
            place = f"{row} * {size} + {first}"
            _store_together(writer, pointer, place, names[first : first + together], mask)
        return
    for n, name in enumerate(names):
        place, masks = _place(writer, row, leaf, n, mask)
        other = f", mask={masks}" if masks else ""
        shape = "[BLOCK]" if leaf.width is None else f"[BLOCK, {columns(leaf.width)}]"
        writer.line(f"tl.store({pointer} + {place}, tl.broadcast_to({name}, {shape}){other})")


def _store_together(writer: Writer, pointer: str, first: str, names: Sequence[str], mask: str) -> None:
    whole = [f"tl.broadcast_to({name}, [BLOCK])" for name in names]
    if len(names) == 2:
        tile = f"tl.join({whole[0]}, {whole[1]})"
    else:
        even, odd = (f"tl.join({whole[n]}, {whole[n + 2]})" for n in (0, 1))
        tile = f"tl.reshape(tl.join({even}, {odd}), [BLOCK, 4])"
    other = f", mask={mask}[:, None]" if mask else ""
    place = f"({first})[:, None] + tl.arange(0, {len(names)})[None, :]"
    writer.line(f"tl.store({pointer} + {place}, {tile}{other})")


def _place(writer: Writer, row: str, leaf: Leaf, n: int, mask: str) -> tuple[str, str]:
    """Where the n-th number or row of a leaf lies in its rows of an array, and which of it exist."""
    size = int(np.prod(leaf.shape))
    if leaf.width is None:
        return f"{row} * {size} + {n}", mask
    column = writer.before.columns(leaf.width)
    masks = [f"{mask}[:, None]"] if mask else []
    masks += [f"({column}[None, :] < {leaf.width})"] if columns(leaf.width) != leaf.width else []
    return f"({row} * {size} + {n * leaf.width})[:, None] + {column}[None, :]", " & ".join(masks)
