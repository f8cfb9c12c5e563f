"""The command `rollmill sweep ALGORITHM ENVIRONMENT --over OPTION=VALUES ...`, which trains with different
options.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rollmill.cli.help import format_options
from rollmill.cli.parsing import HELP, Parsed, parse_given
from rollmill.cli.requests import MERGED, parse_training
from rollmill.cli.shared_options import Imports
from rollmill.core.errors import UsageError
from rollmill.core.machine import GpuSharing
from rollmill.core.options import Arg, options_of
from rollmill.core.shell import command
from rollmill.core.stored_paths import shown
from rollmill.core.text import printable
from rollmill.gpus.machine_parts import check_sharing
from rollmill.processes.forks import end_forks, fork_children
from rollmill.record.run_directory import RunDirectory
from rollmill.record.run_files import CONFIG
from rollmill.runs.trust import find_recorded, remember, trusted_modules
from rollmill.sweeps.creation import (
    NewSweep,
    SweepOptions,
    code_of,
    create_sweep,
    refuse_resume_if_exists,
    resume_command,
    typed_axis,
)
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.metrics import check_metric, extra_columns, finite
from rollmill.sweeps.population_based import check_shares
from rollmill.sweeps.proposals import check_sampler
from rollmill.sweeps.ranking import OVER_SEEDS
from rollmill.sweeps.report import REPORT
from rollmill.sweeps.running import run_sweep
from rollmill.sweeps.search_space import parse_axis
from rollmill.sweeps.shared_programs import Together
from rollmill.sweeps.spec import text_of

USAGE = """rollmill sweep ALGORITHM ENVIRONMENT --over OPTION=VALUES ... [OPTIONS]
       rollmill sweep --resume SWEEP [OPTIONS]"""
DESCRIPTION = (
    "Trains with combinations of values of some options, several at a time. Each trial is an ordinary run in "
    "SWEEP/trials. SWEEP/table.csv compares the trials, and SWEEP/report.html shows their learning curves. All "
    "other options are those of `rollmill train ALGORITHM`, including --gpu-sharing."
)


PRELOADED = ("rollmill.cli.train", "rollmill.training.population")
"""Modules that trials need and this command does not. The process that forks trials imports them once."""


def fork(arguments: Sequence[str]) -> None:
    """Forks the process that forks trials. In a trial, this call does not return."""
    if arguments and arguments[0] not in HELP and (words := fork_children(PRELOADED)) is not None:
        from rollmill.cli.child import run as run_child

        run_child(*words)


def run(arguments: list[str]) -> int:
    """Runs a sweep, and prints its table. Returns the exit code."""
    if not arguments or arguments[0] in HELP:
        print(_help())
        return 0 if arguments else 2
    names_a_sweep = any(word.partition("=")[0] == "--resume" for word in arguments)
    try:
        return _resume(arguments) if names_a_sweep else _create(arguments)
    finally:
        end_forks()


_AT_ONCE = (
    "Maximum number of trials at a time. Default: one per core, under MPS at most the number that fits into GPU "
    "memory, one per MIG slice, or one per GPU if trials take turns."
)
_TOGETHER = (
    "With auto, trials that differ only in seeds and hyperparameters share a program. With off, each trial has a "
    "separate process."
)


@dataclass(frozen=True)
class _New:
    """Options of a new sweep, besides the options of its trials."""

    over: Annotated[tuple[str, ...], Arg(metavar="OPTION=VALUES", repeated=True)] = ()
    """Values of an option of train, of `environment`, or of `env-option.KEY`: a list (1e-4,1e-3), integers
    (seed=0..4), or with a sampler a range (0.9..0.99, log:1e-5..1e-2)."""
    options: Annotated[SweepOptions, MERGED] = SweepOptions()
    at_once: Annotated[int | None, Arg(help=_AT_ONCE)] = None
    together: Annotated[Together, Arg(help=_TOGETHER)] = "auto"


@dataclass(frozen=True)
class _Resumed:
    """How a sweep continues."""

    resume: Annotated[Path, Arg(metavar="SWEEP")]
    """Continue a sweep that was stopped or killed."""
    trust: Annotated[bool, Arg(only_on=True)] = False
    """Let the trials in this directory import the modules that they name, now and later."""
    all: Annotated[bool, Arg(only_on=True)] = False
    """Also continue trials that were stopped early, and turn early stopping off."""
    at_once: Annotated[int | None, Arg(help=_AT_ONCE)] = None
    gpu_sharing: GpuSharing = "auto"
    """How trials share a GPU: mps (kernels side by side), mig (existing slices), turns, or auto."""
    together: Annotated[Together, Arg(help=_TOGETHER)] = "auto"
    metric: Annotated[str | None, Arg(metavar="NAME")] = None
    """Result by which trials are compared. Default: as before."""
    imports: Imports = ()


def _help() -> str:
    new = options_of(_New)
    resumed = [option for option in options_of(_Resumed) if option.name not in {one.name for one in new}]
    return format_options(
        {"options of a new sweep": new, "options of a resumed sweep": resumed},
        prog="rollmill sweep",
        usage=USAGE,
        description=DESCRIPTION,
    )


def _create(arguments: list[str]) -> int:
    """Runs a new sweep."""
    for name, why in _ONLY_RESUMED.items():
        if f"--{name}" in arguments:
            raise UsageError(f"--{name} applies only to --resume SWEEP: {why}.")
    if "--resume-if-exists" in arguments:
        refuse_resume_if_exists()
    more = ("sweeping", Annotated[_New, MERGED], _New())
    parsed = parse_training(arguments, command="sweep", more=more)
    new: _New = parsed.more
    if parsed.searching.search_plan:
        raise UsageError(
            "--search-plan cannot be combined with a sweep. hint: search with `rollmill plan`, then sweep with "
            "--plan FILE."
        )
    request = parsed.request
    sharing = request.options.gpu_sharing
    _check_how(new.at_once, sharing)
    check_metric(new.options.metric)
    if new.options.pbt_every is not None:
        check_shares(new.at_once, new.together)
    axes = tuple(typed_axis(request.algorithm, parse_axis(text)) for text in new.over)
    sweep = create_sweep(NewSweep(request.without({"gpu_sharing"}), axes, **vars(new.options)))
    return _run(sweep, at_once=new.at_once, sharing=sharing, together=new.together, metric=new.options.metric)


_ONLY_RESUMED = {
    "trust": "the modules that you name in this command are trusted",
    "all": "it continues trials that were stopped early",
}


def _resume(arguments: list[str]) -> int:
    own, _ = _parse_resume(arguments)
    _check_how(own.at_once, own.gpu_sharing)
    sweep = SweepDirectory.open(own.resume)
    _check_trust(sweep, set(own.imports), trust=own.trust)
    if sweep.spec.sampler is not None:
        check_sampler(sweep.spec.sampler)
    if own.all and sweep.spec.early_stopping is None:
        raise UsageError(f"--all has no effect, because {sweep.root} does not stop trials early.")
    metric = check_metric(own.metric or sweep.spec.metric)
    return _run(
        sweep,
        at_once=own.at_once,
        sharing=own.gpu_sharing,
        together=own.together,
        metric=metric,
        also_stopped=own.all,
    )


def _parse_resume(arguments: Sequence[str]) -> Parsed:
    """Returns the options of a resumed sweep, which cannot change the stored settings."""
    try:
        return parse_given(_Resumed, arguments, prog="rollmill sweep")
    except UsageError as error:
        if not str(error).startswith(("unknown option", "rollmill sweep does not accept")):
            raise
        raise UsageError(f"--resume keeps the options with which the trials began: {error}") from None


def _check_how(at_once: int | None, sharing: GpuSharing) -> None:
    """Checks how trials are to run, before anything is written."""
    if at_once is not None and at_once < 1:
        raise UsageError(f"--at-once {at_once} must be at least 1.")
    check_sharing(sharing)


def _run(
    sweep: SweepDirectory,
    *,
    at_once: int | None,
    sharing: GpuSharing,
    together: Together,
    metric: str,
    also_stopped: bool = False,
) -> int:
    """Runs the trials, prints the table, and returns the exit code."""
    print(f"sweep: {sweep.root}", flush=True)
    code = run_sweep(
        sweep,
        at_once=at_once,
        sharing=sharing,
        metric=metric,
        say=lambda line: print(printable(line), flush=True),
        imports=code_of(sweep).modules,
        together=together,
        also_stopped=also_stopped,
    )
    _print_table(sweep, metric)
    if code == 0:
        _print_best(sweep, metric)
    if code > 128 and (sweep.unfinished() or sweep.remaining):
        how = [] if at_once is None else ["--at-once", str(at_once)]
        how += [] if sharing == "auto" else ["--gpu-sharing", sharing]
        how += [] if together == "auto" else ["--together", together]
        print(f"stopped. Resume with\n  {resume_command(sweep, *how)}")
    return code


def _check_trust(sweep: SweepDirectory, named: set[str], *, trust: bool) -> None:
    """Raises a `UsageError` if the trials of a sweep name code that was never allowed, by the user now or before.

    `trust` remembers that this directory may use all that it names.
    """
    run, code = RunDirectory(sweep.root), code_of(sweep)
    allowed = named | trusted_modules(run)
    if trust:
        remember(run, sorted(code.clusters | code.stores | code.modules))
    elif missing := sorted(code.stores - allowed):
        raise UsageError(
            f"{sweep.root} was created elsewhere, and its trials use {', '.join(missing)}, which would be read "
            "with your credentials. hint: if you trust the sweep, add --trust, which is remembered for this "
            "directory."
        )
    elif missing := sorted(code.clusters - allowed):
        raise UsageError(
            f"{sweep.root} was created elsewhere, and its trials use {', '.join(missing)}, through which others "
            "can run code on this machine. hint: if you trust it, add --trust, which is remembered for this "
            "directory."
        )
    elif missing := sorted(code.modules - allowed):
        raise UsageError(
            f"the trials of {sweep.root} import {', '.join(missing)}. hint: if you trust these modules, name them "
            "again: " + " ".join(f"--import {module}" for module in missing)
        )
    trusted = code.modules & trusted_modules(run)
    find_recorded(trusted, sweep.spec.import_files, where=sweep.root, user_imports=tuple(named))


def _print_table(sweep: SweepDirectory, metric: str) -> None:
    columns = ["trial", *sweep.spec.options_varied, "status", metric]
    of_others = ["env_steps", "seconds"] if sweep.spec.early_stopping is not None else ["seconds"]
    columns += [name for name in of_others if name != metric]
    rows = sweep.rows(metric)
    at = columns.index(metric) + 1
    columns[at:at] = [name for name in extra_columns(rows) if name != metric]
    columns += [name for name in OVER_SEEDS if rows and name in rows[0]]
    cells = [columns, *([_text(row[name]) for name in columns] for row in rows)]
    cells = [[printable(text) for text in row] for row in cells]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _print_best(sweep: SweepDirectory, metric: str) -> None:
    """Prints where the report is, and how to use the best trial."""
    print(f"report: {shown(sweep.root / REPORT)}")
    rows = sweep.rows(metric)
    if not rows or finite(rows[0][metric]) is None:
        return
    best = next(trial for trial in sweep.trials() if trial.name == rows[0]["trial"])
    run = sweep.run(best)
    print(f"evaluate the best trial: {run.command('evaluate')}")
    seeds = [trial.request.options.seed for trial in sweep.trials()]
    again = command(
        "train", "--config", shown(run.root / CONFIG), "--seed", str(max(seeds) + 1), imports=run.imports()
    )
    print(f"train its options with another seed: {again}")


def _text(value: object) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else text_of(value)
