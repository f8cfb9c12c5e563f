"""Which line of the user's own code an error came from, in a traceback that is mostly JAX's."""

import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax.extend

from rollmill.core.errors import ContractError, RollmillError

_ROLLMILL = str(Path(__file__).parents[1]) + os.sep
_PYTHON = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
HINTS: dict[type[Exception], str] = {
    jax.errors.ConcretizationTypeError: "Python's `if`, `int` and `float` need a value that is known while "
    "tracing; use jnp.where or jax.lax.cond on observations, states, actions and params.",
    jax.errors.TracerArrayConversionError: "NumPy cannot work on traced values; use jax.numpy.",
    jax.errors.NonConcreteBooleanIndexError: "a boolean index has no fixed shape; use jnp.where.",
    jax.errors.UnexpectedTracerError: "a value of an earlier call was kept outside the state; "
    "keep everything that changes in the state.",
    jax.dtypes.TypePromotionError: "cast one side with .astype.",
}

_MACHINERY = ("jax", "jaxlib", "equinox", "jaxtyping", "beartype", "numpy")


class SourceLine(NamedTuple):
    """A line of a source file."""

    file: str
    line: int


def own_line(error: BaseException) -> str:
    """The innermost line of the caller's code that an error passed through, as `file:line: source`.

    "Own" is code outside Python's folders and outside Rollmill. Where the traceback holds none, it is the
    last line of an installed package that is not JAX or one it stands on; then the last of Rollmill.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return _innermost_own([SourceLine(frame.filename, frame.lineno or 0) for frame in frames])


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Turns an error that the caller's code raises into a `ContractError` that shows its own line.

    Args:
        what: what was called, such as "CartPole-v1: step".

    Raises:
        ContractError: from any error but Rollmill's own.
    """
    try:
        yield
    except (RollmillError, FloatingPointError):  # the latter is how `jax.debug_nans` speaks
        raise
    except Exception as error:
        hint = next((hint for kind, hint in HINTS.items() if isinstance(error, kind)), None)
        lines = [f"{what} raised {type(error).__name__}: {_first_line(error)}", f"at {own_line(error)}"]
        raise ContractError("\n  ".join(lines + ([f"hint: {hint}"] if hint else []))) from error


def own_line_of(equation: jax.extend.core.JaxprEqn) -> str:
    """The caller's line that an equation of a jaxpr was traced from, found as `own_line` does."""
    recorded = equation.source_info.traceback
    frames = recorded.frames if recorded else []
    return _innermost_own([SourceLine(frame.file_name, frame.line_num) for frame in reversed(frames)])


def _innermost_own(places: Sequence[SourceLine]) -> str:
    """The text of the last place that is own code; places go from the outermost call inwards."""
    inside = _from_rollmill_inwards([place for place in places if not place.file.startswith("<")])
    for is_candidate in (_is_own, _is_installed, _is_rollmill):
        candidates = [place for place in inside if is_candidate(place)]
        if candidates:
            return _text(candidates[-1])
    return _text(inside[-1]) if inside else "unknown line"


def _from_rollmill_inwards(places: Sequence[SourceLine]) -> Sequence[SourceLine]:
    """Without the frames that only called Rollmill, where it was called at all."""
    first = next((index for index, place in enumerate(places) if _is_rollmill(place)), 0)
    return places[first:]


def _is_own(place: SourceLine) -> bool:
    return not _is_rollmill(place) and not place.file.startswith(_PYTHON)


def _is_installed(place: SourceLine) -> bool:
    parts = Path(place.file).parts
    return "site-packages" in parts and not _is_rollmill(place) and not _has_any(parts, _MACHINERY)


def _is_rollmill(place: SourceLine) -> bool:
    return place.file.startswith(_ROLLMILL)


def _has_any(parts: Iterable[str], names: Iterable[str]) -> bool:
    return not set(names).isdisjoint(parts)


def _text(place: SourceLine) -> str:
    source = linecache.getline(place.file, place.line).strip()
    return f"{place.file}:{place.line}: {source}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
