"""`rollmill.sweep`: the command `rollmill sweep` as a function.

A trial is a process that runs a command, so values become the words of that command, and are checked as its are.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollmill.api import TRIAL_RESULTS, run_sweep
from rollmill.api.own_names import modules_of_names
from rollmill.api.sweeps import flag
from rollmill.cli.environment_options import parse_env_options
from rollmill.cli.sweep_creation import SweepRequest, create_sweep, named_modules_of
from rollmill.cli.train import OptionKinds, option_kinds
from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.fields import fit
from rollmill.core.interrupted import pass_on_interrupt
from rollmill.core.machine import GpuSharing
from rollmill.core.plugins import Kind
from rollmill.execution.instances import SHARINGS, check_sharing
from rollmill.planning import Axis, listed_axis, option_name, parse_axis

OF_ENVIRONMENT = "env-option."


class Sweep(NamedTuple):
    """A sweep that ended or was stopped."""

    directory: Path
    rows: list[dict[str, Any]]
    """The table: for each trial its name, the values that it was given, its status and its results; the best
    trial first. If seeds vary, those of the point with the best mean over its seeds, which rows have then, too."""
    exit_code: int
    """0 if all trials finished or were stopped early, 1 if one failed; 128 and the number of the signal
    that stopped it, as 143 after SIGTERM."""

    def __fspath__(self) -> str:
        """The directory."""
        return str(self.directory)


def sweep(
    algorithm: str,
    environment: str,
    *,
    over: Mapping[str, Any],
    sampler: str | None = None,
    trials: int | None = None,
    random: int | None = None,
    sweep_seed: int = 0,
    stop_early: str | None = None,
    reduction_factor: int | None = None,
    grace_steps: int | None = None,
    group_seeds: bool = False,
    at_once: int | None = None,
    gpu_sharing: GpuSharing = "auto",
    metric: str = "final_return",
    sweep_dir: str | Path | None = None,
    env_options: Mapping[str, Any] | None = None,
    imports: Sequence[str] = (),
    quiet: bool = False,
    **options: Any,
) -> Sweep:
    """Trains with combinations of some options' values, several at a time, as `rollmill sweep` does.

    `rollmill.sweep("ppo", "CartPole-v1", over={"learning_rate": [1e-3, 2.5e-3], "seed": range(5)})`

    Trials are processes of their own: environments and algorithms are given by name, and modules that register
    them, which trials import, are found by `PYTHONPATH`. A sweep that was stopped or killed goes on by
    `rollmill sweep --resume`.

    Args:
        algorithm: name of the algorithm.
        environment: id of the environment.
        over: values to try, by option: a list of them, or with a sampler a range as text, such as
            `"log:1e-5..1e-2"`. Beside hyperparameters and options of a run there are `environment` and
            `env_option.KEY`.
        sampler: `grid` (all combinations), `random`, or a sampler of Optuna: `tpe`, `multivariate-tpe`.
        trials: number of trials of a sampler.
        random: short for `sampler="random"` with so many trials.
        sweep_seed: seed of draws and proposals.
        stop_early: `asha` stops trials whose return at a rung is not among the best.
        reduction_factor: one in so many trials goes on at each rung.
        grace_steps: environment steps of the first rung.
        group_seeds: train all seeds of `over["seed"]`, integers in a row, in one program.
        at_once: most trials at a time; as many as suit the machine if left out.
        gpu_sharing: how trials share a GPU.
        metric: result by which trials are compared; the largest is the best.
        sweep_dir: directory of the sweep; named by algorithm, environment and time under runs/ if left out.
        env_options: options of the environment of all trials.
        imports: modules that register the environment, the network or the algorithm, beside those whose import
            has registered them in this program.
        quiet: print nothing.
        **options: hyperparameters and options of `rollmill train` for all trials: `total_timesteps=100_000`,
            `network={"hidden_sizes": (64, 64)}`, `recipe="cartpole-two-cores"`.

    Raises:
        UsageError: something cannot be used; nothing was started then.
        Interrupted: a KeyboardInterrupt, after Ctrl-C; running trials have stopped with a checkpoint, and the
            exception's `result` is the `Sweep`.
    """
    _check_names(algorithm, environment, gpu_sharing, metric)
    numbers = {
        "trials": trials,
        "random": random,
        "reduction_factor": reduction_factor,
        "grace_steps": grace_steps,
    }
    counts = {name: fit(name, int | None, number) for name, number in numbers.items()}
    at_once = fit("at_once", int | None, at_once)
    if at_once is not None and at_once < 1:
        raise UsageError(f"at_once={at_once} has to be at least 1.")
    over = {name: _listed(name, values) for name, values in _dictionary("over", over).items()}
    modules = modules_of_names(
        fit("imports", tuple[str, ...], imports), _names(algorithm, environment, over, options)
    )
    imported = [word for module in modules for word in ("--import", module)]
    kinds = option_kinds(algorithm, [environment, *imported])
    given = [*imported, *_env_words(_dictionary("env_options", env_options or {})), *_words(options, kinds)]
    request = SweepRequest(
        algorithm=algorithm,
        environment=environment,
        options=tuple(given),
        axes=tuple(_axis(name, values) for name, values in over.items()),
        sampler=sampler,
        seed=fit("sweep_seed", int, sweep_seed),
        metric=metric,
        stop_early=stop_early,
        group_seeds=fit("group_seeds", bool, group_seeds),
        directory=fit("sweep_dir", Path | None, sweep_dir),
        **counts,
    )
    made = create_sweep(request)
    say = (lambda line: None) if quiet else (lambda line: print(line, flush=True))
    say(f"sweep: {made.root}")
    allowed = named_modules_of(made.spec, made.trials())
    code = run_sweep(made, at_once=at_once, sharing=gpu_sharing, metric=metric, say=say, imports=allowed)
    rows = [_with_values(row, request.axes, over) for row in made.rows(metric)]
    return pass_on_interrupt(Sweep(made.root, rows, code))


def _names(
    algorithm: str, environment: str, over: Mapping[str, str | list[Any]], options: Mapping[str, Any]
) -> list[tuple[Kind, str]]:
    """Kinds and names of what the trials make; what is no name is refused later."""
    network = options.get("network")
    environments = [environment, *over.get("environment", [])]
    networks = [
        network.get("name") if isinstance(network, Mapping) else None,
        options.get("network.name"),
        *over.get("network.name", []),
    ]
    named: dict[Kind, list[Any]] = {
        "algorithm": [algorithm],
        "environment": environments,
        "network": networks,
    }
    return [(kind, name) for kind, names in named.items() for name in names if isinstance(name, str)]


def _check_names(algorithm: Any, environment: Any, sharing: Any, metric: Any) -> None:
    """Checks what the parser of the command would refuse before all else."""
    for name, text in (("algorithm", algorithm), ("environment", environment)):
        if not isinstance(text, str):
            raise UsageError(
                f"{name}={text!r:.60} has to be a name, as trials are processes of their own. "
                'hint: rollmill.sweep("ppo", "CartPole-v1", over={"seed": range(5)}).'
            )
    if sharing not in SHARINGS:
        raise unknown_name("gpu_sharing", str(sharing), SHARINGS)
    check_sharing(sharing)
    if metric not in TRIAL_RESULTS:
        raise unknown_name("metric", str(metric), TRIAL_RESULTS)


def _dictionary(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(f'{name}={value!r:.60} has to be a dictionary with names, such as {{"seed": range(5)}}.')
    return value


def _listed(name: str, values: Any) -> str | list[Any]:
    """Values to try as a list, or as text in the command's form.

    Raises:
        UsageError: they are something else.
    """
    if isinstance(values, Mapping | set | frozenset) or not isinstance(values, Iterable):
        raise UsageError(f"over: {name}={values!r:.60} has to be a list of values, or a range as text.")
    return values if isinstance(values, str) else list(values)


def _axis(name: str, values: str | list[Any]) -> Axis:
    if isinstance(values, str):
        return parse_axis(f"{name}={values}")
    option = option_name(name)
    return listed_axis(option, [_axis_text(option, value) for value in values])


def _axis_text(option: str, value: Any) -> str:
    if not option.startswith(OF_ENVIRONMENT):
        return value_text(option, value)
    return _env_text(option.removeprefix(OF_ENVIRONMENT), value)


def value_text(name: str, value: Any) -> str:
    """The words that stand for a value in a command; numbers have all their digits.

    Raises:
        UsageError: no word does.
    """
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if isinstance(value, list | tuple):
        return " ".join(value_text(name, part) for part in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isnan(value):
        return repr(value)
    text = str(value) if isinstance(value, int | str | PathLike | None) else ""
    if not text:
        raise UsageError(f"{name}={value!r:.60} has no form that a command takes.")
    return text


def _words(options: Mapping[str, Any], kinds: OptionKinds) -> list[str]:
    """Words of `rollmill train` for keywords; options in a dictionary have its name before a dot."""
    words = []
    for name, value in options.items():
        option = option_name(name)
        if isinstance(value, Mapping):
            words += _words({f"{name}.{inner}": part for inner, part in value.items()}, kinds)
        elif option in kinds.flags:
            words.append(flag(option, value_text(name, value)))
        elif option in kinds.lists:
            words += [f"--{option}", *value_text(name, value).split()]
        else:
            words += [f"--{option}", value_text(name, value)]
    return words


def _env_words(options: Mapping[str, Any]) -> list[str]:
    return [word for key, value in options.items() for word in ("--env-option", f"{key}={_env_text(key, value)}")]


def _env_text(key: str, value: Any) -> str:
    """An option of the environment as text that the command reads as that value.

    Raises:
        UsageError: there is no such text.
    """
    if isinstance(value, np.generic):
        value = value.item()
    try:
        texts = [value, json.dumps(value)] if isinstance(value, str) else [json.dumps(value)]
    except (TypeError, ValueError) as error:
        raise UsageError(f"env_option.{key}={value!r:.60} has no JSON form.") from error
    for text in texts:
        try:
            read = parse_env_options([f"option={text}"])["option"]
        except UsageError:
            continue
        if read == value or isinstance(value, tuple):
            return text
    raise UsageError(f"env_option.{key}={value!r:.60} has no JSON form.")


def _with_values(row: dict[str, Any], axes: Sequence[Axis], over: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the values and the names that the caller gave."""
    given = {axis.option: (name, axis, over[name]) for axis, name in zip(axes, over, strict=True)}
    renamed = {}
    for column, value in row.items():
        if column not in given:
            renamed[column] = value
            continue
        name, axis, values = given[column]
        renamed[name] = _given_value(axis, values, value)
    return renamed


def _given_value(axis: Axis, values: Any, text: str) -> Any:
    if not axis.values:
        return float(text)
    if isinstance(values, str):
        return int(text) if axis.integers else text
    return values[axis.values.index(text)]
