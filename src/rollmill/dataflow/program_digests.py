"""Computes digests of traced programs. Equal operations give equal digests in every process."""

import enum
import functools
import hashlib
import re
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import jax
import numpy as np
from jax.extend import core

from rollmill.core.types import is_key

NAMES_ONLY = {("jit", "name"), ("jit", "ctx_mesh"), ("name", "name")}
"""Parameters of primitives that do not affect results."""

TRACED_BEFORE = {
    ("custom_jvp_call", "jvp_jaxpr_fun"),
    ("custom_vjp_call", "fwd_jaxpr_thunk"),
    ("custom_vjp_call", "bwd"),
}
"""Parameters that say how a call is differentiated, which no longer matters once a program is traced."""

IGNORED_JAX_TYPES = {"UnspecifiedValue", "Mesh", "AbstractMesh"}
"""Names of JAX types that occur as parameters and do not affect the result either."""

PARTS_OF_TREES = {
    "FTTuple": ("elts",),
    "FTDict": ("keys", "_vals"),
    "FTSingleton": ("val",),
    "FTStatic": ("val",),
    "FTFiltered": ("val",),
    "Either": ("is_right", "val"),
}
"""Attributes of the flat trees in which JAX distinguishes the constants of a scan from its carry."""

OWNERS = {"jax", "rollmill"}
"""Packages whose primitives are covered: by the JAX version, and by the digest of Rollmill's sources."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, np.dtype, type)
"""Types of parameters that their textual form describes completely."""

FREQUENT = frozenset({type(None), bool, int, float, str})
"""Plain types that are recognised before all others, because most parameters have them."""


class Digests:
    """Computes and caches digests of programs, and of the objects that their operations hold."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str, bool]] = {}
        self._is_whole = True

    def of_closed(self, program: core.ClosedJaxpr) -> str:
        """Returns the digest of a traced program (`ClosedJaxpr`), including its constants."""
        if id(program) not in self._known:
            outer, self._is_whole = self._is_whole, True
            constants = [self._value(constant) for constant in program.consts]
            digest = sha256(f"{constants}{self._program(program.jaxpr)}")
            self._is_whole &= not program.effects
            self._known[id(program)] = program, digest, self._is_whole
            self._is_whole = outer
        _, digest, is_whole = self._known[id(program)]
        self._is_whole &= is_whole
        return digest

    def whole(self, program: core.ClosedJaxpr) -> str | None:
        """Returns the digest of a program, or None if it does not cover everything that the program computes.

        The digest is incomplete if an operation holds an object that has only a textual description, such as a
        host function, or if it is a primitive of another package, which may compile to anything.
        """
        digest = self.of_closed(program)
        return digest if self._known[id(program)][2] else None

    def _program(self, program: core.Jaxpr) -> str:
        """Returns the digest of the operations in order. Variables are numbered by first use."""
        numbers: dict[core.Var, int] = {}
        settings = jax.config.values  # which JAX makes anew at each access

        def atom(atom: Any) -> str:
            if isinstance(atom, core.Literal):
                return f"{self._value(atom.val)}:{_type(atom.aval)}"
            return f"v{numbers.setdefault(atom, len(numbers))}:{_type(atom.aval)}"

        lines = [[atom(var) for var in (*program.constvars, *program.invars)]]
        for equation in program.eqns:
            operation = equation.primitive.name
            parameters = [
                f"{name}={self._parameter(operation, name, value)}"
                for name, value in sorted(equation.params.items())
                if (operation, name) not in NAMES_ONLY
            ]
            parameters += _context(equation, settings)
            lines.append([operation, *parameters, *map(atom, equation.invars), "->", *map(atom, equation.outvars)])
            self._is_whole &= not (equation.ctx.compute_type or equation.ctx.xla_metadata)
            self._is_whole &= id(equation.primitive) in _primitives(len(sys.modules))
        lines.append([atom(var) for var in program.outvars])
        return sha256("\n".join(map(" ".join, lines)))

    def _parameter(self, operation: str, name: str, value: Any) -> str:
        is_whole = self._is_whole
        text = self._value(value)
        if (operation, name) in TRACED_BEFORE:
            self._is_whole = is_whole
        return text

    def _value(self, value: Any) -> str:
        return without_addresses(repr(value)) if type(value) in FREQUENT else self._structure(value)

    def _structure(self, value: Any) -> str:
        match value:
            case core.ClosedJaxpr():
                return self.of_closed(value)
            case core.Jaxpr():
                return self._program(value)
            case tuple() | list():
                return f"[{','.join(map(self._value, value))}]"
            case set() | frozenset():
                return f"{{{','.join(sorted(map(self._value, value)))}}}"
            case Mapping():
                return f"{{{','.join(sorted(f'{key}:{self._value(part)}' for key, part in value.items()))}}}"
            case jax.Array() | np.ndarray() | np.generic():
                return _array(value)
            case _ if (parts := _parts(value)) is not None:
                return f"{type(value).__name__}{self._value(parts)}"
        self._is_whole &= isinstance(value, PLAIN) or _is_of_jax(value)
        return without_addresses(repr(value))


def _parts(value: Any) -> list[Any] | None:
    """Returns the parts of a partial function or a flat JAX tree. None if a value is neither."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    kind = type(value)
    names = PARTS_OF_TREES.get(kind.__qualname__, ())
    if not names or kind.__module__.partition(".")[0] != "jax" or not all(hasattr(value, name) for name in names):
        return None
    return [getattr(value, name) for name in names]


def _is_of_jax(value: Any) -> bool:
    """Returns whether the JAX version and a value's representation determine the value."""
    if isinstance(value, FunctionType):
        named = getattr(sys.modules.get(value.__module__), value.__qualname__, None)
        return value.__module__.partition(".")[0] == "jax" and named is value
    return type(value).__module__.partition(".")[0] == "jax" and type(value).__qualname__ in IGNORED_JAX_TYPES


def _context(equation: core.JaxprEqn, settings: Mapping[str, Any]) -> list[str]:
    """Returns an operation's own settings, as opposed to the program's."""
    current = settings.get("jax_threefry_partitionable")
    chosen = getattr(equation.ctx, "threefry_partitionable", current)
    return [] if chosen == current else [f"threefry_partitionable={chosen}"]


@functools.cache
def _primitives(num_modules: int) -> frozenset[int]:
    """Returns the addresses of all JAX and Rollmill primitives in imported modules."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in OWNERS]
    values = (value for module in modules for value in list(vars(module).values()))
    return frozenset(id(value) for value in values if isinstance(value, core.Primitive))


def _array(value: Any) -> str:
    if is_key(value.dtype):
        return f"key<{jax.random.key_impl(value)}>{_array(jax.random.key_data(value))}"
    content = np.ascontiguousarray(np.asarray(value))
    return f"{content.dtype}{content.shape}{hashlib.sha256(content.tobytes()).hexdigest()}"


def _type(aval: Any) -> str:
    dtype = _name(aval.dtype) if hasattr(aval, "dtype") else aval
    return f"{dtype}{getattr(aval, 'shape', '')}{getattr(aval, 'weak_type', '')}"


@functools.cache
def _name(dtype: Any) -> str:
    return str(dtype)


def without_addresses(text: str) -> str:
    """Removes memory addresses, which differ between processes, from a string."""
    return re.sub(r"\b(at )?0x[0-9a-f]+", "", text)


def sha256(text: str) -> str:
    """Returns the SHA-256 digest of a string."""
    return hashlib.sha256(text.encode()).hexdigest()
