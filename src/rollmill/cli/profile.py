"""The commands `rollmill profile ALGORITHM ENVIRONMENT` and `rollmill profile compare A B`."""

import contextlib
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import jax

from rollmill.cli.parsing import HELP, parse
from rollmill.cli.requests import MERGED, ParsedTraining, parse_training
from rollmill.core.errors import StorageError, UsageError
from rollmill.core.folder import Folder, open_replacement, read_named
from rollmill.core.local_paths import check_new_file
from rollmill.core.options import Arg
from rollmill.dataflow import Graph
from rollmill.pictures import require_matplotlib
from rollmill.profiler.profiling import ProfileOptions, ProfilingStopped, profile
from rollmill.profiler.report.comparison import compare, comparison_page, draw_comparison
from rollmill.profiler.report.figure import write_figure
from rollmill.profiler.report.html import profile_page
from rollmill.profiler.report.perfetto import perfetto_trace
from rollmill.profiler.report.terminal import draw_profile
from rollmill.profiling.results import MAX_BYTES, Profile, read_profile
from rollmill.programs.kernels import MIN_STEPS_TO_TUNE
from rollmill.runs.options import RunOptions
from rollmill.training.placing import prepare_devices
from rollmill.training.recorder import default_log_every
from rollmill.training.request import ResolvedRequest, resolve

PROFILE, PAGE, TRACE, FIGURE = "profile.json", "profile.html", "trace.json", "profile.png"
ITERATIONS = 2**22
"""Number of iterations to profile if the user does not set the number of steps."""
PLENTY = 2**30
"""Number of environment steps that exceeds one iteration of any run."""


@dataclass(frozen=True)
class Profiling(ProfileOptions):
    """Options of a profile: its windows, and where to write it."""

    output: Path | None = None
    """Directory of the result. Default: one under profiles/, named after algorithm, environment and time."""
    png: bool = False
    """Also write profile.png, a figure for papers. It needs matplotlib, which the extra `plot` installs."""


_BEFORE = Arg(metavar="BEFORE", help="Directory written by `rollmill profile`.", positional=True)
_AFTER = Arg(metavar="AFTER", help="Another one.", positional=True)


@dataclass(frozen=True)
class Compare:
    """Show two profiles side by side."""

    before: Annotated[Path, _BEFORE]
    after: Annotated[Path, _AFTER]
    output: Path | None = None
    """File to write the comparison to as a web page."""
    force: Annotated[bool, Arg(only_on=True)] = False
    """Replace an existing file."""


def run(arguments: list[str]) -> int:
    """Profiles a run, or compares two profiles. Returns the exit code."""
    if not arguments or arguments[0] in HELP:
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "compare":
        return _compare(parse(Compare, arguments[1:], prog="rollmill profile compare"))
    parsed = parse_training(
        arguments, command="profile", more=("profiling", Annotated[Profiling, MERGED], Profiling())
    )
    profiling: Profiling = parsed.more
    if parsed.searching.search_plan:
        raise UsageError(
            "--search-plan cannot be combined with profiling. hint: search with `rollmill plan`, then profile "
            "with --plan FILE."
        )
    if "run_dir" in parsed.request.settings:
        raise UsageError(
            "--run-dir has no effect, because the profiled run is temporary. hint: use --output for the "
            "directory of the result."
        )
    if profiling.png:
        require_matplotlib()
    output = _output(parsed, profiling)
    with _make_result_directory(output):
        try:
            _show(_profile(parsed, profiling, arguments), output, png=profiling.png)
        except ProfilingStopped as stopped:
            if stopped.profile is not None:
                _show(stopped.profile, output, png=profiling.png)
            raise
    return 0


def _profile(parsed: ParsedTraining, profiling: Profiling, arguments: list[str]) -> Profile:
    request = parsed.request
    prepare_devices(request.options, environment=request.environment)
    graph, options = _long_training(resolve(request))
    return profile(
        graph,
        options,
        how=ProfileOptions(**{field.name: getattr(profiling, field.name) for field in fields(ProfileOptions)}),
        imports=request.imports,
        recipe=request.recipe,
        command=shlex.join(["rollmill", "profile", *arguments]),
        show=lambda line: print(line, file=sys.stderr, flush=True),
    )


def _show(found: Profile, output: Path, *, png: bool) -> None:
    """Writes a profile, and shows it in the terminal."""
    _write(found, output, png=png)
    print(draw_profile(found, width=_width()))
    print(f"\nreport: {output / PAGE}\ntrace for ui.perfetto.dev: {output / TRACE}")
    if png:
        print(f"figure: {output / FIGURE}")


