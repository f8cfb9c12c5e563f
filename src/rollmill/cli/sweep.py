"""`rollmill sweep ALGORITHM ENVIRONMENT --over OPTION=VALUES ... [OPTIONS OF TRAIN]`."""

import argparse
from functools import partial

from rollmill.api import TRIAL_RESULTS, SweepDirectory, remember, run_sweep, trusted_modules
from rollmill.api.sweeps import OVER_SEEDS
from rollmill.cli.named_code import named_by
from rollmill.cli.parsing import RefusingParser, values_of
from rollmill.cli.sweep_creation import (
    ALL_SAMPLERS,
    DEFAULT_FACTOR,
    EARLY_STOPPING,
    SweepRequest,
    all_words,
    create_sweep,
    named_modules_of,
)
from rollmill.cli.values import integer
from rollmill.core.errors import UsageError
from rollmill.core.local_paths import local_path
from rollmill.core.shell import command
from rollmill.execution.instances import SHARINGS, check_sharing
from rollmill.planning import SAMPLERS, check_sampler, parse_axis
from rollmill.record import RunDirectory

USAGE = """\
usage: rollmill sweep ALGORITHM ENVIRONMENT --over OPTION=VALUES ... [OPTIONS]
       rollmill sweep --resume SWEEP

Trains with combinations of some options' values, several at a time. Each trial is an ordinary run in SWEEP/trials;
SWEEP/table.csv compares them, SWEEP/report.html shows their learning curves. All other options are those of
`rollmill train ALGORITHM`.

  --over OPTION=VALUES   values of an option of train, of `environment`, or of `env-option.KEY`: a list
                         (1e-4,1e-3), integers (seed=0..4), or with a sampler a range (0.9..0.99, log:1e-5..1e-2)
  --sampler NAME         grid: all combinations (default); random: draws; {samplers}: proposals of Optuna from
                         the results so far
  --trials N             number of trials of a sampler
  --random N             short for --sampler random --trials N
  --sweep-seed SEED      of draws and proposals (default: 0)
  --stop-early asha      stop trials whose return at a rung is not among the best (asynchronous successive halving)
  --reduction-factor N   one in N trials goes on at each rung (default: {factor})
  --grace-steps STEPS    environment steps of the first rung (default: such that there are three rungs)
  --group-seeds          train all seeds of --over seed=FIRST..LAST in one program, as --num-seeds does
  --at-once N            most trials at a time (default: one for each core, and under MPS no more than fit into the
                         GPUs' memory; one for each slice of MIG; one for each GPU in turns)
  --gpu-sharing WAY      how trials share a GPU: mps (kernels side by side), mig (slices that exist), turns, or
                         auto (default)
  --metric NAME          column by which trials are compared, by its mean over seeds where these vary: {metrics}
                         (default: final_return)
  --sweep-dir SWEEP      directory of the sweep (default: runs/sweep- with algorithm, environment and time)
  --resume SWEEP         go on with a sweep that was stopped or killed
  --trust                with --resume: let the trials of this directory use the code that they name, now and later
  --all                  with --resume: go on with trials that were stopped early, too; none is stopped any more
"""


def run(arguments: list[str]) -> int:
    """Runs a sweep and prints its table."""
    if not arguments or any(word in ("-h", "--help") for word in arguments):
        words = {"metrics": ", ".join(TRIAL_RESULTS), "samplers": ", ".join(SAMPLERS), "factor": DEFAULT_FACTOR}
        print(USAGE.format(**words), end="")
        return 0 if arguments else 2
    own, rest = _parser().parse_known_args(arguments)
    if own.at_once is not None and own.at_once < 1:
        raise UsageError(f"--at-once {own.at_once} has to be at least 1.")
    check_sharing(own.gpu_sharing)
    sweep = _reopened(own, rest) if own.resume else _created(own, rest)
    metric = own.metric or sweep.spec.metric
    print(f"sweep: {sweep.root}", flush=True)
    code = run_sweep(
        sweep,
        at_once=own.at_once,
        sharing=own.gpu_sharing,
        metric=metric,
        say=lambda line: print(line, flush=True),
        imports=named_modules_of(sweep.spec, sweep.trials()),
        also_stopped=own.all,
    )
    _print_table(sweep, metric)
    if code > 128 and (sweep.unfinished() or sweep.remaining):
        imports = sorted(named_modules_of(sweep.spec, sweep.trials()))
        print(f"stopped; go on with\n  {command('sweep', '--resume', sweep.root, *_how(own), imports=imports)}")
    return code


def _how(own: argparse.Namespace) -> list[str]:
    """The options that say how trials run, which a sweep does not keep."""
    at_once = [] if own.at_once is None else ["--at-once", str(own.at_once)]
    sharing = [] if own.gpu_sharing == "auto" else ["--gpu-sharing", own.gpu_sharing]
    return [*at_once, *sharing]


