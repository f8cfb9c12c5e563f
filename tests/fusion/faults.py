"""Faults of the compiler, made on purpose: a rule of the lowering, or of machine code, that is a little wrong.

Drawn programs must find them. Each fault is a function that changes one thing by a `pytest.MonkeyPatch`. Where it
names primitives, no others can show it.
"""

import code_faults  # noqa: F401  registers its faults
import function_faults  # noqa: F401
import lowering_faults  # noqa: F401
from fault_registry import FAULTS, PRIMITIVES

__all__ = ["FAULTS", "PRIMITIVES"]