def _long_training(resolved: ResolvedRequest) -> tuple[Graph, RunOptions]:
    """Returns the training with enough steps for all windows, unless the request sets their number.

    Whether it is fused, and how often it writes metrics, is decided by the steps that it would have.
    """
    options = resolved.options
    if "total_timesteps" in resolved.request.settings:
        return resolved.graph(), options
    # An iteration may be longer than the default number of steps, so the batch size is taken from a run of any
    # length.
    batch = resolved.graph(total_timesteps=PLENTY).loops.batch_size
    steps = max(batch, resolved.total_timesteps)
    if options.fusion == "auto" and steps < MIN_STEPS_TO_TUNE.get(jax.default_backend(), 0):
        options = replace(options, fusion="off")
    if options.log_every is None:
        options = replace(options, log_every=default_log_every(resolved.graph(total_timesteps=steps)))
    return resolved.graph(total_timesteps=batch * ITERATIONS), options


def _output(parsed: ParsedTraining, profiling: Profiling) -> Path:
    """Returns the directory of the result, which must be empty or new."""
    environment = parsed.request.environment.replace("/", "-").replace(":", "-")
    name = f"{parsed.request.algorithm}-{environment}-{datetime.now():%Y%m%d-%H%M%S}"
    output = profiling.output or Path("profiles") / name
    with _convert_system_errors(output):
        if output.exists() and not output.is_dir():
            raise UsageError(f"output={output} is a file, expected a directory. hint: name a directory.")
        if output.exists() and any(output.iterdir()):
            raise UsageError(f"output={output} exists and is not empty. hint: name another directory.")
    return output


@contextlib.contextmanager
def _convert_system_errors(output: Path) -> Iterator[None]:
    """Converts an error of the operating system about a path to a `UsageError` that quotes it."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"output={output} cannot be written: {error.strerror or error}.") from error


@contextlib.contextmanager
def _make_result_directory(output: Path) -> Iterator[None]:
    """Makes a directory before anything is measured, and removes it if nothing was written to it."""
    made = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        with _convert_system_errors(output):
            output.mkdir(parents=True, exist_ok=True)
            (output / PROFILE).touch()
            (output / PROFILE).unlink()
        yield
    finally:
        with contextlib.suppress(OSError):
            for folder in made:
                folder.rmdir()


def _write(found: Profile, output: Path, *, png: bool) -> None:
    """Writes profile.json first, from which all else can be made again."""
    try:
        for name, text in ((PROFILE, Profile.to_json), (PAGE, profile_page), (TRACE, perfetto_trace)):
            with open_replacement(output / name) as file:
                file.write(text(found).encode())
        if png:
            with open_replacement(output / FIGURE) as file:
                write_figure(file, found)
    except OSError as error:
        print(draw_profile(found, width=_width()))  # prints the profile, so that it is not lost
        raise StorageError(f"{output} cannot be written: {error.strerror or error}.") from error


def _compare(options: Compare) -> int:
    if options.output is not None:
        check_new_file(options.output, force=options.force)
    compared = compare(_read(options.before), _read(options.after))
    print(draw_comparison(compared, width=_width()))
    if options.output is not None:
        try:
            with open_replacement(options.output) as file:
                file.write(comparison_page(compared).encode())
        except OSError as error:
            raise StorageError(f"{options.output} cannot be written: {error.strerror or error}.") from error
        print(f"\nwrote {options.output}")
    return 0


def _width() -> int:
    """Returns the width of the terminal in columns, or a typical width for a file."""
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def _read(directory: Path) -> Profile:
    file = directory
    try:
        if directory.is_dir():
            file = directory / PROFILE
            data = Folder(directory).read(PROFILE, limit=MAX_BYTES)
        else:
            data = read_named(file, limit=MAX_BYTES)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror or error}. hint: `rollmill profile` writes profiles."
        ) from error
    return read_profile(data, where=str(file))


def _usage() -> str:
    return "\n".join(
        [
            "usage: rollmill profile ALGORITHM ENVIRONMENT [--output DIR] [OPTIONS]",
            "       rollmill profile compare A B",
            "",
            "Trains for a limited time and shows where that time is spent, by operation, on",
            "hosts and devices.",
            "",
            "`rollmill profile ALGORITHM --help` lists the options, which include those of",
            "`rollmill train`.",
        ]
    )
