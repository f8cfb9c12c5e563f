"""Checks a requested sweep and creates its directory, for the command line and for `rollmill.sweep`."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from rollmill.algorithms.hyperparameters import numbers_of
from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.imports import files_of_modules
from rollmill.core.options import Arg
from rollmill.core.plugins import Kind, Plugin, plugins_named
from rollmill.core.shell import command
from rollmill.core.user_frame import failed_import
from rollmill.envs import check_name
from rollmill.networks import find_network
from rollmill.planning.distribution import find_distribution
from rollmill.record.run_directory import RunDirectory
from rollmill.record.status import RETURNS
from rollmill.runs.trust import remember
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.halving import HalvingRule, default_grace_steps
from rollmill.sweeps.metrics import MAY_DIFFER, check_kind, check_metric, is_of_kind
from rollmill.sweeps.proposals import SAMPLERS, check_sampler
from rollmill.sweeps.search_space import Axis, combinations, listed_axis, points
from rollmill.sweeps.shared_programs import check_one_program, made_environment
from rollmill.sweeps.spec import SweepSpec, Trial
from rollmill.training.evolution import DEFAULT_SHARE, EvolutionRule
from rollmill.training.request import (
    ENV_OPTION_PREFIX,
    NETWORK,
    NamedCode,
    ResolvedRequest,
    TrainingRequest,
    coerced_setting,
    named_by,
    seeds_of,
    setting_from_text,
    setting_name,
    takes_several,
    with_types,
)

DISPLAY = ("quiet", "dashboard")
"""Options of a run that say how its progress is shown. Trials that differ only in these are equal."""

ALL_SAMPLERS = ("grid", "random", *SAMPLERS)
EARLY_STOPPING = ("asha",)
SAMPLE_CHECKS = 8
"""Number of random combinations that are checked before a sampler proposes values."""
DEFAULT_FACTOR = 3


_SAMPLER = (
    "How values are chosen. grid, the default, uses all combinations, random draws them, and "
    f"{' and '.join(SAMPLERS)} let Optuna propose them, based on the results so far."
)
_FACTOR = f"One trial in this many continues at each rung. Default: {DEFAULT_FACTOR}."
_SHARE = f"Fraction of the trials that copy better trials at each rung. Default: {DEFAULT_SHARE}."


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of a new sweep: how its trials are chosen, stopped and compared."""

    sampler: Annotated[str | None, Arg(metavar="NAME", help=_SAMPLER)] = None
    trials: int | None = None
    """Number of trials of a sampler."""
    random: int | None = None
    """Short for --sampler random, with this number of trials."""
    seed: Annotated[int, Arg(name="sweep-seed")] = 0
    """Seed of draws and proposals."""
    stop_early: Annotated[str | None, Arg(metavar="asha")] = None
    """Stop trials whose return at a rung is not among the best, by asynchronous successive halving."""
    reduction_factor: Annotated[int | None, Arg(help=_FACTOR)] = None
    grace_steps: int | None = None
    """Environment steps of the first rung. By default, it is chosen so that there are three rungs."""
    pbt_every: Annotated[int | None, Arg(metavar="STEPS")] = None
    """Population-based training: after every STEPS environment steps, the worst trials copy the weights and
    hyperparameters of the best. Copied numbers are multiplied by 0.8 or 1.2, within their bounds."""
    pbt_share: Annotated[float | None, Arg(metavar="SHARE", help=_SHARE)] = None
    group_seeds: Annotated[bool, Arg(only_on=True)] = False
    """Train all seeds of --over seed=FIRST..LAST in one program, as --num-seeds does."""
    metric: Annotated[str, Arg(metavar="NAME")] = "final_return"
    """Result by which trials are compared: final_return, best_return, env_steps, steps_per_second, seconds, or
    returns/KIND for one of several kinds of agents. If seeds vary, their mean is compared."""
    directory: Annotated[Path | None, Arg(name="sweep-dir")] = None
    """Directory of the sweep. Default: a folder in runs/, named after algorithm, environment and time."""


@dataclass(frozen=True)
class NewSweep(SweepOptions):
    """A request for a new sweep."""

    request: TrainingRequest
    """The settings that all trials have in common."""
    axes: tuple[Axis, ...]


