"""The JSON description that accompanies an exported policy."""

import json
from typing import Any

import numpy as np
from gymnasium import spaces

from rollmill.core.machine import versions
from rollmill.core.spaces import unsupported_space
from rollmill.policies.exporting.interface import ExportedArray, ExportedFunction
from rollmill.policies.policy import LoadedRun
from rollmill.record.json_files import plain
from rollmill.record.leaves import tree_digest

BATCH = "batch"
"""Name of the leading axis of all inputs and outputs, which may have any length."""

SEARCH_NOTE = "The export does not include the search: actions come from the network alone."


def export_metadata(loaded: LoadedRun, exported: ExportedFunction, format: str) -> dict[str, Any]:
    """Returns the metadata of an exported policy: spaces, inputs, outputs, and the run that it comes from."""
    settings = loaded.graph.settings
    return {
        "format": format,
        "rollmill": versions()["rollmill"],
        "run": loaded.name,
        "iteration": loaded.iteration,
        "algorithm": settings["algorithm"],
        "environment": settings["environment"],
        "weights_sha256": tree_digest(loaded.weights),
        "observation_space": space_document(loaded.graph.observation_space),
        "action_space": space_document(loaded.graph.action_space),
        "inputs": [_array_document(each) for each in exported.inputs],
        "outputs": [_array_document(each) for each in exported.outputs],
        "note": SEARCH_NOTE if loaded.graph.outputs.searches else None,
    }


def metadata_text(metadata: dict[str, Any]) -> str:
    """Returns the metadata of an exported policy as a JSON string. Equal policies have equal strings."""
    return json.dumps(metadata, indent=2) + "\n"


def space_document(space: spaces.Space) -> dict[str, Any]:
    """Describes a Gymnasium space in values that JSON can hold.

    If all elements share a bound, it is one number. An infinite bound is None.
    """
    kind = type(space).__name__
    match space:
        case spaces.Dict():
            return {"type": kind, "spaces": {name: space_document(part) for name, part in space.spaces.items()}}
        case spaces.Tuple():
            return {"type": kind, "spaces": [space_document(part) for part in space.spaces]}
        case spaces.Discrete():
            return {"type": kind, "n": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete():
            return {"type": kind, "nvec": plain(space.nvec), "start": plain(space.start)}
        case spaces.MultiBinary():
            return {"type": kind, "shape": list(space.shape)}
        case spaces.Box():
            bounds = {"low": _describe_bound(space.low), "high": _describe_bound(space.high)}
            return {"type": kind, "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
    raise unsupported_space(space)


def _describe_bound(values: np.ndarray) -> Any:
    if values.size and (values == values.flat[0]).all():
        return plain(values.flat[0])
    return plain(values)


def _array_document(array: ExportedArray) -> dict[str, Any]:
    return {"name": array.name, "shape": [BATCH, *array.shape], "dtype": array.dtype}
