"""The command `rollmill export RUN`, which writes a policy as a file that other programs can run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rollmill.cli.parsing import parse
from rollmill.cli.shared_options import Imports, Trust
from rollmill.core.options import Arg
from rollmill.core.stored_paths import RunPath
from rollmill.policies.exporting import Export, export


@dataclass(frozen=True)
class ExportOptions:
    """Write the policy of a run as a file that needs neither Rollmill nor the run."""

    run: Annotated[RunPath, Arg(metavar="RUN", positional=True)]
    """Directory of the run."""
    format: str = "onnx"
    """Format of the file: onnx or stablehlo."""
    output: Path | None = None
    """File to write. Default: policy.onnx or policy.stablehlo in the working directory."""
    force: Annotated[bool, Arg(only_on=True)] = False
    """Replace an existing file."""
    checkpoint: str = "last"
    """Checkpoint of the policy: last; best, with the best return during training; or the number of an
    iteration."""
    train_seed: int | None = None
    """Training seed of the policy, if the run trained several. Default: the first."""
    trust: Trust = False
    """Let the run in this directory import the modules that it names, now and later. Runs made on this machine
    always may."""
    imports: Imports = ()
    """Module to import first, because it registers the environment, the network or the algorithm."""


def run(arguments: list[str]) -> int:
    """Writes the policy's file. Prints its inputs, its outputs and how it compares with the original."""
    options = parse(ExportOptions, arguments, prog="rollmill export")
    written = export(
        options.run,
        options.output or Path(f"policy.{options.format}"),
        format=options.format,
        force=options.force,
        checkpoint=options.checkpoint,
        seed=options.train_seed,
        imports=options.imports,
        trust=options.trust,
    )
    print(_sentences(written))
    return 0


def _sentences(written: Export) -> str:
    metadata, compared = written.metadata, written.comparison
    equal = f"equal to within {compared.largest_difference:.2g}" if compared.largest_difference else "equal"
    ties = f", except for {compared.num_ties} ties between two equally likely actions" if compared.num_ties else ""
    lines = [
        f"{written.path}: {metadata['algorithm']} on {metadata['environment']}, iteration {metadata['iteration']}",
        *(f"  input   {_array(each)}" for each in metadata["inputs"]),
        *(f"  output  {_array(each)}" for each in metadata["outputs"]),
        f"  compared with the policy on {compared.num_observations:,} observations: its actions are {equal}{ties}",
    ]
    return "\n".join([*lines, f"  {metadata['note']}"] if metadata["note"] else lines)


def _array(document: dict[str, Any]) -> str:
    return f"{document['name']} {document['dtype']} [{', '.join(map(str, document['shape']))}]"