def create_sweep(asked: NewSweep) -> SweepDirectory:
    """Checks all trials of a requested sweep, and creates the directory of the sweep.

    Raises a `UsageError`, without writing anything, if the request is invalid.
    """
    _check_request(asked)
    if asked.pbt_every is not None:
        asked = replace(asked, request=_with_return_of(asked.request, asked.metric))
    if asked.group_seeds:
        asked = replace(asked, axes=_with_grouped_seeds(asked))
    sampler, count = _sampler_and_count(asked)
    chosen = [] if sampler else points(asked.axes, draws=count, seed=asked.seed)
    spec = SweepSpec(
        request=asked.request,
        axes=asked.axes,
        num_trials=count if sampler and count else len(chosen),
        points=tuple(tuple(point.values()) for point in chosen),
        sampler=sampler,
        seed=asked.seed,
        metric=asked.metric,
    )
    to_check = _trials_to_check(spec)
    checked = [_check_trial(trial) for trial in to_check]
    _check_seeds(to_check, [each.options.seeds for each in checked])
    _check_parts(to_check)
    _check_kinds(asked, checked[0])
    spec = _with_evolution(_with_early_stopping(spec, asked, checked), asked, to_check, checked)
    spec = replace(spec, import_files=files_of_modules(_code_in(spec, to_check).modules))
    sweep = _create_directory(asked, spec)
    remember(RunDirectory(sweep.root), sorted({name for names in code_of(sweep) for name in names}))
    return sweep


def _with_return_of(request: TrainingRequest, metric: str) -> TrainingRequest:
    """Returns the request for population-based training, which compares trials by the return of the kind of agents
    in `metric`, if it names one. Raises a `UsageError` if the trials would be compared by another return.
    """
    kind = metric.removeprefix(RETURNS) if is_of_kind(metric) else None
    given = request.settings.get("return_of")
    if given is not None and given != kind:
        raise UsageError(
            f"--pbt-every compares trials by --return-of {given}, but --metric {metric} ranks them by another "
            f"return. hint: use --metric {RETURNS}{given}, or leave --return-of out."
        )
    return request if kind is None else request.changed({"return_of": kind})


def refuse_resume_if_exists() -> None:
    """Raises a `UsageError` that says how a sweep is continued."""
    raise UsageError(
        "--resume-if-exists applies to a single run, not to a sweep. hint: give the sweep a directory with "
        "--sweep-dir SWEEP, and continue it with rollmill sweep --resume SWEEP."
    )


def code_of(sweep: SweepDirectory) -> NamedCode:
    """Collects the modules, clusters and stores that the trials of a sweep name, including trials that a sampler
    has not proposed yet.
    """
    return _code_in(sweep.spec, sweep.trials())


def _code_in(spec: SweepSpec, trials: Sequence[Trial]) -> NamedCode:
    alone = [spec.request_at({axis.option: value}) for axis in spec.axes for value in axis.choices]
    return named_by([*(trial.request for trial in trials), *alone])


def resume_command(sweep: SweepDirectory, *words: str) -> str:
    """Returns the shell command that resumes a sweep, with further arguments and its `--import` options."""
    return command("sweep", "--resume", sweep.root, *words, imports=sorted(code_of(sweep).modules))


def typed_axis(algorithm: str, axis: Axis) -> Axis:
    """Parses the strings of an axis as values of its option.

    Raises a `UsageError` if the option does not exist or a value does not fit.
    """
    if not axis.values:
        return axis
    return listed_axis(axis.option, [_coerce_value(algorithm, axis.option, value) for value in axis.values])


def _coerce_value(algorithm: str, option: str, value: str | int) -> Any:
    """Returns a value with its option's type. Elements of a list are separated by spaces."""
    if option == "seed" and seeds_of(value) is not None:
        return value
    if not isinstance(value, str):
        return coerced_setting(algorithm, option, value)
    texts = value.split() if takes_several(algorithm, option) else [value]
    try:
        return setting_from_text(algorithm, option, texts)
    except UsageError as error:
        if (ends := re.fullmatch(r"(-?\d+)[-:](-?\d+)", value)) is None:
            raise
        meant = f"{option}={ends[1]}..{ends[2]}"
        raise UsageError(f"{error} hint: --over {meant} for the integers from {ends[1]} to {ends[2]}.") from error


def _check_request(asked: NewSweep) -> None:
    if not asked.axes:
        raise UsageError(
            "a sweep needs values to try. hint: add --over learning-rate=1e-4,1e-3 or --over seed=0..4, for "
            "example."
        )
    for name, number in (("--random", asked.random), ("--trials", asked.trials)):
        if number is not None and number < 1:
            raise UsageError(f"{name} {number} must be at least 1.")
    _check_settings(asked.request, asked.axes)
    if is_of_kind(check_metric(asked.metric)) and asked.group_seeds:
        raise UsageError(
            f"--metric {asked.metric} is not supported with --group-seeds, which has one mean over the seeds of a "
            "program. hint: leave one of them out."
        )
    if asked.stop_early is None and (asked.reduction_factor, asked.grace_steps) != (None, None):
        raise UsageError(
            "--reduction-factor and --grace-steps have no effect without --stop-early asha. hint: add it, or "
            "leave them out."
        )
    if asked.stop_early not in (None, *EARLY_STOPPING):
        raise unknown_name("way to stop early", str(asked.stop_early), EARLY_STOPPING)


