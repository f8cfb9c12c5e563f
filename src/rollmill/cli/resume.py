"""The command `rollmill resume RUN`, which continues a run from its newest checkpoint."""

from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, Literal, TypeAlias

from rollmill.cli.parsing import parse, positional_words
from rollmill.cli.shared_options import Imports, Trust
from rollmill.cli.train import report, serve
from rollmill.core.errors import RollmillError
from rollmill.core.membership import HOSTS, read_membership
from rollmill.core.options import Arg
from rollmill.core.stored_paths import RunPath, run_folder
from rollmill.planning.placement import PLACEMENT, PlacementOptions
from rollmill.programs.kernels import Fusion
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.changes import parse_assignments
from rollmill.runs.options import WORKER_LIMITS
from rollmill.runs.saved_run import read_options
from rollmill.training.resuming import resume

_MERGED: TypeAlias = Annotated[PlacementOptions, Arg(name="")]


@dataclass(frozen=True)
class Resume:
    """Resume a run from its newest complete checkpoint."""

    run: Annotated[RunPath, Arg(metavar="RUN", positional=True)]
    """Directory of the run."""
    imports: Imports = ()
    """Module to import first, because it registers the environment, the network or the algorithm."""
    trust: Trust = False
    """Let the run in this directory import the modules that it names, now and later. Runs made on this machine
    always may."""
    changes: Annotated[tuple[str, ...], Arg(name="set", metavar="NAME=VALUE", repeated=True)] = ()
    """Change a hyperparameter from now on, such as learning_rate=1e-4 or a larger total_timesteps."""
    fusion: Fusion | None = None
    """Fused kernels. Default: as before. A change alters results by rounding."""
    hang_seconds: float | None = None
    """Seconds without progress after which a worker counts as hung. Default: as before."""
    start_seconds: float | None = None
    """Seconds that a worker may take to start, build its environments and compile. Default: as before."""
    max_failures: int | None = None
    """Maximum number of failures in a row of an environment or its worker. One more failure ends the run."""
    stop_at_return: float | Literal["never"] | None = None
    """Mean return at which to stop, or never. Default: as before."""
    track: tuple[str, ...] = ()
    """Trackers, as for `rollmill train`. A run does not store them."""
    dashboard: bool = True
    """Show losses, returns and other metrics at the bottom of the terminal, instead of a progress bar."""
    quiet: bool = False
    """Show nothing during training."""
    placement: _MERGED = PlacementOptions()  # noqa: RUF009 - frozen


def run(arguments: list[str]) -> int:
    """Resumes a run, and prints its directory. Returns the exit code."""
    before = _placement_before(arguments)
    command = make_dataclass("Resume", [("placement", _MERGED, before)], bases=(Resume,), frozen=True)
    command.__doc__ = Resume.__doc__
    chosen = parse(command, arguments, prog="rollmill resume")
    if chosen.placement.cluster == HOSTS and (member := read_membership()).rank:
        return serve(member)
    limits = {name: getattr(chosen, name) for name in WORKER_LIMITS if getattr(chosen, name) is not None}
    how = {"imports": chosen.imports, "quiet": chosen.quiet, "fusion": chosen.fusion, "trust": chosen.trust}
    how |= {"dashboard": chosen.dashboard, "track": chosen.track}
    how["stop_at_return"] = chosen.stop_at_return
    how["changes"] = parse_assignments(chosen.changes)
    return report(resume(chosen.run, **how, **limits, **_changes(before, chosen.placement)))


def _placement_before(arguments: list[str]) -> PlacementOptions:
    """Returns the run's previous placement as the default. `resume` itself rejects what is not a run."""
    try:
        named = positional_words(Resume, arguments, prog="rollmill resume")
        options = read_options(RunDirectory.open(run_folder("run", named[0] if named else "")))
    except RollmillError:
        return PlacementOptions()
    return PlacementOptions(**{name: getattr(options, name) for name in PLACEMENT})


def _changes(before: PlacementOptions, after: PlacementOptions) -> dict[str, Any]:
    values = ((name, getattr(before, name), getattr(after, name)) for name in PLACEMENT)
    return {name: new for name, old, new in values if new != old}
