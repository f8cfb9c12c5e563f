"""Finds the line of the user's code in a traceback that mostly contains frames of JAX."""

import linecache
import os
import shlex
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax.extend

from rollmill.core.errors import ContractError, RollmillError, first_line
from rollmill.core.imports import module_at

_ROLLMILL = str(Path(__file__).parents[1]) + os.sep
_PYTHON = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
HINTS: dict[type[Exception], str] = {
    jax.errors.ConcretizationTypeError: (
        "Python's `if`, `int` and `float` need concrete values, but this value is traced. Use jnp.where or "
        "jax.lax.cond on observations, states, actions and params."
    ),
    jax.errors.TracerArrayConversionError: "NumPy cannot operate on traced values. Use jax.numpy.",
    jax.errors.NonConcreteBooleanIndexError: "a boolean index has no fixed shape. Use jnp.where.",
    jax.errors.UnexpectedTracerError: (
        "a value of an earlier call was kept outside the state. Keep everything that changes in the state."
    ),
    jax.dtypes.TypePromotionError: "cast one side with .astype.",
}

_MACHINERY = ("jax", "jaxlib", "equinox", "jaxtyping", "beartype", "numpy")


class SourceLine(NamedTuple):
    """A line of a source file, with its file and number."""

    file: str
    line: int


def user_frame(error: BaseException) -> str:
    """Returns the innermost line of the user's code in an error's traceback, as `file:line: source`.

    The user's code is all code outside the folders of Python and Rollmill. If the traceback does not contain any,
    the result is the last line of an installed package other than JAX and its dependencies, or otherwise the last
    line of Rollmill.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return _innermost([SourceLine(frame.filename, frame.lineno or 0) for frame in frames])


def failed_import(module: str, error: BaseException) -> str:
    """Returns why an import failed: the line that failed, or a remedy if Python does not find the module."""
    if os.sep in module or module.endswith(".py"):
        return _path_for_module(module)
    top = module.partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or error.name not in (module, top):
        return f"cannot import {module!r}: {type(error).__name__}: {error}, at {user_frame(error)}."
    cause = f"cannot import {module!r}: {type(error).__name__}: {error}. hint:"
    here = next((path for path in (Path(f"{top}.py"), Path(top)) if os.path.exists(path)), None)
    if here is not None:
        return (
            f"{cause} {here} is in the current directory, which Python does not search by default. {_remedy(here)}"
        )
    return (
        f"{cause} name its file with --import DIRECTORY/{top}.py, or run the command with PYTHONPATH=DIRECTORY, "
        f"the directory that contains {top}.py or the package {top}."
    )


def _remedy(here: Path) -> str:
    """Returns how to import a module in the current directory, which may be a file or a package."""
    if here.suffix == ".py":
        return f"Name the file with --import {here}."
    return "Run the command with PYTHONPATH=., as in `PYTHONPATH=. rollmill ...`."


def _path_for_module(text: str) -> str:
    """Returns how to import the module at a path: by its name, with its folder on `PYTHONPATH`."""
    name, folder = module_at(text)
    return (
        f"cannot import {text!r}: expected the name of a module, got a path. hint: write {name}, and set "
        f"PYTHONPATH={shlex.quote(str(folder))} for the command."
    )


@contextmanager
def attribute_to_user_code(what: str) -> Iterator[None]:
    """Context manager that raises a `ContractError`, naming the line, for exceptions of the user's code and for
    `sys.exit`. Errors of Rollmill and FloatingPointError pass unchanged.

    Args:
        what: name of the call in the message, such as "CartPole-v1: step".
    """
    try:
        yield
    except (RollmillError, FloatingPointError):  # `jax.debug_nans` raises FloatingPointError
        raise
    except (Exception, SystemExit) as error:
        hint = next((hint for kind, hint in HINTS.items() if isinstance(error, kind)), None)
        lines = [f"{what} raised {type(error).__name__}: {first_line(error)}", f"at {user_frame(error)}"]
        raise ContractError("\n  ".join(lines + ([f"hint: {hint}"] if hint else []))) from error


def user_frame_of(equation: jax.extend.core.JaxprEqn) -> str:
    """Returns the user's line from which an equation of a jaxpr was traced (see `user_frame`)."""
    recorded = equation.source_info.traceback
    frames = recorded.frames if recorded else []
    return _innermost([SourceLine(frame.file_name, frame.line_num) for frame in reversed(frames)])


def _innermost(lines: Sequence[SourceLine]) -> str:
    """Formats the innermost of `lines` in the user's code. `lines` go from the outermost call inwards."""
    inner = [line for line in lines if not line.file.startswith("<")]
    first = next((index for index, line in enumerate(inner) if _is_rollmill(line)), 0)
    inner = inner[first:]  # an error is never attributed to code that called Rollmill
    for is_candidate in (_is_users, _is_installed, _is_rollmill):
        candidates = [line for line in inner if is_candidate(line)]
        if candidates:
            return _text(candidates[-1])
    return _text(inner[-1]) if inner else "unknown line"


def _is_users(line: SourceLine) -> bool:
    return not _is_rollmill(line) and not line.file.startswith(_PYTHON) and not _is_in_site_packages(line)


def _is_in_site_packages(line: SourceLine) -> bool:
    """Returns whether a line is in a package of this environment, of the user's folder, or of a .pth file."""
    return "site-packages" in Path(line.file).parts


def _is_installed(line: SourceLine) -> bool:
    is_machinery = not set(_MACHINERY).isdisjoint(Path(line.file).parts)
    return _is_in_site_packages(line) and not _is_rollmill(line) and not is_machinery


def _is_rollmill(line: SourceLine) -> bool:
    return line.file.startswith(_ROLLMILL)


def _text(line: SourceLine) -> str:
    source = linecache.getline(line.file, line.line).strip()
    return f"{line.file}:{line.line}: {source}"
