"""Finds the nodes of a cluster on which no new workers should be placed: unreachable nodes and drained nodes.

Ray itself takes a minute to notice that a node is unreachable.
"""

import contextlib
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

REACH_SECONDS = 1.0
"""Seconds to wait for the answer of a node, which takes one round trip."""

MAX_AT_ONCE = 64


def unreachable_nodes(ray: Any) -> dict[str, str]:
    """Returns the addresses, by node id, of nodes that Ray believes to be alive but that do not answer.

    Returns an empty mapping if no node answers, because this host itself may then be cut off.
    """
    if ray.util.client.ray.is_connected():  # a client of this kind may be unable to reach the nodes
        return {}
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    answers = _answers(nodes.values())
    missing = {
        name: str(node["NodeManagerAddress"])
        for (name, node), answered in zip(nodes.items(), answers, strict=True)
        if not answered
    }
    return missing if len(missing) < len(nodes) else {}


def draining_nodes(ray: Any) -> dict[str, float]:
    """Returns the ids of nodes that Ray drains, with the times at which they end, in seconds since 1970 (0 if
    unknown).

    An autoscaler drains a node before it removes the node, and so does `ray drain-node`. Ray places no new work on
    drained nodes.
    """
    if ray.util.client.ray.is_connected():
        return {}
    try:  # Ray has no public function for this
        return {node: end / 1000 for node, end in ray._private.state.state.get_draining_nodes().items()}
    except Exception:
        return {}


def selector_without(nodes: Iterable[str]) -> dict[str, str]:
    """Returns a Ray label selector for all nodes except the given ones."""
    names = ", ".join(sorted(nodes))
    return {"ray.io/node-id": f"!in({names})"} if names else {}


def _answers(nodes: Iterable[Mapping[str, Any]]) -> list[bool]:
    with ThreadPoolExecutor(MAX_AT_ONCE, "rollmill-reach") as pool:
        return list(pool.map(_answers_now, nodes))


def _answers_now(node: Mapping[str, Any]) -> bool:
    address = (str(node["NodeManagerAddress"]), int(node["NodeManagerPort"]))
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=REACH_SECONDS):
        return True
    return False
