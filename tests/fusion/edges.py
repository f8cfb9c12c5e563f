"""The table of edges: every primitive that kernels compute, on the operands at which back ends could disagree.

A case is a primitive on operands of one type, called with each combination of that type's edge values: infinities,
NaN, signed zeros, denormals, the ends of integers, shifts by all bits and more. A cell of the table is one
combination.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from fused_runs import by_program, by_vmap

from emitters import AS_USERS
from rollmill.fusion import CannotFuse
from rollmill.fusion.lower.values import LoweringError

lax = jax.lax

FLOAT_TYPES = ("float32", "bfloat16", "float16")
SIGNED, UNSIGNED = ("int8", "int16", "int32"), ("uint8", "uint16", "uint32")
INTEGER_TYPES = (*SIGNED, *UNSIGNED)
TYPES = (*FLOAT_TYPES, *INTEGER_TYPES, "bool")

MAGNITUDES = (
    [0.0, 1e-45, 1e-41, 1e-39, 1.1754944e-38, 1e-30, 6e-8, 1e-7, 3e-5, 1e-4, 0.1, 0.49999997, 0.5, 0.9, 1.0, 1.5]
    + [2.0, 2.5, 3.0, np.pi, 7.0, 20.0, 88.8, 104.0, 127.5, 128.5, 255.5, 256.0, 1e4, 32768.0, 65504.0, 65535.5]
    + [1e5, 16777217.0, 2147483520.0, 2.0**31, 2.0**32, 1e10, 3e18, 1e27, 3.4028235e38, np.inf, np.nan]
)
FEW_MAGNITUDES = [0.0, 1e-40, 1.0, 2.5, 3e38, np.inf, np.nan]


class Case(NamedTuple):
    """A primitive on operands of one type."""

    primitive: str
    """Its name in JAX."""
    types: str
    """The operands' types, and what else distinguishes cases of one primitive."""
    function: Callable[..., Any]
    """A function of one sample."""
    operands: tuple[np.ndarray, ...]
    """`[samples, ...]` each."""
    either_zero: bool = False
    """Whether a zero may have either sign: sums and extremes of zeros of both signs, where XLA's own differ."""
    meaning: Callable[..., Any] | None = None
    """By NumPy, for arrays `[samples, ...]`, where XLA's programs do not agree among themselves."""

    @property
    def name(self) -> str:
        return f"{self.primitive} {self.types}"


