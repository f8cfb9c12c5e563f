"""The intermediate representation: what a program is, how it is made, and what it means.

`node` holds the data, `operations` the meaning of each operation by JAX's functions, `fold` what an operation is
replaced by when it is made, `region` the builder, `interpret` runs a program as the reference for kernels, and
`text` prints it.
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
