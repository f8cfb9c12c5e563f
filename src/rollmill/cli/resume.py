"""`rollmill resume RUN`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rollmill.api import resume
from rollmill.cli.train import Imports, report


@dataclass(frozen=True)
class Resume:
    """Go on with a run from its newest whole checkpoint."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Directory of the run."""
    imports: Imports = ()
    """Module to import first, because it registers the environment."""
    devices: int | None = None
    """Devices that share the environments; as many as before if left out."""
    quiet: bool = False
    """Show nothing while training."""


def run(arguments: list[str]) -> int:
    """Goes on with a run, and says where it is."""
    chosen = tyro.cli(Resume, prog="rollmill resume", args=arguments)
    return report(resume(chosen.run, imports=chosen.imports, devices=chosen.devices, quiet=chosen.quiet))
