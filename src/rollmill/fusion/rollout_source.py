"""Writes the kernel of a rollout."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rollmill.fusion.leaves import Leaf
from rollmill.fusion.triton_operations import TYPES
from rollmill.fusion.triton_source import Numerics, Writer, columns

if TYPE_CHECKING:
    from rollmill.fusion.rollout import RolloutStep


def rollout_source(step: "RolloutStep", num_envs: int, block: int, numerics: Numerics) -> str:
    """The function `kernel` of a rollout; its arguments are pointers, and `N`, `T` and `BLOCK`.

    Pointers: the collector's leaves, the keys, uniform arrays; then leaves after the rollout that have changed,
    and the leaves of the trajectory.
    """
    program, slots = step.scalarised.program, range(len(step.scalarised.uniforms))
    taken = [*step.carried, *step.fixed]
    changes = [_changes(step, n) for n in range(len(step.carried))]
    before, uniform = [f"in{n}" for n in range(len(taken))], [f"uniform{n}" for n in slots]
    after = [f"after{n}" for n, does in enumerate(changes) if does]
    out = [f"step{n}" for n, leaf in enumerate(step.step) if leaf.places]
    writer = Writer(numerics, uniform)
    mask = "" if num_envs % block == 0 else "here"

    inputs = [
        name for pointer, leaf in zip(before, taken, strict=True) for name in _load(writer, pointer, leaf, mask)
    ]
    opening, writer.lines = writer.lines, []
    writer.line("for t in range(T):")
    writer.deeper()
    for n, leaf in enumerate(step.step):
        if leaf.places:
            size = int(np.prod(leaf.shape))
            writer.line(f"at{n} = step{n} + t.to(tl.int64) * (N * {size})")
    found = writer.write(program, [*inputs, *_turn(writer)])
    for n, leaf in enumerate(step.step):
        _store(writer, f"at{n}", leaf, [found[place] for place in leaf.places], mask)
    _advance(writer, step, changes, inputs, found)
    writer.deeper(-1)
    for n, (leaf, does) in enumerate(zip(step.carried, changes, strict=True)):
        if does:
            _store(writer, f"after{n}", leaf, [inputs[place] for place in leaf.places], mask)
    arguments = ", ".join([*before, *uniform, *after, *out])
    head = [
        "@triton.jit",
        f"def kernel({arguments}, N: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr):",
        "    env = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        *(["    here = env < N"] if mask else []),
    ]
    return "\n".join([*head, *writer.prelude, *opening, *writer.lines]) + "\n"


def _changes(step: "RolloutStep", n: int) -> bool:
    program, before, after = step.scalarised.program, step.carried[n], step.after[n]
    return [program.inputs[k] for k in before.places] != [program.outputs[k] for k in after.places]


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
        place, masks = _place(writer, leaf, n, mask)
        other = f", mask={masks}, other=0" if masks else ""
        writer.line(f"{names[-1]} = tl.load({pointer} + {place}{other})")
    return names


def _store(writer: Writer, pointer: str, leaf: Leaf, names: Sequence[str], mask: str) -> None:
    for n, name in enumerate(names):
        place, masks = _place(writer, leaf, n, mask)
        other = f", mask={masks}" if masks else ""
        shape = "[BLOCK]" if leaf.width is None else f"[BLOCK, {columns(leaf.width)}]"
        writer.line(f"tl.store({pointer} + {place}, tl.broadcast_to({name}, {shape}){other})")


def _place(writer: Writer, leaf: Leaf, n: int, mask: str) -> tuple[str, str]:
    """Where the n-th number or row of a leaf lies, and which of it exist."""
    size = int(np.prod(leaf.shape))
    if leaf.width is None:
        return f"env * {size} + {n}", mask
    column = writer.columns(leaf.width)
    masks = [f"{mask}[:, None]"] if mask else []
    masks += [f"({column}[None, :] < {leaf.width})"] if columns(leaf.width) != leaf.width else []
    return f"(env * {size} + {n * leaf.width})[:, None] + {column}[None, :]", " & ".join(masks)
