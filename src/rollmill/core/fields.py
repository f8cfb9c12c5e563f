"""Validation of dataclass fields against their annotations: whole numbers for `int`, numbers for `float`."""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.json_data import INTEGERS, LONG_BITS
from rollmill.core.local_paths import local_path

Values = TypeVar("Values")

ALIASES = {
    "lr": "learning_rate",
    "step_size": "learning_rate",
    "discount": "gamma",
    "discount_factor": "gamma",
    "lam": "gae_lambda",
    "lambda": "gae_lambda",
    "lambda_": "gae_lambda",
    "n_steps": "num_steps",
    "rollout_length": "num_steps",
    "unroll_length": "num_steps",
    "n_envs": "num_envs",
    "n_minibatches": "num_minibatches",
    "nminibatches": "num_minibatches",
    "epochs": "update_epochs",
    "n_epochs": "update_epochs",
    "num_epochs": "update_epochs",
    "timesteps": "total_timesteps",
    "steps": "total_timesteps",
    "total_steps": "total_timesteps",
    "clip_range": "clip_coef",
    "clip_eps": "clip_coef",
    "clip_epsilon": "clip_coef",
    "entropy_coef": "ent_coef",
    "entropy_coeff": "ent_coef",
    "value_coef": "vf_coef",
    "grad_clip": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "norm_obs": "normalize_observations",
    "normalize_obs": "normalize_observations",
    "norm_reward": "normalize_rewards",
    "layers": "hidden_sizes",
    "log_dir": "run_dir",
    "output_dir": "run_dir",
    "out": "run_dir",
    "gpus": "devices",
    "num_gpus": "devices",
    "num_devices": "devices",
    "num_workers": "workers",
    "num_actors": "actors",
}
"""Names of settings in other libraries, with the names that they have here."""

_MINIBATCHES = "the number of minibatches that num_envs * num_steps samples are cut into, not their size."
NOTES = {
    "verbose": ("quiet", "does the opposite: progress is shown unless it is given."),
    "batch_size": ("num_minibatches", f"is {_MINIBATCHES}"),
    "minibatch_size": ("num_minibatches", f"is {_MINIBATCHES}"),
}
"""Names of settings in other libraries, with those that say the same by another value, and how."""


def named_like(name: str, known: Iterable[str]) -> str | None:
    """The known name of the setting that other libraries call `name`; None if there is none."""
    meant = ALIASES.get(name.strip("-").replace("-", "_").lower())
    return meant if meant in set(known) else None


def note_on(name: str, known: Iterable[str]) -> str | None:
    """A sentence on the known setting that takes another value for what other libraries call `name`.

    It begins with the setting's name, as `known` writes it. None if there is no such setting.
    """
    setting, note = NOTES.get(name.strip("-").replace("-", "_").lower(), ("", ""))
    meant = next((option for option in known if option.replace("-", "_") == setting), None)
    return None if meant is None else f"{meant} {note}"


def unknown_setting(kind: str, name: str, known: Iterable[str], *, hint: str = "") -> UsageError:
    """An error that suggests the known settings nearest to `name`, or the one with that name elsewhere."""
    known = list(known)
    if (note := note_on(name, known)) is not None:
        return UsageError(f"unknown {kind} {name!r}. {note}")
    return unknown_name(kind, name, known, hint=hint, meant=named_like(name, known))


def fitted(values: Values) -> Values:
    """A dataclass instance with each field converted to its annotated type.

    Raises:
        UsageError: a field cannot be converted; names the first one.
    """
    changed = changed_by_fitting(values)
    return dataclasses.replace(values, **changed) if changed else values  # pyright: ignore[reportArgumentType]


