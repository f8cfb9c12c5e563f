"""`rollmill resume RUN`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rollmill.api import PATIENCE, PLACEMENT, resume
from rollmill.cli.train import Imports, report
from rollmill.execution import Fusion
from rollmill.planning import Place


@dataclass(frozen=True)
class Resume:
    """Go on with a run from its newest whole checkpoint."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Directory of the run."""
    imports: Imports = ()
    """Module to import first, because it registers the environment."""
    fusion: Fusion | None = None
    """What becomes one kernel, if otherwise than before; numbers then differ by rounding."""
    devices: int | None = None
    """Devices that share the environments; as many as before if left out."""
    distribution: str | None = None
    """Another distribution policy than before; the options below belong to it."""
    place: Place | None = None
    """What carries the groups."""
    workers: int | None = None
    """Replicas of groups that hold the environment alone."""
    actors: int | None = None
    """Replicas of groups that hold the policy, but not the update."""
    learners: int | None = None
    """Replicas of groups that hold gradients and update together."""
    asynchronous: bool | None = None
    """Let actors go on with the newest weights there are."""
    plan: Path | None = None
    """File of a plan."""
    cluster: str | None = None
    """Let Ray place the workers: ray, ray://HOST:PORT, auto or HOST:PORT."""
    host: str | None = None
    """This machine's address as workers on other hosts reach it."""
    hang_seconds: float | None = None
    """Time without progress after which a worker counts as hung; as before if left out."""
    start_seconds: float | None = None
    """The same while a worker starts, builds its environments and compiles."""
    max_failures: int | None = None
    """How many times in a row an environment may fail, or its worker be lost; one more ends the run."""
    quiet: bool = False
    """Show nothing while training."""


def run(arguments: list[str]) -> int:
    """Goes on with a run, and says where it is."""
    chosen = tyro.cli(Resume, prog="rollmill resume", args=arguments)
    given = {name: getattr(chosen, name) for name in (*PLACEMENT, *PATIENCE)}
    placement = {name: value for name, value in given.items() if value is not None}
    how = {"imports": chosen.imports, "quiet": chosen.quiet, "fusion": chosen.fusion}
    return report(resume(chosen.run, **how, **placement))
