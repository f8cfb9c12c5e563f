"""Checks what a sweep is to try, and creates its directory: for the command and for `rollmill.sweep`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollmill.api import SweepDirectory, SweepSpec, Trial, find_algorithm, remember
from rollmill.cli.config_file import with_config_file, words_of_file
from rollmill.cli.named_code import named_by
from rollmill.cli.parsing import given_options, values_of
from rollmill.cli.train import check_arguments, option_kinds, types_of_options
from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.own_line import failed_import
from rollmill.core.plugins import plugins_named
from rollmill.envs import check_name
from rollmill.networks import find_network
from rollmill.planning import (
    SAMPLERS,
    Axis,
    HalvingRule,
    check_sampler,
    combinations,
    default_grace_steps,
    find_distribution,
    points,
)
from rollmill.record import RunDirectory

ALL_SAMPLERS = ("grid", "random", *SAMPLERS)
EARLY_STOPPING = ("asha",)
SAMPLE_CHECKS = 8
"""Random combinations that are checked before a sampler proposes any."""
DEFAULT_FACTOR = 3


@dataclass(frozen=True)
class SweepRequest:
    """Options of a new sweep, as the user gave them."""

    algorithm: str
    environment: str
    options: tuple[str, ...]
    """Words of `rollmill train` for all trials."""
    axes: tuple[Axis, ...]
    random: int | None = None
    trials: int | None = None
    sampler: str | None = None
    seed: int = 0
    metric: str = "final_return"
    stop_early: str | None = None
    reduction_factor: int | None = None
    grace_steps: int | None = None
    group_seeds: bool = False
    directory: Path | None = None


def create_sweep(asked: SweepRequest) -> SweepDirectory:
    """Creates the directory of a sweep whose trials have all been checked.

    Raises:
        UsageError: something cannot be used; nothing was written then.
    """
    _check_request(asked)
    if asked.group_seeds:
        asked = replace(asked, axes=_with_grouped_seeds(asked))
    if not values_of("--import", asked.options):
        find_algorithm(asked.algorithm)
    sampler, count = _sampler_and_count(asked)
    chosen = [] if sampler else points(asked.axes, draws=count, seed=asked.seed)
    kinds = option_kinds(asked.algorithm, [asked.environment, *asked.options])
    spec = SweepSpec(
        algorithm=asked.algorithm,
        environment=asked.environment,
        options=asked.options,
        axes=asked.axes,
        num_trials=count if sampler and count else len(chosen),
        points=tuple(tuple(point.values()) for point in chosen),
        sampler=sampler,
        seed=asked.seed,
        metric=asked.metric,
        flags=tuple(axis.option for axis in asked.axes if axis.option in kinds.flags),
        lists=tuple(axis.option for axis in asked.axes if axis.option in kinds.lists),
    )
    to_check = _trials_to_check(spec)
    parsed = [_checked(trial) for trial in to_check]
    _check_seeds(to_check, [each.run.seeds for each in parsed])
    _check_parts(to_check)
    spec = _with_early_stopping(spec, asked, parsed)
    sweep = SweepDirectory.create(asked.directory or _default_directory(asked), spec)
    named = {name for words in all_words(spec, sweep.trials()) for name in named_by(words).others}
    remember(RunDirectory(sweep.root), sorted(named | named_modules_of(spec, sweep.trials())))
    return sweep


def all_words(spec: SweepSpec, trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """The words of all trials, those included that a sampler has not proposed yet."""
    each = [{axis.option: value} for axis in spec.axes for value in axis.values]
    return [*(trial.words for trial in trials), *map(spec.words, each)]


def named_modules_of(spec: SweepSpec, trials: Sequence[Trial]) -> set[str]:
    """Modules that trials import, those that files of `--config` name included.

    Raises:
        UsageError: a file cannot be read.
    """
    words = all_words(spec, trials)
    files = {file for each in words for file in named_by(each).files}
    return {module for each in [*words, *map(words_of_file, sorted(files))] for module in named_by(each).modules}


def _check_request(asked: SweepRequest) -> None:
    if not asked.axes:
        raise UsageError("A sweep needs values to try: --over learning-rate=1e-4,1e-3 or --over seed=0..4.")
    for name, number in (("--random", asked.random), ("--trials", asked.trials)):
        if number is not None and number < 1:
            raise UsageError(f"{name} {number} has to be at least 1.")
    given = given_options(asked.options)
    if twice := next((axis.option for axis in asked.axes if axis.option in given), None):
        raise UsageError(
            f"--{twice} is given for all trials, and varied by --over {twice}; leave out one of them."
        )
    if values_of("--run-dir", asked.options):
        raise UsageError("--run-dir: each trial has a run of its own; the sweep's directory is --sweep-dir.")
    if asked.stop_early is None and (asked.reduction_factor, asked.grace_steps) != (None, None):
        raise UsageError("--reduction-factor and --grace-steps are of --stop-early asha, which is not given.")
    if asked.stop_early not in (None, *EARLY_STOPPING):
        raise unknown_name("way to stop early", str(asked.stop_early), EARLY_STOPPING)


def _with_grouped_seeds(asked: SweepRequest) -> tuple[Axis, ...]:
    """The axes, with all seeds as one value, `FIRST..LAST`.

    Raises:
        UsageError: there are no seeds in a row, or one program cannot train them.
    """
    if values_of("--num-seeds", asked.options):
        raise UsageError("--group-seeds says how many seeds a run trains; leave out --num-seeds.")
    if (fusion := values_of("--fusion", asked.options)) and fusion[-1] in ("rollout", "full"):
        raise UsageError(
            f"--group-seeds trains several seeds in one program, and kernels of --fusion {fusion[-1]} one."
        )
    grouped = {axis: axis.integers for axis in asked.axes if axis.option == "seed"}
    if not grouped or None in grouped.values():
        raise UsageError("--group-seeds needs seeds in a row: --over seed=0..4.")
    return tuple(
        Axis("seed", (f"{found[0]}..{found[1]}",)) if (found := grouped.get(axis)) else axis for axis in asked.axes
    )


def _sampler_and_count(asked: SweepRequest) -> tuple[str | None, int | None]:
    """The sampler of Optuna, if there is one, and the number of draws or proposals; None for a grid.

    Raises:
        UsageError: the options contradict each other, or the sampler cannot be used.
    """
    sampler = asked.sampler or ("grid" if asked.random is None else "random")
    if sampler not in ALL_SAMPLERS:
        raise unknown_name("sampler", sampler, ALL_SAMPLERS)
    if asked.random is not None and (sampler != "random" or asked.trials is not None):
        raise UsageError("--random N stands for --sampler random --trials N; leave out one of them.")
    if sampler == "grid":
        if asked.trials is not None:
            raise UsageError("--trials is for samplers, such as --sampler random; a grid has as many as it has.")
        return None, None
    count = asked.random or asked.trials
    if count is None:
        raise UsageError(f"--sampler {sampler} needs the number of trials: --trials N.")
    if sampler == "random":
        _check_count(asked, count)
        return None, count
    check_sampler(sampler)
    if combinations(asked.axes) is not None:
        points(asked.axes)  # refuses more than can be listed, because they are where proposals repeat
    _check_count(asked, count)
    return sampler, count


def _check_count(asked: SweepRequest, count: int) -> None:
    if (most := combinations(asked.axes)) is not None and count > most:
        name = "--trials" if asked.random is None else "--random"
        raise UsageError(f"{name} {count}: these axes have {most} combinations only.")


def _trials_to_check(spec: SweepSpec) -> list[Trial]:
    """All trials; of those that a sampler will propose some combinations, with every value that is listed."""
    if spec.sampler is None:
        return spec.trials(spec.points)
    drawn = points(spec.axes, draws=SAMPLE_CHECKS, seed=spec.seed)
    ends = {axis.option: axis.values or (repr(axis.low), repr(axis.high)) for axis in spec.axes}
    corners = [drawn[0] | {option: value} for option, values in ends.items() for value in values]
    return [Trial("example", point, spec.words(point)) for point in [*corners, *drawn]]


def _checked(trial: Trial) -> Any:
    return check_arguments(trial.words[0], list(trial.words[1:]), who=f"trial {trial}")


def _check_seeds(trials: Sequence[Trial], seeds: Sequence[Sequence[int]]) -> None:
    """Checks that trials that differ in their seeds alone train each seed once: their mean is one over seeds.

    Args:
        trials: the trials.
        seeds: that each of them trains.

    Raises:
        UsageError: names two trials and the seed that both train.
    """
    owners: dict[tuple[Any, int], Trial] = {}
    for trial, trained in zip(trials, seeds, strict=True):
        others = tuple(sorted((name, value) for name, value in trial.point.items() if name != "seed"))
        for seed in trained:
            owner = owners.setdefault((others, seed), trial)
            if owner.point.get("seed") != trial.point.get("seed"):
                raise UsageError(
                    f"trials {owner} and {trial} would both train seed {seed}, which would count twice: "
                    f"num_seeds={len(trained)} trains as many seeds from each one on. hint: leave out num_seeds, "
                    "or train all seeds in one program by --over seed=FIRST..LAST --group-seeds."
                )


def _check_parts(trials: Sequence[Trial]) -> None:
    """Checks the environments, networks, distribution policies and modules that trials name, each once.

    Packages of the user's modules are found but not imported: what they compute would take memory of a device.

    Raises:
        UsageError: one is unknown.
    """
    checked: set[tuple[Callable[[str], object], str]] = set()
    for trial in trials:
        for check, name in _named_parts(with_config_file(list(trial.words), types_of_options)):
            if (check, name) not in checked:
                checked.add((check, name))
                try:
                    check(name)
                except UsageError as error:
                    raise UsageError(f"trial {trial}: {error}") from error


def _named_parts(words: Sequence[str]) -> Iterator[tuple[Callable[[str], object], str]]:
    """The parts that the words of a training name, each with what checks it."""
    _, environment, *options = words
    for module in sorted(named_by(words).modules):
        yield _check_module, module
    for policy in values_of("--distribution", options):
        if ":" not in policy:
            yield find_distribution, policy
    if values_of("--import", options):  # which may register the others
        return
    if not plugins_named("environment", environment):
        yield check_name, environment
    for network in values_of("--network", options):
        if not plugins_named("network", network):
            yield find_network, network


def _check_module(name: str) -> None:
    """Raises a UsageError if Python does not find the package of a module."""
    package = name.partition(".")[0]
    try:
        if package not in sys.modules and find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    except (ImportError, ValueError) as error:
        raise UsageError(failed_import(name, error)) from error


def _with_early_stopping(spec: SweepSpec, asked: SweepRequest, parsed: Sequence[Any]) -> SweepSpec:
    """The description of a sweep with its rule of early stopping, if one was asked for.

    Raises:
        UsageError: no trial is as long as its first rung.
    """
    if asked.stop_early is None:
        return spec
    factor = DEFAULT_FACTOR if asked.reduction_factor is None else asked.reduction_factor
    if factor < 2:
        raise UsageError(f"--reduction-factor {factor} has to be at least 2.")
    if asked.grace_steps is not None and asked.grace_steps < 1:
        raise UsageError(f"--grace-steps {asked.grace_steps} has to be at least 1.")
    lengths = [getattr(each.hyperparameters, "total_timesteps", None) for each in parsed]
    known = [length for length in lengths if isinstance(length, int)]
    if not known and asked.grace_steps is None:
        raise UsageError(f"{spec.algorithm} has no total_timesteps, so --stop-early needs --grace-steps.")
    grace = asked.grace_steps or default_grace_steps(min(known), factor)
    if known and grace >= max(known):
        raise UsageError(f"--grace-steps {grace} has to be less than the {max(known):,} steps of a trial.")
    return replace(spec, early_stopping=HalvingRule(grace, factor))


def _default_directory(asked: SweepRequest) -> Path:
    name = f"sweep-{asked.algorithm}-{asked.environment}-{datetime.now():%Y%m%d-%H%M%S}"
    return Path("runs") / name.replace(":", "-").replace("/", "-")
