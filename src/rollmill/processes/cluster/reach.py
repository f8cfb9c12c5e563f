"""The nodes of a cluster that get no new workers: those that this host cannot reach now, and drained ones.

Ray itself notices after a minute that a node cannot be reached.
"""

import contextlib
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

REACH_SECONDS = 1.0
"""How long a node's answer is waited for: it is one round trip."""

MAX_AT_ONCE = 64


def unreachable_nodes(ray: Any) -> dict[str, str]:
    """Returns the addresses, by node id, of nodes that Ray takes to be alive but that do not answer.

    Empty if none answers, because then this host itself may be what is cut off.
    """
    if ray.util.client.ray.is_connected():  # such a client need not reach the nodes
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
    """Returns the nodes that Ray drains, by id, with the ends of their time in seconds since 1970; 0 is no end.

    An autoscaler drains a node before it removes it, and so does `ray drain-node`. Ray sends no new work there.
    """
    if ray.util.client.ray.is_connected():
        return {}
    try:  # no public function tells
        return {node: end / 1000 for node, end in ray._private.state.state.get_draining_nodes().items()}
    except Exception:
        return {}


def selector_without(nodes: Iterable[str]) -> dict[str, str]:
    """Returns a Ray selector for all other nodes."""
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
