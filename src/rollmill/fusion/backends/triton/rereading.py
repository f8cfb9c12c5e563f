"""Rereads uniform arrays in each iteration of a loop with matrices too large for shared memory.

Triton keeps a matrix read before a loop in shared memory until the loop ends. A matrix read just before its
product takes shared memory only for that product.
"""

import re
from collections.abc import Iterable, Sequence

from rollmill.fusion.backends.triton.hoist import columns
from rollmill.fusion.ir import Node

MAX_MATRIX_BYTES = 212_992
"""Matrices of a loop that find room in shared memory beside all else, on a Hopper chip."""

AGAIN = "again"
"""Zero, as a loop computes it: an address with it cannot be hoisted."""

FAR = "FAR: tl.constexpr = 1 << 30  # more turns than there are"


def matrices_fit(nodes: Iterable[Node]) -> bool:
    """Returns whether shared memory has room for all matrices that these nodes multiply by."""
    matrices = {(*node.attributes, node.width) for node in nodes if node.op == "dot"}
    needed = sum(4 * columns(summed) * columns(width or 1) for _, summed, *_, width in matrices)
    return needed <= MAX_MATRIX_BYTES


def slots_read_again(slots: Sequence[str]) -> list[str]:
    """Returns pointers to uniform arrays that depend on the loop index, so that the compiler reads them again."""
    return [f"({slot} + {AGAIN})" for slot in slots]


def read_where_used(uniforms: Sequence[str], lines: Sequence[str], turn: str) -> tuple[list[str], list[str]]:
    """Returns the lines before and inside a loop, with uniform arrays read at their uses.

    Args:
        uniforms: definitions of uniform values.
        lines: the statements of the loop.
        turn: an expression that counts turns, with no bounds that a compiler could see.
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
