"""`rollmill sweep ALGORITHM ENVIRONMENT --over OPTION=VALUES ... [OPTIONS OF TRAIN]`."""

import argparse
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from rollmill.api import TRIAL_RESULTS, SweepDirectory, Trial, find_algorithm, run_sweep
from rollmill.cli.parsing import values_of
from rollmill.cli.train import check_arguments
from rollmill.core.errors import UsageError
from rollmill.core.machine import usable_cores
from rollmill.planning import parse_axis, points

USAGE = """\
usage: rollmill sweep ALGORITHM ENVIRONMENT --over OPTION=VALUES ... [OPTIONS]
       rollmill sweep --resume SWEEP

Trains with all combinations of some options' values, several at a time. Each trial is an ordinary run in
SWEEP/trials; SWEEP/table.csv compares them. All other options are those of `rollmill train ALGORITHM`.

  --over OPTION=VALUES   values of an option of train, of `environment`, or of `env-option.KEY`: a list
                         (1e-4,1e-3), integers (seed=0..4), or with --random a range (0.9..0.99, log:1e-5..1e-2)
  --random N             draw N random combinations, instead of all
  --sweep-seed SEED      of the draws (default: 0)
  --at-once N            most trials at a time (default: the number of cores; on a GPU 1)
  --metric NAME          column by which the table is sorted, the largest first: {metrics} (default: final_return)
  --sweep-dir SWEEP      directory of the sweep (default: runs/sweep- with algorithm, environment and time)
  --resume SWEEP         go on with a sweep that was stopped or killed
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. `rollmill sweep --help` lists the options.")


def run(arguments: list[str]) -> int:
    """Runs a sweep and prints its table."""
    if not arguments or any(word in ("-h", "--help") for word in arguments):
        print(USAGE.format(metrics=", ".join(TRIAL_RESULTS)), end="")
        return 0 if arguments else 2
    own, rest = _parser().parse_known_args(arguments)
    at_once = own.at_once if own.at_once is not None else _default_at_once()
    if at_once < 1:
        raise UsageError(f"--at-once {at_once} has to be at least 1.")
    sweep = _reopened(own, rest) if own.resume else _created(own, rest)
    print(f"sweep: {sweep.root}", flush=True)
    code = run_sweep(sweep, at_once=at_once, metric=own.metric, say=lambda line: print(line, flush=True))
    _print_table(sweep, own.metric)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--over", action="append", default=[])
    parser.add_argument("--random", type=int)
    parser.add_argument("--sweep-seed", type=int, default=0)
    parser.add_argument("--at-once", type=int)
    parser.add_argument("--metric", choices=TRIAL_RESULTS, default="final_return")
    parser.add_argument("--sweep-dir", type=Path)
    parser.add_argument("--resume", type=Path)
    return parser


def _reopened(own: argparse.Namespace, rest: list[str]) -> SweepDirectory:
    sweep = SweepDirectory.open(own.resume)
    modules = {module for trial in sweep.trials() for module in values_of("--import", trial.words)}
    if missing := sorted(modules - set(values_of("--import", rest))):
        raise UsageError(
            f"The trials of {sweep.root} import {', '.join(missing)}. If you trust them, name them again: "
            + " ".join(f"--import {module}" for module in missing)
        )
    if own.over or own.random is not None or len(rest) > 2 * len(modules):
        raise UsageError("--resume goes on with the trials as they were given, without other options of train.")
    return sweep


def _created(own: argparse.Namespace, rest: list[str]) -> SweepDirectory:
    if len(rest) < 2 or rest[0].startswith("-") or rest[1].startswith("-"):
        raise UsageError(
            "rollmill sweep needs an algorithm and an environment first: rollmill sweep ppo CartPole-v1"
        )
    if not own.over:
        raise UsageError("A sweep needs values to try: --over learning-rate=1e-4,1e-3 or --over seed=0..4.")
    if own.random is not None and own.random < 1:
        raise UsageError(f"--random {own.random} has to be at least 1.")
    if values_of("--run-dir", rest):
        raise UsageError("--run-dir: each trial has a run of its own; the sweep's directory is --sweep-dir.")
    algorithm, environment, *options = rest
    if not values_of("--import", options):
        find_algorithm(algorithm)
    chosen = points([parse_axis(text) for text in own.over], draws=own.random, seed=own.sweep_seed)
    width = len(str(len(chosen) - 1))
    trials = [
        Trial(f"{index:0{width}}", point, _words(algorithm, environment, options, point))
        for index, point in enumerate(chosen)
    ]
    for trial in trials:
        check_arguments(trial.words[0], list(trial.words[1:]), who=f"trial {trial}")
    name = f"sweep-{algorithm}-{environment}-{datetime.now():%Y%m%d-%H%M%S}".replace(":", "-").replace("/", "-")
    return SweepDirectory.create(own.sweep_dir or Path("runs") / name, trials)


def _words(algorithm: str, environment: str, options: Sequence[str], point: dict[str, str]) -> tuple[str, ...]:
    """Arguments of `rollmill train` for one combination of values."""
    given: list[str] = []
    for option, value in point.items():
        if option == "environment":
            environment = value
        elif option.startswith("env-option."):
            given += ["--env-option", f"{option.removeprefix('env-option.')}={value}"]
        else:
            given += [f"--{option}", value]
    return (algorithm, environment, *options, "--no-tensorboard", "--quiet", *given)


def _default_at_once() -> int:
    """As many trials as cores; on a GPU one, whose memory a process takes as a whole."""
    return 1 if Path("/dev/nvidia0").exists() else usable_cores()


def _print_table(sweep: SweepDirectory, metric: str) -> None:
    rows = sweep.rows(metric)
    columns = [*(name for name in rows[0] if name not in TRIAL_RESULTS), metric, "seconds"]
    cells = [columns, *([_text(row[name]) for name in columns] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _text(value: object) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