def changed_by_fitting(values: Any) -> dict[str, Any]:
    """The fields of a dataclass instance that `fitted` changes, with their converted values.

    Raises:
        UsageError: a field cannot be converted; names the first one.
    """
    hints = typing.get_type_hints(type(values))
    old = {field.name: getattr(values, field.name) for field in dataclasses.fields(values) if field.init}
    new = {name: fit(name, hints[name], value) for name, value in old.items()}
    return {name: value for name, value in new.items() if type(value) is not type(old[name]) or value != old[name]}


def check_names(kind: type, values: Mapping[str, Any], *, what: str, hint: str = "") -> None:
    """Checks that every key is the name of a field.

    Raises:
        UsageError: a name is unknown; suggests the nearest names, or the one for another library's name.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    for name in values:
        if name not in known:
            raise unknown_setting(what, name, known, hint=hint)


def fit(name: str, hint: Any, value: Any) -> Any:
    """Converts `value` to its annotated type: 1e6 to 1000000 for `int`, a list to a tuple.

    Raises:
        UsageError: it has another type; names the field, the value, and the expected type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, types.UnionType) or origin is typing.Union:
        if value is None or (isinstance(value, str) and str in arguments):
            return value
        return fit(name, next(a for a in arguments if a is not types.NoneType), value)
    if origin is Literal:
        if value not in arguments:
            raise unknown_name(name, str(value), map(str, arguments))
        return value
    if origin is tuple:
        return _fit_tuple(name, arguments, value)
    if origin is dict:
        return _fit_dict(name, arguments, value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _fit_dataclass(name, hint, value)
    reader = _READERS.get(hint)
    return value if reader is None else reader(name, value)


def _fit_tuple(name: str, arguments: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise _misfit(name, value, "a tuple")
    hints = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
    if len(hints) != len(value):
        raise _misfit(name, value, f"a tuple of {len(hints)}")
    return tuple(fit(name, hint, part) for hint, part in zip(hints, value, strict=True))


def _fit_dict(name: str, arguments: tuple[Any, ...], value: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _misfit(name, value, "a dictionary")
    return {key: fit(f"{name}[{key!r}]", arguments[1], part) for key, part in value.items()}


def _fit_dataclass(name: str, kind: type, value: Any) -> Any:
    if isinstance(value, Mapping):
        check_names(kind, value, what=f"setting of {name}")
        value = kind(**value)
    if not isinstance(value, kind):
        raise _misfit(name, value, f"a {kind.__name__}")
    return fitted(value)


def _whole(name: str, value: Any) -> int:
    number = _number(name, value, "a whole number")
    if isinstance(number, float) and not number.is_integer():
        raise _misfit(name, value, "a whole number")
    if int(number) not in INTEGERS:
        raise _misfit(name, value, "a whole number of at most 64 bits")
    return int(number)


def _real(name: str, value: Any) -> float:
    number = _number(name, value, "a number")
    try:
        return float(number)
    except OverflowError:
        raise _misfit(name, value, "a number up to 1.8e308") from None


def _number(name: str, value: Any, expected: str) -> int | float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if not isinstance(value, bool | np.bool_ | str) and getattr(value, "shape", None) == () and _is_number(value):
        return value.item()
    raise _misfit(name, value, expected)


def _is_number(value: Any) -> bool:
    return np.issubdtype(value.dtype, np.number) and not np.issubdtype(value.dtype, np.complexfloating)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise _misfit(name, value, "True or False")
    return bool(value)


def _path(name: str, value: Any) -> Path:
    if not isinstance(value, str | PathLike):
        raise _misfit(name, value, "a path")
    return local_path(name, value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _misfit(name, value, "text")
    return str(value)


_READERS: dict[Any, Callable[[str, Any], Any]] = {int: _whole, float: _real, bool: _flag, str: _text, Path: _path}


def _misfit(name: str, value: Any, expected: str) -> UsageError:
    # Python does not write integers of thousands of digits in decimals.
    shown = hex(value) if isinstance(value, int) and value.bit_length() > LONG_BITS else repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return UsageError(f"{name}={shown} must be {expected}, not a {type(value).__name__}.")
