"""Exports policies to files that other programs can compute: ONNX and StableHLO."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.folder import open_replacement
from rollmill.core.local_paths import ALSO_IN_PYTHON, check_new_file
from rollmill.core.schema import coerce
from rollmill.dataflow import Graph
from rollmill.policies.exporting.interface import ExportedFunction, exported_function
from rollmill.policies.exporting.metadata import export_metadata, metadata_text
from rollmill.policies.exporting.onnx import run_onnx, to_onnx
from rollmill.policies.exporting.parity import Comparison, compare
from rollmill.policies.exporting.stablehlo import run_stablehlo, to_stablehlo
from rollmill.policies.loading import load
from rollmill.policies.policy import Policy

FORMATS = ("onnx", "stablehlo")


class Export(NamedTuple):
    """An exported policy: its file, and the result of the comparison with the original policy."""

    path: Path
    metadata: dict[str, Any]
    """Description of the exported policy: spaces, inputs, outputs, run, iteration and digest of the weights."""
    comparison: Comparison
    """Result of the comparison with the original policy."""


def export(
    source: str | Path | Policy,
    path: str | Path,
    *,
    format: str = "onnx",
    force: bool = False,
    checkpoint: str | int = "last",
    seed: int | None = None,
    algorithm: Graph | None = None,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> Export:
    """Writes a policy to a file that needs neither Rollmill nor the run.

    The exported model computes the most likely actions. Its inputs and outputs are named and have a leading axis
    of any length:

        observation     one element of the observation space, its parts named by path: `observation.position`
        action_mask     True where an action is legal, if the environment has masks
        memory          of a recurrent policy; zeros at the start of an episode, then `next_memory`
        action          inside the bounds of the action space
        logits          of discrete actions; `mean` and `scale` of continuous ones, before a tanh
        value           if the policy has one; `q_values` of DQN
        next_memory     to pass with the next observation

    The model includes normalisation of observations and scaling of actions. For AlphaZero, it contains the network
    without the search. Before a file is written, the outputs are compared with the policy on 1,000 observations.

    Args:
        source: the run's directory, or a policy.
        path: the file to write. For StableHLO, a description is also written to `PATH.json`.
        format: `onnx` or `stablehlo`.
        force: replace existing files.
        checkpoint: as for `load`.
        seed: as for `load`.
        algorithm: as for `load`.
        imports: as for `load`.
        trust: as for `load`.

    Raises:
        UsageError: the format is unknown, the path has the ending of another format, a package is missing, the
            file exists or cannot be written, or the format cannot represent the policy. Nothing is written.
        CheckpointError: the directory is not a run, or has no complete checkpoint.

    Examples:
        >>> rollmill.export("runs/cartpole", "policy.onnx", format="onnx")
    """
    if format not in FORMATS:
        raise unknown_name("format", str(format), FORMATS)
    place: Path = coerce("path", Path, path)
    named = place.suffix.removeprefix(".")
    if named in FORMATS and named != format:
        raise UsageError(
            f"{place} has the ending of another format than {format}. hint: --format {named} (format={named!r}), "
            "or another name."
        )
    places = _places(place, format)
    check_destinations(places, force=force)
    if not isinstance(source, Policy):
        source = load(source, checkpoint=checkpoint, seed=seed, algorithm=algorithm, imports=imports, trust=trust)
    exported = exported_function(source.loaded)
    metadata = export_metadata(source.loaded, exported, format)
    data, comparison = _export_and_compare(source, exported, format, metadata_text(metadata))
    contents = [data] if format == "onnx" else [metadata_text(metadata).encode(), data]
    write_files(dict(zip(places, contents, strict=True)))
    return Export(place, metadata, comparison)


def _places(path: Path, format: str) -> list[Path]:
    """Returns the files of an export. The requested file is the last."""
    return [path] if format == "onnx" else [path.with_name(f"{path.name}.json"), path]


def _export_and_compare(
    policy: Policy, exported: ExportedFunction, format: str, metadata: str
) -> tuple[bytes, Comparison]:
    if format == "onnx":
        data = to_onnx(exported, metadata)
        return data, compare(policy, exported, run_onnx(data, exported))
    data = to_stablehlo(exported)
    return data, compare(policy, exported, run_stablehlo(data))


def check_destinations(paths: list[Path], *, force: bool) -> None:
    """Checks that files can be written, before anything is computed.

    Raises:
        UsageError: a file already exists, or the folder does not exist.
    """
    for path in paths:
        check_new_file(path, force=force, remedy=ALSO_IN_PYTHON)


def write_files(contents: dict[Path, bytes]) -> None:
    """Writes several files, each atomically. The last file appears after all others.

    Raises:
        UsageError: a file cannot be written. No new file is left behind.
    """
    path = next(iter(contents))
    try:
        # the contexts are left in reverse order, so the last file is opened first
        with contextlib.ExitStack() as written:
            for path, content in reversed(contents.items()):
                written.enter_context(open_replacement(path)).write(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}.") from error