def _parser() -> argparse.ArgumentParser:
    parser = RefusingParser("rollmill sweep")
    parser.add_argument("--over", action="append", default=[])
    parser.add_argument("--sampler", choices=ALL_SAMPLERS)
    parser.add_argument("--trials", type=integer)
    parser.add_argument("--random", type=integer)
    parser.add_argument("--sweep-seed", type=integer)
    parser.add_argument("--stop-early", choices=EARLY_STOPPING)
    parser.add_argument("--reduction-factor", type=integer)
    parser.add_argument("--grace-steps", type=integer)
    parser.add_argument("--group-seeds", action="store_true")
    parser.add_argument("--at-once", type=integer)
    parser.add_argument("--gpu-sharing", choices=SHARINGS, default="auto")
    parser.add_argument("--metric", choices=TRIAL_RESULTS)
    parser.add_argument("--sweep-dir", type=partial(local_path, "sweep_dir"))
    parser.add_argument("--resume", type=partial(local_path, "resume"))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--trust", action="store_true")
    return parser


_OF_NEW_SWEEPS = (
    "over",
    "sampler",
    "trials",
    "random",
    "sweep_seed",
    "stop_early",
    "reduction_factor",
    "grace_steps",
    "group_seeds",
    "sweep_dir",
)
"""Options that say what a sweep is; one that goes on has them already."""


def _reopened(own: argparse.Namespace, rest: list[str]) -> SweepDirectory:
    sweep = SweepDirectory.open(own.resume)
    named = set(values_of("--import", rest))
    _check_trust(sweep, named, trust=own.trust)
    if any(getattr(own, name) not in (None, [], False) for name in _OF_NEW_SWEEPS) or len(rest) > 2 * len(named):
        raise UsageError("--resume goes on with the trials as they were given, without other options of train.")
    if sweep.spec.sampler is not None:
        check_sampler(sweep.spec.sampler)
    if own.all and sweep.spec.early_stopping is None:
        raise UsageError(f"--all: no trial of {sweep.root} is stopped early.")
    return sweep


def _check_trust(sweep: SweepDirectory, named: set[str], *, trust: bool) -> None:
    """Whether the trials of a sweep may use the code that they name.

    Args:
        sweep: the sweep.
        named: modules that the user names at this call.
        trust: remember that this directory may use all that it names.

    Raises:
        UsageError: naming what nobody allowed.
    """
    run, words = RunDirectory(sweep.root), all_words(sweep.spec, sweep.trials())
    others = {name for each in words for name in named_by(each).others}
    allowed = named | trusted_modules(run)
    if not trust and (missing := sorted(others - allowed)):
        raise UsageError(
            f"{sweep.root} was not made here, and its trials use {', '.join(missing)}, by which others choose "
            "what runs here. hint: if you trust it, add --trust, which is remembered for this directory."
        )
    modules = named_modules_of(sweep.spec, sweep.trials())
    if trust:
        remember(run, sorted(others | modules))
    elif missing := sorted(modules - allowed):
        raise UsageError(
            f"The trials of {sweep.root} import {', '.join(missing)}. If you trust them, name them again: "
            + " ".join(f"--import {module}" for module in missing)
        )


def _created(own: argparse.Namespace, rest: list[str]) -> SweepDirectory:
    if len(rest) < 2 or rest[0].startswith("-") or rest[1].startswith("-"):
        raise UsageError(
            "rollmill sweep needs an algorithm and an environment first: rollmill sweep ppo CartPole-v1"
        )
    if own.trust:
        raise UsageError("--trust is for --resume SWEEP: what you name yourself is trusted.")
    if own.all:
        raise UsageError("--all is for --resume SWEEP: it goes on with trials that were stopped early.")
    return create_sweep(
        SweepRequest(
            algorithm=rest[0],
            environment=rest[1],
            options=tuple(rest[2:]),
            axes=tuple(parse_axis(text) for text in own.over),
            random=own.random,
            trials=own.trials,
            sampler=own.sampler,
            seed=own.sweep_seed or 0,
            metric=own.metric or "final_return",
            stop_early=own.stop_early,
            reduction_factor=own.reduction_factor,
            grace_steps=own.grace_steps,
            group_seeds=own.group_seeds,
            directory=own.sweep_dir,
        )
    )


def _print_table(sweep: SweepDirectory, metric: str) -> None:
    columns = ["trial", *sweep.spec.options_varied, "status", metric]
    columns += [] if metric == "seconds" else ["seconds"]
    rows = sweep.rows(metric)
    columns += [name for name in OVER_SEEDS if rows and name in rows[0]]
    cells = [columns, *([_text(row[name]) for name in columns] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _text(value: object) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