def _check_settings(request: TrainingRequest, axes: Sequence[Axis]) -> None:
    """Checks what all trials have in common."""
    if twice := next((axis.option for axis in axes if _is_given(request, axis.option)), None):
        raise UsageError(
            f"--{twice} is given for all trials and also varied by --over {twice}. hint: leave one of them out."
        )
    varied = {setting_name(axis.option) for axis in axes}
    if "resume_if_exists" in varied:
        refuse_resume_if_exists()
    if "run_dir" in {*request.settings, *varied}:
        raise UsageError(
            "--run-dir has no effect, because each trial has a run of its own. hint: use --sweep-dir for the "
            "directory of the sweep."
        )
    if shown := next((axis.option for axis in axes if setting_name(axis.option) in DISPLAY), None):
        raise UsageError(
            f"--over {shown} has no effect, because it only changes what a run displays. hint: vary an "
            "option that changes the training, such as learning-rate or seed."
        )


def _is_given(request: TrainingRequest, option: str) -> bool:
    """Returns whether all trials have a value of an option that is to be varied."""
    if option.startswith(ENV_OPTION_PREFIX):
        return option.removeprefix(ENV_OPTION_PREFIX) in request.environment_options
    return setting_name(option) in request.settings


def _with_grouped_seeds(asked: NewSweep) -> tuple[Axis, ...]:
    """Returns the axes, with all seeds as one value, `FIRST..LAST`."""
    given = asked.request.settings
    if "num_seeds" in given:
        raise UsageError(
            "--group-seeds already determines the number of seeds per run. hint: leave --num-seeds out."
        )
    if (fusion := given.get("fusion")) in ("rollout", "full"):
        raise UsageError(
            f"--group-seeds trains several seeds in one program, but kernels with --fusion {fusion} support only "
            "one seed."
        )
    grouped = [axis.integers for axis in asked.axes if axis.option == "seed"]
    if not grouped or grouped[0] is None:
        raise UsageError("--group-seeds needs consecutive seeds, such as --over seed=0..4.")
    first, last = grouped[0]
    return tuple(Axis("seed", (f"{first}..{last}",)) if axis.option == "seed" else axis for axis in asked.axes)


def _sampler_and_count(asked: NewSweep) -> tuple[str | None, int | None]:
    """Returns the sampler of Optuna, if there is one, and the number of draws or proposals. None for a grid."""
    sampler = asked.sampler or ("grid" if asked.random is None else "random")
    if sampler not in ALL_SAMPLERS:
        raise unknown_name("sampler", sampler, ALL_SAMPLERS)
    if asked.random is not None and (sampler != "random" or asked.trials is not None):
        raise UsageError("--random N is short for --sampler random --trials N. hint: leave one of them out.")
    if sampler == "grid":
        if asked.trials is not None:
            raise UsageError(
                "--trials needs a sampler, such as --sampler random. The number of trials of a grid follows from "
                "its values."
            )
        return None, None
    count = asked.random or asked.trials
    if count is None:
        raise UsageError(f"--sampler {sampler} needs the number of trials. hint: add --trials N.")
    if sampler == "random":
        _check_count(asked, count)
        return None, count
    check_sampler(sampler)
    if combinations(asked.axes) is not None:
        # raises an error if there are too many combinations to list, which is necessary once proposals repeat
        points(asked.axes)
    _check_count(asked, count)
    return sampler, count


def _check_count(asked: NewSweep, count: int) -> None:
    if (most := combinations(asked.axes)) is not None and count > most:
        name = "--trials" if asked.random is None else "--random"
        raise UsageError(f"{name} {count} is more than the {most} combinations of these axes.")


def _trials_to_check(spec: SweepSpec) -> list[Trial]:
    """Returns all trials, or of those that a sampler proposes some that have every listed value."""
    if spec.sampler is None:
        return spec.trials(spec.points)
    drawn = points(spec.axes, draws=SAMPLE_CHECKS, seed=spec.seed)
    ends = {axis.option: axis.choices or (axis.low, axis.high) for axis in spec.axes}
    corners = [drawn[0] | {option: value} for option, values in ends.items() for value in values]
    return [Trial("example", point, spec.request_at(point)) for point in [*corners, *drawn]]