def edge_values(dtype: str, *, few: bool = False) -> list[Any]:
    """The edges of a type; a few of them where three or more are combined."""
    if dtype == "bool":
        return [False, True]
    if dtype in FLOAT_TYPES:
        magnitudes = FEW_MAGNITUDES if few else MAGNITUDES
        with np.errstate(over="ignore"):
            typed = np.asarray(magnitudes, np.float32).astype(jnp.dtype(dtype))
        return [sign * x for x in dict.fromkeys(typed.tolist()) for sign in (1.0, -1.0)]
    limits = np.iinfo(dtype)
    bits = limits.bits
    numbers = [0, 1, 2, 7, -1, limits.min, limits.max]
    if not few:
        more = [3, bits - 1, bits, bits + 1, 100, -2, -7, -100, limits.min + 1, limits.max - 1, limits.max // 2]
        numbers += [*more, limits.max // 2 + 1, 77 << (bits - 8)]
    return sorted({n for n in numbers if limits.min <= n <= limits.max})


def combined(dtypes: Sequence[str], *, few: bool = False) -> tuple[np.ndarray, ...]:
    """Every combination of edge values, one array `[samples]` for each operand. JAX would compile its copies."""
    rows = list(itertools.product(*(edge_values(dtype, few=few) for dtype in dtypes)))
    return tuple(np.asarray([row[n] for row in rows], jnp.dtype(dtype)) for n, dtype in enumerate(dtypes))


def vectors(dtype: str, size: int = 3) -> tuple[np.ndarray]:
    """Every combination of a few edge values, as arrays `[samples, size]`."""
    return (np.stack(combined([dtype] * size, few=True), axis=1),)


def kept(operands: tuple[np.ndarray, ...], holds: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, ...]:
    """The samples in which something holds of every number."""
    numbers = [np.asarray(x, np.float64).reshape(x.shape[0], -1) for x in operands]
    places = np.nonzero(np.all([holds(x).all(axis=1) for x in numbers], axis=0))[0]
    return tuple(x[places] for x in operands)


def is_normal(x: np.ndarray) -> np.ndarray:
    """Whether numbers are no denormals."""
    return ~((x != 0) & (np.abs(x) < 1.17e-38))


def is_moderate(x: np.ndarray) -> np.ndarray:
    """Whether no product of a few numbers overflows, nor is a reciprocal denormal."""
    return ~np.isfinite(x) | (np.abs(x) < 1e4)


def has_no_negative_zero(x: np.ndarray) -> np.ndarray:
    """Whether a zero is the positive one."""
    return (x != 0) | ~np.signbit(x)


def rows(dtype: str, width: int = 20) -> tuple[np.ndarray]:
    """Rows of a product's width `[samples, width]`: edge values in the first, a middle and the last column."""
    (edges,) = vectors(dtype)
    between = np.linspace(-2.0, 2.0, width, dtype=np.float32).astype(edges.dtype)
    whole = np.tile(between, (len(edges), 1))
    whole[:, [0, 7, width - 1]] = edges
    return (whole,)


def flushed(operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Zeros instead of numbers that are smaller than any normal one."""

    def zeros(x: np.ndarray) -> np.ndarray:
        if x.dtype.name not in ("float32", "bfloat16"):
            return x
        numbers = np.asarray(x, np.float32)
        tiny = (
            np.abs(np.frombuffer(numbers.tobytes(), np.uint32).reshape(numbers.shape) & 0x7FFF_FFFF) < 0x0080_0000
        )
        return np.where(tiny, np.copysign(np.float32(0), numbers), numbers).astype(x.dtype)

    return tuple(map(zeros, operands))


# --- cases --------------------------------------------------------------------------------------------------

OF_FLOATS = {
    **{name: getattr(lax, name) for name in ("neg", "abs", "sign", "floor", "ceil", "is_finite", "square")},
    **{name: getattr(lax, name) for name in ("exp", "exp2", "expm1", "log", "log1p", "logistic")},
    **{
        name: getattr(lax, name) for name in ("sqrt", "rsqrt", "cbrt", "sin", "cos", "tan", "asin", "acos", "atan")
    },
    **{name: getattr(lax, name) for name in ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh")},
    **{name: getattr(lax, name) for name in ("erf", "erfc", "erf_inv", "lgamma")},
    "round away": lax.round,
    "round even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "reduce_precision bfloat16": lambda x: lax.reduce_precision(x, 8, 7),
    "reduce_precision float16": lambda x: lax.reduce_precision(x, 5, 10),
    "nan_to_num": jnp.nan_to_num,
    "isnan": jnp.isnan,
    "log2": jnp.log2,
    **{f"integer_pow {n}": lambda x, n=n: lax.integer_pow(x, n) for n in (-2, -1, 2, 3, 5)},
}
OF_TWO_FLOATS = {
    **{name: getattr(lax, name) for name in ("add", "sub", "mul", "div", "rem", "max", "min")},
    **{name: getattr(lax, name) for name in ("pow", "nextafter", "atan2", "eq", "ne", "lt", "le", "gt", "ge")},
    "floor_divide": jnp.floor_divide,
    "remainder": jnp.remainder,
    "logaddexp": jnp.logaddexp,
}
OF_INTEGERS = {
    **{name: getattr(lax, name) for name in ("neg", "abs", "sign", "square", "population_count", "clz")},
    "not": lax.bitwise_not,
    **{f"integer_pow {n}": lambda x, n=n: lax.integer_pow(x, n) for n in (2, 3, 5)},
}
OF_TWO_INTEGERS = {
    **{name: getattr(lax, name) for name in ("add", "sub", "mul", "div", "rem", "max", "min")},
    **{name: getattr(lax, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(lax, f"bitwise_{name}") for name in ("and", "or", "xor")},
    **{name: getattr(lax, name) for name in ("shift_left", "shift_right_logical", "shift_right_arithmetic")},
    "floor_divide": jnp.floor_divide,
    "remainder": jnp.remainder,
}
OF_BOOLEANS = {
    **{name: getattr(lax, f"bitwise_{name}") for name in ("and", "or", "xor")},
    **{name: getattr(lax, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "max", "min")},
}
OF_THREE = {
    "clamp": lax.clamp,
    "select_n": lambda x, y, z: lax.select_n(x > y, y, z),
}
ORDERS = {
    "argmax": lambda x: lax.argmax(x, 0, jnp.int32),
    "argmin": lambda x: lax.argmin(x, 0, jnp.int32),
    "sort": jnp.sort,
    "sort argsort": lambda x: jnp.argsort(x),
    "sort descending": lambda x: jnp.argsort(x, descending=True),
    "sort two": lambda x: lax.sort((x, jnp.arange(x.size), -jnp.arange(x.size)), num_keys=1),
    "sort two keys": lambda x: lax.sort((x, jnp.flip(x), jnp.arange(x.size)), num_keys=2),
    "sort unstable": lambda x: lax.sort((x, jnp.arange(x.size)), num_keys=1, is_stable=False),
}
EXTREMES = {
    "cummax": (lax.cummax, None),
    "cummin": (lax.cummin, None),
    # XLA drops NaN from some minima of bfloat16 on CPUs
    "reduce_max": (jnp.max, lambda x: x.max(axis=1)),
    "reduce_min": (jnp.min, lambda x: x.min(axis=1)),
}
SUMS = {
    "reduce": lambda x: lax.reduce((x, x), (x.dtype.type(0),) * 2, lambda a, b: (a[0] + b[0], a[1] + b[1]), (0,)),
    "reduce_sum": jnp.sum,
    "reduce_prod": jnp.prod,
    "cumsum": lax.cumsum,
    "cumprod": lax.cumprod,
    "scatter_add": lambda x: x.at[jnp.asarray([1, 1])].add(x[:2]),
    "scatter_max": lambda x: x.at[jnp.asarray([1, 1])].max(x[:2]),
    "scatter_min": lambda x: x.at[jnp.asarray([1, 1])].min(x[:2]),
}
SUMS_OF_FLOATS = {
    "cumlogsumexp": lax.cumlogsumexp,
    "nanmax": lambda x: jnp.nanmax(x),
    "nansum": lambda x: jnp.nansum(x),
    "dot_general": lambda x: lax.dot_general(x, jnp.flip(x), (((0,), (0,)), ((), ()))),
}
OF_A_ROW_AND_ITS_FIRST = ("add", "sub", "mul", "div", "max", "min", "eq", "ne", "lt", "le", "gt", "ge")
ZEROS_OF_EITHER_SIGN = ("max", "min", "clamp", "nextafter")
SEVERAL_OPERATIONS = ("floor_divide", "remainder", "logaddexp")
OF_BOOLEAN_VECTORS = {
    "reduce_and": lambda x: jnp.all(x),
    "reduce_or": lambda x: jnp.any(x),
    "reduce_xor": lambda x: lax.reduce_xor(x, (0,)),
    "argmax": lambda x: lax.argmax(x, 0, jnp.int32),
    "sort": jnp.sort,
    "sort argsort": lambda x: jnp.argsort(x),
}


def _indexing() -> Iterator[Case]:
    """Reads and writes at indices inside, at the ends, and outside, by each mode that JAX has."""
    row = np.asarray([3.0, -0.0, np.nan, np.inf], np.float32)
    for dtype in ("int32", "int8", "uint32"):
        (index,) = combined([dtype])
        for mode in ("clip", "fill"):
            yield Case("gather", f"{dtype} {mode}", lambda i, m=mode: jnp.asarray(row).at[i].get(mode=m), (index,))
            own = lambda i, m=mode: jnp.where(i > 3, row, -row).at[i].get(mode=m)
            yield Case("gather", f"{dtype} {mode}, of each sample", own, (index,))
            yield Case(
                "scatter", f"{dtype} {mode}", lambda i, m=mode: jnp.asarray(row).at[i].set(9.0, mode=m), (index,)
            )
        yield Case("dynamic_slice", dtype, lambda i: lax.dynamic_slice(jnp.asarray(row), (i,), (2,)), (index,))
        update = lambda i: lax.dynamic_update_slice(jnp.asarray(row), jnp.ones(2), (i,))
        yield Case("dynamic_update_slice", dtype, update, (index,))
        yield Case(
            "select_n", f"cond {dtype}", lambda i: lax.switch(i, [lambda: 1, lambda: 2, lambda: 3]), (index,)
        )


def _conversions() -> Iterator[Case]:
    for before in TYPES:
        operands = combined([before])
        normal = kept(operands, is_normal)
        for after in TYPES:
            if before == after:
                continue
            name = f"{before} to {after}"
            convert = lambda x, t=after: lax.convert_element_type(x, t)
            yield Case("convert_element_type", name, convert, normal if after == "bool" else operands)
            same = jnp.dtype(before).itemsize == jnp.dtype(after).itemsize
            if same and "bool" not in (before, after):
                cast = lambda x, t=after: lax.bitcast_convert_type(x, t)
                yield Case("bitcast_convert_type", name, cast, operands)


def cases() -> Iterator[Case]:
    """All of them."""
    groups = [
        (OF_FLOATS, FLOAT_TYPES, 1),
        (OF_TWO_FLOATS, FLOAT_TYPES, 2),
        (OF_INTEGERS, INTEGER_TYPES, 1),
        (OF_TWO_INTEGERS, INTEGER_TYPES, 2),
        (OF_BOOLEANS, ("bool",), 2),
        ({"not": lax.bitwise_not}, ("bool",), 1),
        (OF_THREE, ("float32", "bfloat16", "float16", "int32", "uint8"), 3),
    ]
    for functions, dtypes, arity in groups:
        for dtype in dtypes:
            operands = combined([dtype] * arity, few=arity > 2)
            normal = kept(operands, is_normal)
            for name, own in functions.items():
                if name != "abs" or dtype not in UNSIGNED:
                    # of several operations one may take a denormal for a number, and another for zero
                    chosen = normal if name in SEVERAL_OPERATIONS else operands
                    yield Case(name, dtype, own, chosen, either_zero=name in ZEROS_OF_EITHER_SIGN)
    for dtype in FLOAT_TYPES:
        yield Case("pow", f"{dtype} to int32", lax.pow, combined([dtype, "int32"]))
    yield from _of_vectors()
    yield from _of_rows()
    yield from _conversions()
    yield from _indexing()


def _of_vectors() -> Iterator[Case]:
    for dtype in (*FLOAT_TYPES, "int32", "uint8", "int16"):
        operands = vectors(dtype)
        summed = kept(operands, is_moderate) if dtype in FLOAT_TYPES else operands
        yield from (Case(name, dtype, own, operands) for name, own in ORDERS.items())
        for name, (own, meaning) in EXTREMES.items():
            yield Case(name, dtype, own, operands, either_zero=True, meaning=meaning)
        sums = SUMS | (SUMS_OF_FLOATS if dtype in FLOAT_TYPES else {})
        yield from (Case(name, dtype, own, summed, either_zero=True) for name, own in sums.items())
        # how often infinities and zeros meet depends on the order of the products
        multiplied = kept(summed, lambda x: np.isfinite(x) & is_normal(x))
        yield Case("scatter_mul", dtype, lambda x: x.at[jnp.asarray([1, 1])].multiply(x[:2]), multiplied, True)
        # XLA's top_k puts -0 before 0 on some devices
        ordered = kept(operands, lambda x: is_normal(x) & has_no_negative_zero(x))
        yield Case("top_k", dtype, lambda x: lax.top_k(x, 2), ordered)
    yield from (Case(name, "bool", own, vectors("bool")) for name, own in OF_BOOLEAN_VECTORS.items())


def _of_rows() -> Iterator[Case]:
    """The same of rows, which kernels hold otherwise than single numbers."""
    for dtype in ("float32", "bfloat16"):
        operands = rows(dtype)
        for name, own in OF_FLOATS.items():
            yield Case(name, f"{dtype} rows", own, operands)
        for name in OF_A_ROW_AND_ITS_FIRST:
            with_first = lambda x, f=OF_TWO_FLOATS[name]: f(x, jnp.broadcast_to(x[0], x.shape))
            # XLA divides by the reciprocal of what a row has in common, which may be denormal
            own_rows = kept(operands, is_moderate) if name == "div" else operands
            yield Case(name, f"{dtype} rows", with_first, own_rows, either_zero=name in ZEROS_OF_EITHER_SIGN)
        for name in ("reduce_max", "reduce_min"):
            own, meaning = EXTREMES[name]
            yield Case(name, f"{dtype} rows", own, operands, either_zero=True, meaning=meaning)
        for name in ("argmax", "argmin"):
            yield Case(name, f"{dtype} rows", ORDERS[name], operands)
        yield Case("slice", f"{dtype} rows", lambda x: (x[0], x[7], x[19]), operands)


# --- ways -----------------------------------------------------------------------------------------------------


def by_operands(cases_: Sequence[Case]) -> list[list[Case]]:
    """Cases of the same operands, which are computed together."""
    groups: dict[tuple[int, ...], list[Case]] = {}
    for case in cases_:
        groups.setdefault(tuple(map(id, case.operands)), []).append(case)
    return list(groups.values())


class Outcome(NamedTuple):
    """A case computed in one way beside XLA's unfused program."""

    case: str
    way: str
    cells: int
    differing: int = 0
    refusal: str = ""
    examples: tuple[str, ...] = ()
    """Some of the cells that differ: operands, what the way gives, what XLA gives."""


Evaluate = Callable[..., list[Any]]
"""Runs a program: see `rollmill.fusion.ir.interpret`."""


def compare(group: Sequence[Case], ways: dict[str, Evaluate]) -> list[Outcome]:
    """Computes cases of the same operands in several ways, and unfused, on the default device."""
    operands = group[0].operands
    together = lambda *own: [by_vmap(case.function, own) for case in group]
    unfused = jax.jit(together, compiler_options={"xla_allow_excess_precision": False, **AS_USERS})
    both = zip(group, unfused(*operands), unfused(*flushed(operands)), strict=True)
    expected = {
        case.name: [_expected(case, plain, operands), plain_flushed] for case, plain, plain_flushed in both
    }
    return [outcome for way, run in ways.items() for outcome in _compare_way(way, run, group, expected)]


def _expected(case: Case, plain: Any, operands: tuple[np.ndarray, ...]) -> Any:
    if case.meaning is None:
        return plain
    with np.errstate(invalid="ignore"):  # NumPy warns of NaN in 16-bit arrays
        return case.meaning(*map(np.asarray, operands))


def _compare_way(way: str, run: Evaluate, group: Sequence[Case], expected: dict[str, Any]) -> list[Outcome]:
    """All at once; where something of it is refused, each half alone."""
    operands = group[0].operands
    try:
        found = jax.jit(lambda *own: [by_program(case.function, own, evaluate=run) for case in group])(*operands)
    except (CannotFuse, LoweringError) as refusal:
        if len(group) == 1:
            (case,), cells = group, operands[0].shape[0]
            return [Outcome(case.name, way, cells, refusal=str(refusal).splitlines()[0])]
        half = len(group) // 2
        parts = (group[:half], group[half:])
        return [outcome for part in parts for outcome in _compare_way(way, run, part, expected)]
    return [_outcome(case, way, own, expected[case.name]) for case, own in zip(group, found, strict=True)]


def _outcome(case: Case, way: str, found: Any, expected: Sequence[Any]) -> Outcome:
    """Cells that equal neither what is expected nor that for operands without denormals."""
    own, plain = _arrays(found), [_arrays(one) for one in expected]
    unequal = np.ones(own[0].shape[0], bool)
    for one in plain:
        unequal &= np.any([_unequal(*pair, case.either_zero) for pair in zip(own, one, strict=True)], axis=0)
    places = np.nonzero(unequal)[0]
    picked = places[:: max(1, len(places) // 4)][:4]
    examples = tuple(
        f"({', '.join(str(operand[n]) for operand in _arrays(case.operands))}): "
        f"{', '.join(str(one[n]) for one in own)}; XLA {', '.join(str(other[n]) for other in plain[0])}"
        for n in picked
    )
    return Outcome(case.name, way, len(unequal), len(places), examples=examples)


def _arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _unequal(one: np.ndarray, other: np.ndarray, either_zero: bool) -> np.ndarray:
    """Which samples differ: integers exactly; floats by a relative tolerance, infinities, NaN and signs exactly.

    Results that are smaller than the smallest normal number may be zero.
    """
    assert one.dtype == other.dtype and one.shape == other.shape
    samples = one.shape[0]
    if not jnp.issubdtype(one.dtype, jnp.floating):
        return (one != other).reshape(samples, -1).any(axis=1)
    limits = jnp.finfo(one.dtype)
    relative = max(1e-5, 2 * float(limits.eps))
    with np.errstate(all="ignore"):
        x, y = one.astype(np.float64), other.astype(np.float64)
        near = np.abs(x - y) <= relative * np.maximum(np.abs(x), np.abs(y)) + 1.001 * float(limits.tiny)
        same_zero = (x != 0) | (y != 0) | (np.signbit(x) == np.signbit(y)) | either_zero
        equal = (x == y) & same_zero | (np.isnan(x) & np.isnan(y)) | near & ((x != 0) | (y != 0))
    return ~equal.reshape(samples, -1).all(axis=1)
