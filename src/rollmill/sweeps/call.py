"""`rollmill.sweep`: the command `rollmill sweep` as a function."""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.interruption import pass_on_interrupt
from rollmill.core.json_data import is_json
from rollmill.core.machine import GpuSharing
from rollmill.core.plugins import Kind
from rollmill.core.schema import coerce
from rollmill.envs.named_transforms import OPTION, parse_transforms
from rollmill.gpus.machine_parts import check_sharing
from rollmill.gpus.sharing import SHARINGS
from rollmill.runs.custom_names import modules_of_names
from rollmill.sweeps.creation import NewSweep, code_of, create_sweep, refuse_resume_if_exists, typed_axis
from rollmill.sweeps.metrics import check_metric
from rollmill.sweeps.population_based import check_shares
from rollmill.sweeps.running import run_sweep
from rollmill.sweeps.search_space import Axis, listed_axis, option_name, parse_axis
from rollmill.sweeps.shared_programs import Together
from rollmill.training.request import NETWORK, TrainingRequest, coerced_setting, find_own_algorithm, setting_name


class Sweep(NamedTuple):
    """A sweep that has ended or was stopped, as returned by `rollmill.sweep`."""

    directory: Path
    rows: list[dict[str, Any]]
    """The table, with the best trial first: a row for each trial, with its name, values, status and results. If
    seeds vary, the rows of the configuration with the best mean over its seeds come first, and rows contain this
    mean."""
    exit_code: int
    """Exit code: 0 if all trials finished or were stopped early, 1 if one failed, and 128 plus the number of the
    signal if a signal stopped the sweep, such as 143 after SIGTERM."""

    def __fspath__(self) -> str:
        """Returns the directory."""
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
    pbt_every: int | None = None,
    pbt_share: float | None = None,
    group_seeds: bool = False,
    at_once: int | None = None,
    gpu_sharing: GpuSharing = "auto",
    together: Together = "auto",
    metric: str = "final_return",
    sweep_dir: str | Path | None = None,
    env_options: Mapping[str, Any] | None = None,
    imports: Sequence[str] = (),
    quiet: bool = False,
    **options: Any,
) -> Sweep:
    """Trains a run for each combination of option values, several at a time, like the command `rollmill sweep`.

    `rollmill.sweep("ppo", "CartPole-v1", over={"learning_rate": [1e-3, 2.5e-3], "seed": range(5)})`

    Trials are separate processes, so environments and algorithms are passed by name. Trials import the modules
    that register these names, which must be on `PYTHONPATH`. To continue a stopped or killed sweep, use
    `rollmill sweep --resume`.

    Args:
        algorithm: name of the algorithm.
        environment: id of the environment.
        over: values to try for each option: a list, or with a sampler also a range as a string, such as
            `"log:1e-5..1e-2"`. Hyperparameters, options of a run, `environment` and `env_option.KEY` can vary.
        sampler: `grid` (all combinations), `random`, or an Optuna sampler: `tpe` or `multivariate-tpe`.
        trials: number of trials of a sampler.
        random: number of trials, short for `sampler="random"` with `trials`.
        sweep_seed: seed of random and proposed values.
        stop_early: `asha` stops trials whose return at a rung is not among the best.
        reduction_factor: one in this many trials continues at each rung.
        grace_steps: environment steps of the first rung, after which trials are first compared.
        pbt_every: environment steps after which the worst trials copy the best, in population-based training.
        pbt_share: share of the trials that copy others.
        group_seeds: train all seeds of `over["seed"]`, which must be consecutive integers, in one program.
        at_once: maximum number of trials at a time. By default, it depends on the machine.
        gpu_sharing: how trials share a GPU.
        together: with `auto`, trials that differ only in seeds and hyperparameters share a program. With `off`,
            each trial is a separate process.
        metric: result by which trials are compared: `final_return`, `best_return`, `env_steps`,
            `steps_per_second`, `seconds`, or `returns/KIND` for one kind of agent. The largest is the best.
        sweep_dir: directory of the sweep. By default, it is named after algorithm, environment and time, in runs/.
        env_options: options of the environment, for all trials.
        imports: modules that register the environment, the network or the algorithm, in addition to the modules
            that this program has imported.
        quiet: print nothing.
        **options: hyperparameters and options of `rollmill train` for all trials: `total_timesteps=100_000`,
            `network={"hidden_sizes": (64, 64)}`, `recipe="cartpole-two-cores"`.

    Raises:
        UsageError: an argument is invalid. No trial was started.
        Interrupted: Ctrl-C was pressed. Running trials have stopped with a checkpoint, and the exception's
            `result` is the `Sweep`.

    Examples:
        >>> rollmill.sweep("ppo", "CartPole-v1", over={"learning_rate": [1e-3, 2.5e-3], "seed": range(3)})
    """
    _check_names(algorithm, environment, gpu_sharing, metric)
    if options.get("resume_if_exists"):
        refuse_resume_if_exists()
    if together not in get_args(Together):
        raise unknown_name("together", str(together), get_args(Together))
    counts = _counts(
        trials=trials,
        random=random,
        reduction_factor=reduction_factor,
        grace_steps=grace_steps,
        pbt_every=pbt_every,
    )
    at_once = _check_at_once(at_once)
    if pbt_every is not None:
        check_shares(at_once, together)
    over = {name: _list_values(name, values) for name, values in _dictionary("over", over).items()}
    request = _build_request(algorithm, environment, options, over=over, env_options=env_options, imports=imports)
    axes = {name: _axis(algorithm, name, values) for name, values in over.items()}
    made = create_sweep(
        NewSweep(
            request=request,
            axes=tuple(axes.values()),
            sampler=sampler,
            seed=coerce("sweep_seed", int, sweep_seed),
            metric=metric,
            stop_early=stop_early,
            pbt_share=coerce("pbt_share", float | None, pbt_share),
            group_seeds=coerce("group_seeds", bool, group_seeds),
            directory=coerce("sweep_dir", Path | None, sweep_dir),
            **counts,
        )
    )
    say = (lambda line: None) if quiet else (lambda line: print(line, flush=True))
    say(f"sweep: {made.root}")
    allowed = code_of(made).modules
    code = run_sweep(
        made, at_once=at_once, sharing=gpu_sharing, metric=metric, say=say, imports=allowed, together=together
    )
    rows = [_with_names(row, axes, over) for row in made.rows(metric)]
    return pass_on_interrupt(Sweep(made.root, rows, code))