def _check_trial(trial: Trial) -> ResolvedRequest:
    """Returns the trial with its settings as their types."""
    try:
        found = with_types(trial.request)
        if found.options.memory_fraction is not None:
            raise UsageError(
                "--memory-fraction has no effect, because the trials divide the GPU memory among them. hint: "
                "leave it out."
            )
        return found
    except UsageError as error:
        raise UsageError(f"trial {trial}: {error}") from error


def _check_seeds(trials: Sequence[Trial], seeds: Sequence[Sequence[int]]) -> None:
    """Checks that trials with equal options have distinct seeds, so that their mean is over seeds."""
    owners: dict[tuple[Any, int], Trial] = {}
    for trial, trained in zip(trials, seeds, strict=True):
        others = tuple(sorted((name, value) for name, value in trial.point.items() if name != "seed"))
        for seed in trained:
            owner = owners.setdefault((others, seed), trial)
            if owner.point.get("seed") != trial.point.get("seed"):
                raise UsageError(
                    f"trials {owner} and {trial} would both train seed {seed}, which would count twice: "
                    f"num_seeds={len(trained)} trains that many consecutive seeds in each trial. hint: leave "
                    "num_seeds out, or train all seeds in one program by --over seed=FIRST..LAST --group-seeds."
                )


def _check_parts(trials: Sequence[Trial]) -> None:
    """Checks the environments, networks, distribution policies and modules that trials name, each once.

    Packages of the user's modules are found but not imported: what they compute would take memory of a device.
    """
    checked: set[tuple[Callable[[str], object], str]] = set()
    offered = cache(plugins_named)  # reading the metadata of all installed packages takes time
    for trial in trials:
        for check, name in _find_named_parts(trial.request, offered):
            if (check, name) not in checked:
                checked.add((check, name))
                try:
                    check(name)
                except UsageError as error:
                    raise UsageError(f"trial {trial}: {error}") from error


def _check_kinds(asked: NewSweep, trial: ResolvedRequest) -> None:
    """Raises a `UsageError` if the trials lack the kind of agents in the metric, as far as one trial shows it.

    Trials with different environments or algorithms may have different kinds, and are not checked.
    """
    if not is_of_kind(asked.metric) or MAY_DIFFER & {axis.option for axis in asked.axes}:
        return
    if (env := made_environment(trial.request.environment, trial.environment_options)) is not None:
        check_kind(asked.metric, [kind.name for kind in env.agents])


def _find_named_parts(
    request: TrainingRequest, offered: Callable[[Kind, str], Sequence[Plugin]]
) -> Iterator[tuple[Callable[[str], object], str]]:
    """Yields the named parts of a run, each with its check. `offered` returns the plug-ins of a name."""
    for module in sorted(named_by([request]).modules):
        yield _check_module, module
    settings = request.settings
    if ":" not in (policy := settings.get("distribution", ":")):
        yield find_distribution, policy
    if request.imports:  # these modules may register other names
        return
    if not offered("environment", request.environment):
        yield check_name, request.environment
    network = settings.get(NETWORK)
    if network is not None and not offered("network", network):
        yield find_network, network


def _check_module(name: str) -> None:
    """Raises a UsageError if Python does not find the package of a module."""
    package = name.partition(".")[0]
    try:
        if package not in sys.modules and find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    except (ImportError, ValueError) as error:
        raise UsageError(failed_import(name, error)) from error


def _with_early_stopping(spec: SweepSpec, asked: NewSweep, checked: Sequence[ResolvedRequest]) -> SweepSpec:
    """Returns a sweep's specification with the requested rule of early stopping."""
    if asked.stop_early is None:
        return spec
    factor = DEFAULT_FACTOR if asked.reduction_factor is None else asked.reduction_factor
    if factor < 2:
        raise UsageError(f"--reduction-factor {factor} must be at least 2.")
    if asked.grace_steps is not None and asked.grace_steps < 1:
        raise UsageError(f"--grace-steps {asked.grace_steps} must be at least 1.")
    lengths = [getattr(each.config, "total_timesteps", None) for each in checked]
    known = [length for length in lengths if isinstance(length, int)]
    if not known and asked.grace_steps is None:
        raise UsageError(f"{spec.request.algorithm} has no total_timesteps, so --stop-early needs --grace-steps.")
    grace = asked.grace_steps or default_grace_steps(min(known), factor)
    if known and grace >= max(known):
        raise UsageError(f"--grace-steps {grace} must be less than the {max(known):,} steps of a trial.")
    return replace(spec, early_stopping=HalvingRule(grace, factor))


