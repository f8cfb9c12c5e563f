"""Writes the kernel of a rollout."""

from typing import TYPE_CHECKING

import numpy as np

from rollmill.fusion.beside import ONE_EACH, ONE_EACH_BOTH_WAYS
from rollmill.fusion.prelude import Numerics, columns
from rollmill.fusion.stretches import is_long
from rollmill.fusion.triton_memory import BY_INSTRUCTIONS, BY_TRITON
from rollmill.fusion.triton_operations import TYPES
from rollmill.fusion.triton_places import Places
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
    writer = Writer(
        numerics,
        uniform,
        apart=ONE_EACH_BOTH_WAYS if numerics == "float32" else ONE_EACH,
        memory=BY_INSTRUCTIONS if is_long(len(program.nodes())) else BY_TRITON,
    )
    mask = "" if num_envs % block == 0 else "here"
    places = Places(writer, mask)

    each = zip(before, taken, strict=True)
    loaded = [name for pointer, leaf in each for name in places.load(pointer, "env", leaf)]
    inputs = writer.named(program.inputs[: len(loaded)], loaded)
    opening, writer.lines = writer.lines, []
    writer.line("for t in range(T):")
    writer.deeper()
    writer.line(f"at = {_wide_enough('t', step, num_steps * num_envs)} * N + env")
    found = writer.write(program, [*inputs, *_turn(writer)])
    for n, leaf in enumerate(step.step):
        if leaf.places:
            places.store(f"step{n}", "at", leaf, [found[place] for place in leaf.places])
    _advance(writer, step, inputs, found)
    writer.deeper(-1)
    for n, (leaf, does) in enumerate(zip(step.carried, changes, strict=True)):
        if does:
            places.store(f"after{n}", "env", leaf, [inputs[place] for place in leaf.places])
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


def _advance(writer: Writer, step: "RolloutStep", inputs: list[str], found: list[str]) -> None:
    """Gives the carried numbers their values after a step, all at once."""
    moves = []
    for before, after, does in zip(step.carried, step.after, step.changed, strict=True):
        if does:
            pairs = zip(before.places, after.places, strict=True)
            moves += [(inputs[place], found[new], before) for place, new in pairs if step.carries(place)]
    held = []
    for _, new, leaf in moves:
        held.append(writer.fresh())
        shape = "[BLOCK]" if leaf.width is None else f"[BLOCK, {columns(leaf.width)}]"
        writer.line(f"{held[-1]} = tl.broadcast_to({new}, {shape}).to({TYPES[leaf.dtype.name]})")
    for (name, _, _), new in zip(moves, held, strict=True):
        writer.line(f"{name} = {new}")
