"""Intermediate representation of programs.

`node` defines the data structures, `operations` the meaning of each operation, `fold` the simplification of new
operations, and `region` the builder. `interpret` runs a program with JAX as the reference for kernels, and `text`
prints it.
"""

from rollmill.fusion.ir.fold import COMPARISONS, is_float, is_short_float
from rollmill.fusion.ir.interpret import evaluate
from rollmill.fusion.ir.node import ANYWHERE, OF_UNIFORMS, STRUCTURAL, Loop, Node, Program, toposort, total_of
from rollmill.fusion.ir.operations import OPERATIONS, ROWS, TYPED
from rollmill.fusion.ir.region import Region
from rollmill.fusion.ir.text import program_text

__all__ = [
    "ANYWHERE",
    "COMPARISONS",
    "OF_UNIFORMS",
    "OPERATIONS",
    "ROWS",
    "STRUCTURAL",
    "TYPED",
    "Loop",
    "Node",
    "Program",
    "Region",
    "evaluate",
    "is_float",
    "is_short_float",
    "program_text",
    "toposort",
    "total_of",
]
