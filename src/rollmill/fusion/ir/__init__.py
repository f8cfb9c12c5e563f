"""Intermediate representation of programs.

`node` defines the data structures, `operations` the meaning of each operation, `fold` the simplification of new
operations, and `region` the builder. `interpret` runs a program with JAX as the reference for kernels, and `text`
prints it.
"""

from rollmill.fusion.ir.fold import (
    COMPARISONS as COMPARISONS,
    is_float as is_float,
    is_short_float as is_short_float,
)
from rollmill.fusion.ir.interpret import evaluate as evaluate
from rollmill.fusion.ir.node import (
    ANYWHERE as ANYWHERE,
    STRUCTURAL as STRUCTURAL,
    UNIFORM_OPERATIONS as UNIFORM_OPERATIONS,
    Loop as Loop,
    Node as Node,
    Program as Program,
    count_nodes as count_nodes,
    toposort as toposort,
)
from rollmill.fusion.ir.operations import OPERATIONS as OPERATIONS, ROWS as ROWS, TYPED as TYPED
from rollmill.fusion.ir.region import Region as Region
from rollmill.fusion.ir.text import program_text as program_text