def _counts(**counts: Any) -> dict[str, int | None]:
    return {name: coerce(name, int | None, count) for name, count in counts.items()}


def _check_at_once(at_once: int | None) -> int | None:
    at_once = coerce("at_once", int | None, at_once)
    if at_once is not None and at_once < 1:
        raise UsageError(f"at_once={at_once} must be at least 1.")
    return at_once


def _build_request(
    algorithm: str,
    environment: str,
    options: Mapping[str, Any],
    *,
    over: Mapping[str, Any],
    env_options: Mapping[str, Any] | None,
    imports: Sequence[str],
) -> TrainingRequest:
    """Returns the training request that all trials share, whose algorithm has been found."""
    settings = _settings(options)
    named = coerce("imports", tuple[str, ...], imports)
    request = TrainingRequest(
        algorithm=algorithm,
        environment=environment,
        settings={name: value for name, value in settings.items() if name not in NO_SETTINGS},
        environment_options=_environment_options(env_options, options.get("transform")),
        imports=modules_of_names(named, _names(algorithm, environment, over, settings)),
        recipe=coerce("recipe", str | None, options.get("recipe")),
    )
    find_own_algorithm(algorithm, request.options, request.imports, environment=environment)
    return request


NO_SETTINGS = ("recipe", "transform")
"""Options of `rollmill train` that are not settings in a training request."""


