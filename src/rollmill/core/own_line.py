"""Finds the line of the user's own code in a traceback that is mostly JAX's."""

import linecache
import os
import shlex
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax.extend

from rollmill.core.errors import ContractError, RollmillError, first_line

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
    """The innermost line of the user's code in an error's traceback, as `file:line: source`.

    The user's code is all code outside of Python's folders and of Rollmill. If the traceback has none, it is the
    last line of an installed package other than JAX and its dependencies; else the last one of Rollmill.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return _innermost_own([SourceLine(frame.filename, frame.lineno or 0) for frame in frames])


def failed_import(module: str, error: BaseException) -> str:
    """Why a module cannot be imported: with the line that failed, or with what to do if Python does not find it.

    Args:
        module: the module that was to be imported.
        error: the error of its import.
    """
    if os.sep in module or module.endswith(".py"):
        return _path_for_module(module)
    top = module.partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or error.name not in (module, top):
        return f"cannot import {module!r}: {type(error).__name__}: {error}, at {own_line(error)}."
    cause = f"cannot import {module!r}: {type(error).__name__}: {error}. hint:"
    here = next((path for path in (Path(f"{top}.py"), Path(top)) if os.path.exists(path)), None)
    if here is not None:
        return (
            f"{cause} {here} lies in the current directory, where Python does not look by itself: put "
            "PYTHONPATH=. in front of the command, as in `PYTHONPATH=. rollmill ...`."
        )
    return (
        f"{cause} put PYTHONPATH=DIRECTORY in front of the command, with the directory in which {top}.py or the "
        f"package {top} lies, or PYTHONPATH=. if you run the command in that directory."
    )


def _path_for_module(text: str) -> str:
    """Says how to import what a path leads to: the module's name, and the folder in which Python has to look."""
    path = Path(text)
    own = path.stem if path.suffix == ".py" else path.name
    names, folder = [] if own == "__init__" else [own], path.parent
    while not names or (folder / "__init__.py").is_file():
        names, folder = [folder.resolve().name, *names], folder.parent
    return (
        f"cannot import {text!r}: it is a path, expected the name of a module. hint: write {'.'.join(names)}, and "
        f"put PYTHONPATH={shlex.quote(str(folder))} in front of the command, or of python."
    )


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Turns an exception of the user's code into a `ContractError` that names the line.

    Args:
        what: the call for the message, such as "CartPole-v1: step".

    Raises:
        ContractError: from any exception but Rollmill's own, and from `sys.exit`.
    """
    try:
        yield
    except (RollmillError, FloatingPointError):  # `jax.debug_nans` raises the latter
        raise
    except (Exception, SystemExit) as error:
        hint = next((hint for kind, hint in HINTS.items() if isinstance(error, kind)), None)
        lines = [f"{what} raised {type(error).__name__}: {first_line(error)}", f"at {own_line(error)}"]
        raise ContractError("\n  ".join(lines + ([f"hint: {hint}"] if hint else []))) from error


def own_line_of(equation: jax.extend.core.JaxprEqn) -> str:
    """The user's line that an equation of a jaxpr was traced from, found as by `own_line`."""
    recorded = equation.source_info.traceback
    frames = recorded.frames if recorded else []
    return _innermost_own([SourceLine(frame.file_name, frame.line_num) for frame in reversed(frames)])


def _innermost_own(lines: Sequence[SourceLine]) -> str:
    """The text of the last of `lines` that is the user's code; lines go from the outermost call inwards."""
    inner = _inside_rollmill([line for line in lines if not line.file.startswith("<")])
    for is_candidate in (_is_own, _is_installed, _is_rollmill):
        candidates = [line for line in inner if is_candidate(line)]
        if candidates:
            return _text(candidates[-1])
    return _text(inner[-1]) if inner else "unknown line"


def _inside_rollmill(lines: Sequence[SourceLine]) -> Sequence[SourceLine]:
    """The lines from the first one of Rollmill on; all lines if there is none."""
    first = next((index for index, line in enumerate(lines) if _is_rollmill(line)), 0)
    return lines[first:]


def _is_own(line: SourceLine) -> bool:
    return not _is_rollmill(line) and not line.file.startswith(_PYTHON) and not _is_in_site_packages(line)


def _is_in_site_packages(line: SourceLine) -> bool:
    """True for packages of this environment, of the user's own folder, and of those that a .pth file adds."""
    return "site-packages" in Path(line.file).parts


def _is_installed(line: SourceLine) -> bool:
    return (
        _is_in_site_packages(line) and not _is_rollmill(line) and not _has_any(Path(line.file).parts, _MACHINERY)
    )


def _is_rollmill(line: SourceLine) -> bool:
    return line.file.startswith(_ROLLMILL)


def _has_any(parts: Iterable[str], names: Iterable[str]) -> bool:
    return not set(names).isdisjoint(parts)


def _text(line: SourceLine) -> str:
    source = linecache.getline(line.file, line.line).strip()
    return f"{line.file}:{line.line}: {source}"
