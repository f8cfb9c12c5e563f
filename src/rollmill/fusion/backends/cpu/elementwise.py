"""Emits LLVM IR for element-wise JAX primitives."""

from collections.abc import Callable
from typing import Any

from rollmill.fusion.backends.cpu.builder import Value

Written = Callable[..., Value]


def emitter_for(name: str, params: dict[str, Any]) -> Callable[..., Value] | None:
    """Returns the function that emits an element-wise JAX primitive for vectors, or None if unsupported."""
    if name == "integer_pow":
        return _POWERS.get(params["y"])
    if name == "convert_element_type" and params["new_dtype"] != "float32":
        return None
    return _OPERATIONS.get(name)


def _compare(sign: str) -> Written:
    return lambda emit, x, y: emit.builder.fcmp_ordered(sign, x, y)


_POWERS: dict[int, Written] = {
    1: lambda emit, x: x,
    2: lambda emit, x: emit.builder.fmul(x, x),
    3: lambda emit, x: emit.builder.fmul(emit.builder.fmul(x, x), x),
}

_OPERATIONS: dict[str, Written] = {
    "add": lambda emit, x, y: emit.builder.fadd(x, y),
    "add_any": lambda emit, x, y: emit.builder.fadd(x, y),
    "sub": lambda emit, x, y: emit.builder.fsub(x, y),
    "mul": lambda emit, x, y: emit.builder.fmul(x, y),
    "div": lambda emit, x, y: emit.builder.fdiv(x, y),
    "neg": lambda emit, x: emit.builder.fneg(x),
    "square": _POWERS[2],
    "sqrt": lambda emit, x: emit.intrinsic("sqrt", x),
    "rsqrt": lambda emit, x: emit.builder.fdiv(emit.constant(1), emit.intrinsic("sqrt", x)),
    "abs": lambda emit, x: emit.intrinsic("fabs", x),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "select_n": lambda emit, which, no, yes: emit.builder.select(which, yes, no),
    "copy": lambda emit, x: x,
    "broadcast_in_dim": lambda emit, x: x,
    "convert_element_type": lambda emit, x: x,
}