def _names(
    algorithm: str, environment: str, over: Mapping[str, str | list[Any]], settings: Mapping[str, Any]
) -> list[tuple[Kind, str]]:
    """Returns the kinds and names of all parts that trials create. Invalid names are rejected later."""
    named: dict[Kind, list[Any]] = {
        "algorithm": [algorithm],
        "environment": [environment, *over.get("environment", [])],
        "network": [settings.get(NETWORK), *over.get("network.name", []), *over.get("network", [])],
    }
    return [(kind, name) for kind, names in named.items() for name in names if isinstance(name, str)]


def _check_names(algorithm: Any, environment: Any, sharing: Any, metric: Any) -> None:
    """Checks the arguments that the parser of the command would reject."""
    for name, text in (("algorithm", algorithm), ("environment", environment)):
        if not isinstance(text, str):
            raise UsageError(
                f"{name}={text!r:.60} must be a name, because trials are separate processes. hint: use "
                'rollmill.sweep("ppo", "CartPole-v1", over={"seed": range(5)}), for example.'
            )
    if sharing not in SHARINGS:
        raise unknown_name("gpu_sharing", str(sharing), SHARINGS)
    check_sharing(sharing)
    check_metric(metric)


def _dictionary(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(
            f'{name}={value!r:.60} must be a dictionary with strings as keys, such as {{"seed": range(5)}}.'
        )
    return value


def _list_values(name: str, values: Any) -> str | list[Any]:
    """Values to try as a list, or as a string in the command's form."""
    if isinstance(values, Mapping | set | frozenset) or not isinstance(values, Iterable):
        raise UsageError(f"over: {name}={values!r:.60} must be a list of values, or a range as a string.")
    return values if isinstance(values, str) else list(values)


def _axis(algorithm: str, name: str, values: str | list[Any]) -> Axis:
    if isinstance(values, str):
        return typed_axis(algorithm, parse_axis(f"{name}={values}"))
    option = option_name(name)
    return listed_axis(option, [coerced_setting(algorithm, option, json_value(name, value)) for value in values])


def _settings(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns settings by name. The names of nested settings begin with the dictionary's name and a dot."""
    settings: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            settings |= _settings(value, prefix=f"{prefix}{name}.")
        else:
            settings[setting_name(prefix + name)] = json_value(name, value)
    return settings


def _environment_options(options: Any, transforms: Any) -> dict[str, Any]:
    given = _dictionary("env_options", options or {})
    chosen = {key: json_value(f"env_option.{key}", value) for key, value in given.items()}
    if transforms is None:
        return chosen
    listed = [transforms] if isinstance(transforms, str) else list(transforms)
    return {**chosen, OPTION: [str(parsed) for parsed in parse_transforms(listed)]}


def json_value(name: str, value: Any) -> Any:
    """Converts a value to JSON: NumPy scalars to Python scalars, tuples to lists, and paths to strings.

    Raises a `UsageError` if it cannot be represented.
    """
    plain = _plain(value)
    infinite = isinstance(plain, float) and plain in (float("inf"), -float("inf"))
    if not (infinite or is_json(plain)):
        raise UsageError(f"{name}={value!r:.60} cannot be represented in JSON.")
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return str(value) if isinstance(value, PathLike) else value


def _with_names(row: dict[str, Any], axes: Mapping[str, Axis], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row with the names and the values that the caller gave."""
    names = {axis.option: name for name, axis in axes.items()}
    return {
        names.get(column, column): _find_given(axes[names[column]], over[names[column]], value)
        if column in names
        else value
        for column, value in row.items()
    }


def _find_given(axis: Axis, values: Any, value: Any) -> Any:
    """Returns the caller's element for a value of an axis, or the value itself if it is not an element."""
    if isinstance(values, str) or value not in axis.choices:
        return value
    return values[axis.choices.index(value)]