def _with_evolution(
    spec: SweepSpec, asked: NewSweep, trials: Sequence[Trial], checked: Sequence[ResolvedRequest]
) -> SweepSpec:
    """Returns a sweep's specification with the requested rule of population-based training."""
    if asked.pbt_every is None:
        if asked.pbt_share is not None:
            raise UsageError(
                "--pbt-share has no effect without --pbt-every STEPS. hint: add it, or leave --pbt-share out."
            )
        return spec
    _check_population(spec, asked, trials)
    configs = [each.config for each in checked]
    names = {setting_name(axis.option): axis for axis in spec.axes}
    held = {name: axis for name, axis in names.items() if name in numbers_of(configs[0])}
    values = {name: [getattr(config, name) for config in configs] for name in held}
    numbers = {name: each for name, each in values.items() if all(isinstance(value, float) for value in each)}
    if not numbers:
        raise UsageError(
            "--pbt-every needs a numeric hyperparameter that varies. hint: add one, such as --over "
            "learning-rate=log:1e-4..1e-2."
        )
    bounds = {name: (held[name].low, held[name].high) for name in numbers if not held[name].values}
    bounds = {name: (min(each), max(each)) for name, each in numbers.items()} | bounds
    share = DEFAULT_SHARE if asked.pbt_share is None else asked.pbt_share
    rule = EvolutionRule(asked.pbt_every, share, asked.seed, tuple(held), bounds)
    if rule.taking_over(len(trials)) < 1:
        raise UsageError(
            f"--pbt-share {share} of {len(trials)} trials is less than one trial. hint: use more trials."
        )
    length = min((each.total_timesteps for each in checked), default=0)
    if rule.every_steps >= length:
        raise UsageError(f"--pbt-every {rule.every_steps} must be less than the {length:,} steps of a trial.")
    for config in configs:
        batch_size = getattr(config, "num_envs", 0) * getattr(config, "num_steps", 0)
        if batch_size:  # other algorithms may divide their steps differently, which only their graphs determine
            rule.rung_iterations(batch_size, config.total_timesteps // batch_size)
    return replace(spec, evolution=rule)


def _check_population(spec: SweepSpec, asked: NewSweep, trials: Sequence[Trial]) -> None:
    """Raises a `UsageError` if the trials cannot form a population."""
    if asked.pbt_every is not None and asked.pbt_every < 1:
        raise UsageError(f"--pbt-every {asked.pbt_every} must be at least 1.")
    if asked.pbt_share is not None and not 0 < asked.pbt_share <= 0.5:
        raise UsageError(f"--pbt-share {asked.pbt_share} must be greater than 0 and at most 0.5.")
    if spec.sampler is not None:
        raise UsageError(
            f"--pbt-every needs all trials at the start, but --sampler {spec.sampler} proposes them one by one. "
            "hint: use --random N."
        )
    if asked.stop_early is not None:
        raise UsageError(
            "--pbt-every cannot be combined with --stop-early, because trials take over from each other. hint: "
            "leave one of them out."
        )
    if "checkpoint_iterations" in asked.request.settings:
        raise UsageError(
            "--pbt-every already determines when checkpoints are saved. hint: leave --checkpoint-iterations out."
        )
    if not asked.request.options.checkpoint_environments:
        raise UsageError("--pbt-every needs complete checkpoints. hint: leave --no-checkpoint-environments out.")
    if asked.request.options.keep_last < 2:
        raise UsageError(
            "--keep-last 1 is too few for --pbt-every, which continues all trials from the same iteration. "
            "hint: use --keep-last 2 or more."
        )
    check_one_program(trials)


def _create_directory(asked: NewSweep, spec: SweepSpec) -> SweepDirectory:
    """Creates the directory of a sweep. If an automatically chosen name is taken, a number is appended."""
    if asked.directory is not None:
        return SweepDirectory.create(asked.directory, spec)
    root = _default_directory(asked)
    for name in (root.name, *(f"{root.name}-{number}" for number in range(2, 100))):
        with contextlib.suppress(UsageError):
            return SweepDirectory.create(root.with_name(name), spec)
    return SweepDirectory.create(root, spec)


def _default_directory(asked: NewSweep) -> Path:
    name = f"sweep-{asked.request.algorithm}-{asked.request.environment}-{datetime.now():%Y%m%d-%H%M%S}"
    return Path("runs") / name.replace(":", "-").replace("/", "-")
