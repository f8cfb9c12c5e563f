"""Replaces complex values in a jaxpr with pairs of floats, because kernels have no complex type.

Arguments and results keep their types. Outside of the program, `kernels.leaves.to_raw` represents complex state as
floats with a last axis of length two.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jaxtyping import Array

from rollmill.core.errors import CannotFuse
from rollmill.core.user_frame import user_frame_of
from rollmill.fusion.lower.jaxpr import JAX
from rollmill.fusion.lower.rules.calls import INLINED
from rollmill.fusion.lower.rules.control import scan_operands
from rollmill.fusion.lower.values import LoweringError

MAX_LENGTH = 64
"""Maximum length of a Fourier transform, which becomes a matrix product."""


class ComplexPair(NamedTuple):
    """The real and imaginary parts of a complex array."""

    real: Any
    imag: Any


Operand: TypeAlias = Any
"""A real array, or a `ComplexPair` for a complex one."""


def without_complex_numbers(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns an equivalent jaxpr that computes with pairs of floats instead of complex values.

    Raises:
        CannotFuse: an operation on complex values is not supported.
    """
    if not has_complex_numbers(closed.jaxpr):
        return closed
    structs = [
        jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=var.aval.weak_type)  # type: ignore
        for var in closed.jaxpr.invars
    ]

    def run(*arguments: Array) -> list[Array]:
        results = _evaluate(closed, list(map(_split, arguments)))
        return [lax.complex(*value) if isinstance(value, ComplexPair) else value for value in results]

    return jax.make_jaxpr(run)(*structs)


def has_complex_numbers(jaxpr: core.Jaxpr) -> bool:
    """Returns whether a jaxpr, or a jaxpr that it calls, computes with complex values."""
    for equation in jaxpr.eqns:
        if _is_complex(equation) or any(map(has_complex_numbers, _within(equation))):
            return True
    return False


def is_complex(dtype: Any) -> bool:
    """Returns whether a dtype is complex."""
    return jnp.issubdtype(dtype, jnp.complexfloating)


def _is_complex(equation: core.JaxprEqn) -> bool:
    atoms: list[Any] = [*equation.invars, *equation.outvars]
    return any(is_complex(getattr(atom.aval, "dtype", np.float32)) for atom in atoms)


