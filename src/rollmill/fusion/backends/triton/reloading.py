"""Reloads uniform arrays in each iteration of a loop whose matrices are too large for shared memory.

Triton keeps a matrix loaded before a loop in shared memory until the loop ends. A matrix loaded just before a
product occupies shared memory only during that product.
"""

import re
from collections.abc import Iterable, Sequence

from rollmill.fusion.backends.triton.hoist import columns
from rollmill.fusion.ir import Node

MAX_MATRIX_BYTES = 212_992
"""Maximum size of a loop's matrices that fit in the shared memory of a Hopper GPU, besides everything else."""

AGAIN = "again"
"""Name of a variable that is zero but computed in the loop, so that an address with it cannot be hoisted."""

FAR = "FAR: tl.constexpr = 1 << 30  # more turns than there are"


def matrices_fit(nodes: Iterable[Node]) -> bool:
    """Returns whether all matrices that these nodes multiply by fit in shared memory."""
    matrices = {(*node.attributes, node.operands[0].width, node.width) for node in nodes if node.op == "dot"}
    needed = sum(4 * columns(summed or 1) * columns(width or 1) for *_, summed, width in matrices)
    return needed <= MAX_MATRIX_BYTES


def slots_read_again(slots: Sequence[str]) -> list[str]:
    """Returns pointers to uniform arrays that depend on the loop index, so that the compiler reloads them."""
    return [f"({slot} + {AGAIN})" for slot in slots]


def read_where_used(uniforms: Sequence[str], lines: Sequence[str], turn: str) -> tuple[list[str], list[str]]:
    """Moves loads of uniform arrays from before a loop to their first use inside it.

    Returns the lines before the loop and the lines inside it.

    Args:
        uniforms: lines that define uniform values.
        lines: lines of the loop.
        turn: expression for the index of the iteration, whose bounds must be unknown to the compiler.
    """
    waiting: dict[str, str] = {}
    before: list[str] = []
    for line in uniforms:
        name, text = line.strip().split(" = ", 1)
        if AGAIN in (words := set(re.findall(r"\w+", text))) or not words.isdisjoint(waiting):
            waiting[name] = f"    {line}"
        else:
            before.append(line)
    inside = [f"        {AGAIN} = ({turn}) // FAR"]

    def place(text: str) -> None:
        for name in re.findall(r"\w+", text):
            if (line := waiting.pop(name, None)) is not None:
                place(line)
                inside.append(line)

    for statement in _statements(lines):
        place("\n".join(statement))
        inside.extend(statement)
    return before, inside


def _statements(lines: Sequence[str]) -> list[list[str]]:
    """Returns the statements of a loop, each with its own body."""
    statements: list[list[str]] = []
    for line in lines:
        begins = not line.startswith("         ") and not line.strip().startswith(("else", "elif"))
        if begins or not statements:
            statements.append([])
        statements[-1].append(line)
    return statements