def _within(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """Returns the jaxprs that an equation calls."""
    found: list[core.Jaxpr] = []
    for parameter in equation.params.values():
        for each in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(each, core.ClosedJaxpr | core.Jaxpr):
                found.append(each.jaxpr if isinstance(each, core.ClosedJaxpr) else each)
    return found


def _split(value: Any) -> Operand:
    if not is_complex(value.dtype):
        return value
    if isinstance(value, jax.Array):
        return ComplexPair(lax.real(value), lax.imag(value))
    return ComplexPair(np.real(value).astype(np.float32), np.imag(value).astype(np.float32))


def _evaluate(closed: core.ClosedJaxpr | core.Jaxpr, arguments: Sequence[Operand]) -> list[Operand]:
    """Traces a jaxpr anew for these arguments."""
    jaxpr = closed.jaxpr if isinstance(closed, core.ClosedJaxpr) else closed
    consts = closed.consts if isinstance(closed, core.ClosedJaxpr) else []
    known: dict[Any, Operand] = dict(zip(jaxpr.constvars, map(_split, consts), strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))

    def value_of(atom: Any) -> Operand:
        if not isinstance(atom, core.Literal):
            return known[atom]
        return _split(np.asarray(atom.val, atom.aval.dtype)) if is_complex(atom.aval.dtype) else atom.val  # type: ignore

    for equation in jaxpr.eqns:
        results = _results(equation, list(map(value_of, equation.invars)))
        known.update(zip(equation.outvars, results, strict=True))
    return list(map(value_of, jaxpr.outvars))


def _results(equation: core.JaxprEqn, values: list[Operand]) -> Sequence[Operand]:
    try:
        return _results_by_rule(equation, values)
    except LoweringError as error:
        reason = f"{equation.primitive.name} cannot be fused: {error}."
        raise CannotFuse(reason, user_frame_of(equation)) from error
    except CannotFuse as error:
        if not error.line.startswith(JAX):
            raise
        # names the line that called the JAX function
        raise CannotFuse(error.reason, user_frame_of(equation)) from error


def _results_by_rule(equation: core.JaxprEqn, values: list[Operand]) -> Sequence[Operand]:
    name = equation.primitive.name
    if name in INLINED:
        return _evaluate(equation.params[INLINED[name]], values)
    if not _is_complex(equation) and not any(map(has_complex_numbers, _within(equation))):
        return _bind(equation, values)
    if (control := CONTROL.get(name)) is not None:
        return control(equation.params, values)
    if name in BY_PARTS:
        return _by_parts(equation, values)
    if (rule := RULES.get(name)) is None:
        raise LoweringError(
            "kernels do not support this function of complex numbers. Write it with pairs of floats"
        )
    return [rule(equation.params, *values)]


def _bind(equation: core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    results = equation.primitive.bind(*values, **equation.params)
    return list(results) if equation.primitive.multiple_results else [results]


def _by_parts(equation: core.JaxprEqn, values: Sequence[Operand]) -> list[Operand]:
    """Applies an operation that moves or adds elements to the real parts, and then to the imaginary parts."""
    part = lambda value, n: value[n] if isinstance(value, ComplexPair) else value
    real, imag = (_bind(equation, [part(value, n) for value in values]) for n in (0, 1))
    return [ComplexPair(*pair) for pair in zip(real, imag, strict=True)]


BY_PARTS = {
    *("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "rev", "concatenate", "pad", "split"),
    *("slice", "dynamic_slice", "dynamic_update_slice", "select_n", "copy", "copy_p"),
    *("neg", "add", "sub", "add_any", "reduce_sum", "cumsum", "stack", "unstack", "tile"),
}
"""Primitives that apply to real and imaginary parts separately."""


# --- control flow ------------------------------------------------------------------------------------------


def _scan(params: Mapping[str, Any], values: list[Operand]) -> list[Operand]:
    consts, init, xs = scan_operands(params, values)

    def body(carry: list[Operand], x: list[Operand]) -> tuple[list[Operand], list[Operand]]:
        results = _evaluate(params["jaxpr"], [*consts, *carry, *x])
        return results[: len(init)], results[len(init) :]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(body, init, xs, **options)
    return [*carry, *ys]


def _while(params: Mapping[str, Any], values: list[Operand]) -> list[Operand]:
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    return lax.while_loop(
        lambda now: _evaluate(params["cond_jaxpr"], [*values[:first], *now])[0],
        lambda now: _evaluate(params["body_jaxpr"], [*values[first:second], *now]),
        values[second:],
    )


def _cond(params: Mapping[str, Any], values: list[Operand]) -> list[Operand]:
    index, *operands = values
    branches = [partial(_evaluate, branch) for branch in params["branches"]]
    return list(lax.switch(index, branches, operands))


CONTROL: dict[str, Callable[[Mapping[str, Any], list[Operand]], list[Operand]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


# --- arithmetic --------------------------------------------------------------------------------------------


def _product(x: ComplexPair, y: ComplexPair) -> ComplexPair:
    return ComplexPair(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


def _quotient(x: ComplexPair, y: ComplexPair) -> ComplexPair:
    """Divides by Smith's method, which overflows only where the quotient does."""
    swaps = jnp.abs(y.real) < jnp.abs(y.imag)
    large, small = jnp.where(swaps, y.imag, y.real), jnp.where(swaps, y.real, y.imag)
    ratio = small / large
    whole = large + small * ratio
    one, other = jnp.where(swaps, x.imag, x.real), jnp.where(swaps, x.real, x.imag)
    imag = (other - one * ratio) / whole
    return ComplexPair((one + other * ratio) / whole, jnp.where(swaps, -imag, imag))


def _magnitude(x: ComplexPair) -> Any:
    one, other = jnp.abs(x.real), jnp.abs(x.imag)
    large, small = jnp.maximum(one, other), jnp.minimum(one, other)
    ratio = small / large
    return jnp.where((large == 0) | jnp.isinf(large), large, large * jnp.sqrt(1 + ratio * ratio))


def _exp(x: ComplexPair) -> ComplexPair:
    size = jnp.exp(x.real)
    return ComplexPair(size * jnp.cos(x.imag), size * jnp.sin(x.imag))


def _log(x: ComplexPair) -> ComplexPair:
    return ComplexPair(jnp.log(_magnitude(x)), jnp.arctan2(x.imag, x.real))


def _sqrt(x: ComplexPair) -> ComplexPair:
    large = jnp.sqrt((_magnitude(x) + jnp.abs(x.real)) * 0.5)
    small = jnp.where(large == 0, 0.0, jnp.abs(x.imag) / (2 * large))
    is_right = x.real >= 0
    return ComplexPair(jnp.where(is_right, large, small), jnp.copysign(jnp.where(is_right, small, large), x.imag))


def _sign(x: ComplexPair) -> ComplexPair:
    size = _magnitude(x)
    unit = jnp.where(size == 0, 1.0, size)
    return ComplexPair(x.real / unit, x.imag / unit)


def _integer_power(x: ComplexPair, exponent: int) -> ComplexPair:
    if exponent < 0:
        return _quotient(_one_like(x), _integer_power(x, -exponent))
    result, square = None, x
    while exponent:
        if exponent & 1:
            result = square if result is None else _product(result, square)
        exponent >>= 1
        square = _product(square, square) if exponent else square
    return _one_like(x) if result is None else result


def _power(x: ComplexPair, y: Operand) -> ComplexPair:
    exponent = (
        y if isinstance(y, ComplexPair) else ComplexPair(jnp.asarray(y, jnp.float32), jnp.zeros_like(x.real))
    )
    is_zero, is_one = (x.real == 0) & (x.imag == 0), (exponent.real == 0) & (exponent.imag == 0)
    found = _exp(_product(exponent, _log(x)))
    vanishes = is_zero & (exponent.real > 0)
    real = jnp.where(is_one, 1.0, jnp.where(vanishes, 0.0, found.real))
    return ComplexPair(real, jnp.where(is_one | vanishes, 0.0, found.imag))


def _tanh(x: ComplexPair) -> ComplexPair:
    """Returns the hyperbolic tangent, which is finite for all finite arguments but its poles.

    With `t` the hyperbolic tangent of the real part and `s`, `c` the sine and cosine of the imaginary part, it is
    `(t + i s c (1 - t²)) / (c² + s² t²)`. No part of it overflows.
    """
    t, s, c = jnp.tanh(x.real), jnp.sin(x.imag), jnp.cos(x.imag)
    decay = jnp.exp(-2 * jnp.abs(x.real))
    rest = 4 * decay / jnp.square(1 + decay)  # 1 - t², computed without cancellation
    size = c * c + s * s * t * t
    return ComplexPair(t / size, s * c * rest / size)


def _tan(x: ComplexPair) -> ComplexPair:
    turned = _tanh(ComplexPair(-x.imag, x.real))
    return ComplexPair(turned.imag, -turned.real)


def _one_like(x: ComplexPair) -> ComplexPair:
    return ComplexPair(jnp.ones_like(x.real), jnp.zeros_like(x.imag))


def _sin(x: ComplexPair) -> ComplexPair:
    return ComplexPair(jnp.sin(x.real) * jnp.cosh(x.imag), jnp.cos(x.real) * jnp.sinh(x.imag))


def _cos(x: ComplexPair) -> ComplexPair:
    return ComplexPair(jnp.cos(x.real) * jnp.cosh(x.imag), -jnp.sin(x.real) * jnp.sinh(x.imag))


def _sinh(x: ComplexPair) -> ComplexPair:
    return ComplexPair(jnp.sinh(x.real) * jnp.cos(x.imag), jnp.cosh(x.real) * jnp.sin(x.imag))


def _cosh(x: ComplexPair) -> ComplexPair:
    return ComplexPair(jnp.cosh(x.real) * jnp.cos(x.imag), jnp.sinh(x.real) * jnp.sin(x.imag))


def _convert(params: Mapping[str, Any], x: Operand) -> Operand:
    if not is_complex(params["new_dtype"]):
        return lax.convert_element_type(x.real, params["new_dtype"])
    if isinstance(x, ComplexPair):
        return x
    real = lax.convert_element_type(x, jnp.float32)
    return ComplexPair(real, jnp.zeros_like(real))


def _iota(params: Mapping[str, Any]) -> ComplexPair:
    real = lax.broadcasted_iota(jnp.float32, params["shape"], params["dimension"])
    return ComplexPair(real, jnp.zeros_like(real))


def _conjugate(params: Mapping[str, Any], x: Operand) -> ComplexPair:
    return ComplexPair(x.real, -x.imag) if isinstance(x, ComplexPair) else ComplexPair(x, jnp.zeros_like(x))


def _dot(params: Mapping[str, Any], x: ComplexPair, y: ComplexPair) -> ComplexPair:
    dot = partial(lax.dot_general, dimension_numbers=params["dimension_numbers"], precision=params["precision"])
    real = dot(x.real, y.real) - dot(x.imag, y.imag)
    return ComplexPair(real, dot(x.real, y.imag) + dot(x.imag, y.real))


def _scatter(
    function: Callable[..., Any], params: Mapping[str, Any], x: ComplexPair, at: Any, updates: ComplexPair
) -> ComplexPair:
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    scatter = partial(function, **{name: params[name] for name in names})
    return ComplexPair(scatter(x.real, at, updates.real), scatter(x.imag, at, updates.imag))


def _gather(params: Mapping[str, Any], x: ComplexPair, at: Any) -> ComplexPair:
    """Gathers both parts. Out of bounds are the two parts of the fill value, by default NaN and zero."""
    fill = params["fill_value"]
    fill = complex(np.nan, 0) if fill is None else complex(fill)
    own = lambda part, number: lax.gather_p.bind(part, at, **{**params, "fill_value": np.float32(number)})
    return ComplexPair(own(x.real, fill.real), own(x.imag, fill.imag))


def _fourier(params: Mapping[str, Any], x: Operand) -> Operand:
    """Multiplies by the matrix of a discrete Fourier transform along the last axis."""
    kind, lengths = params["fft_type"].name, params["fft_lengths"]
    if len(lengths) != 1:
        raise LoweringError(
            f"Fourier transforms over {len(lengths)} axes are not supported, only over one at a time"
        )
    (length,) = lengths
    if length > MAX_LENGTH:
        raise LoweringError(f"a Fourier transform of {length:,} elements exceeds the limit of {MAX_LENGTH}")
    kept = length // 2 + 1 if kind in ("RFFT", "IRFFT") else length
    waves = np.exp(2j * np.pi * np.outer(np.arange(length), np.arange(kept)) / length)
    multiply = lambda part, matrix: jnp.dot(part, matrix.astype(np.float32), precision="highest")
    if kind == "RFFT":
        return ComplexPair(multiply(x, waves.real), multiply(x, -waves.imag))
    if kind == "IRFFT":
        times = np.array([1.0 if n in (0, length / 2) else 2.0 for n in range(kept)]) / length
        matrix = (waves * times).T
        return multiply(x.real, matrix.real) - multiply(x.imag, matrix.imag)
    matrix = waves.conj() if kind == "FFT" else waves / length
    dot = {"dimension_numbers": (((x.real.ndim - 1,), (0,)), ((), ())), "precision": lax.Precision.HIGHEST}
    return _dot(dot, x, ComplexPair(matrix.real.astype(np.float32), matrix.imag.astype(np.float32)))


def _plain(function: Callable[..., Operand]) -> Callable[..., Operand]:
    """Returns a rule that reads no parameters."""
    return lambda params, *values: function(*values)


RULES: dict[str, Callable[..., Operand]] = {
    "complex": _plain(ComplexPair),
    "real": _plain(lambda x: x.real),
    "imag": _plain(lambda x: x.imag),
    "conj": _conjugate,
    "iota": _iota,
    "convert_element_type": _convert,
    "mul": _plain(_product),
    "div": _plain(_quotient),
    "square": _plain(lambda x: _product(x, x)),
    "integer_pow": lambda params, x: _integer_power(x, params["y"]),
    "pow": _plain(_power),
    "abs": _plain(_magnitude),
    "sign": _plain(_sign),
    "exp": _plain(_exp),
    "log": _plain(_log),
    "sqrt": _plain(_sqrt),
    "rsqrt": _plain(lambda x: _quotient(_one_like(x), _sqrt(x))),
    "sin": _plain(_sin),
    "cos": _plain(_cos),
    "tan": _plain(_tan),
    "sinh": _plain(_sinh),
    "cosh": _plain(_cosh),
    "tanh": _plain(_tanh),
    "eq": _plain(lambda x, y: (x.real == y.real) & (x.imag == y.imag)),
    "ne": _plain(lambda x, y: (x.real != y.real) | (x.imag != y.imag)),
    "dot_general": _dot,
    "gather": _gather,
    "scatter": partial(_scatter, lax.scatter),
    "scatter-add": partial(_scatter, lax.scatter_add),
    "fft": _fourier,
}
