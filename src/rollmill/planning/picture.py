"""Draws a plan with characters: the role of each group, and the data sent between groups."""

from rollmill.core.text import format_count
from rollmill.dataflow import Graph, Interface, OwnedPart, Partition, Role, graph_roles, interfaces
from rollmill.planning.plan import Plan


def draw(plan: Plan, graph: Graph, *, steps_per_second: float) -> str:
    """Draws the groups of a plan with their roles, and the edges between groups with bytes per second.

    The data rates follow from the shapes of the graph, at `steps_per_second` steps of all environments together.
    """
    partition, edges = plan.partition, interfaces(graph)
    rate = steps_per_second / graph.loops.batch_size
    lines = [f"{partition.name} ({plan.place}), {format_count(graph.loops.num_envs, 'environment')}", ""]
    for role in graph_roles(graph, partition).values():
        lines += [*_box(role, graph.loops.num_envs), ""]
    lines.append(f"at {steps_per_second:,.0f} steps/s, {rate:,.2f} iterations/s:")
    lines += [_edge(partition, edges[edge.name], rate) for edge in partition.cut_edges]
    lines += _reductions(partition, edges["gradients"], rate)
    if not partition.cut_edges and partition.groups[0].replicas == 1:
        lines.append("  nothing leaves the program")
    return "\n".join(lines)


def _box(role: Role, num_envs: int) -> list[str]:
    group = role.group
    title = f" {group.name} x {group.replicas} "
    waits = "" if group.synchronous else ", asynchronous"
    share = (
        ""
        if group.fragments == ("update",)
        else f"{format_count(num_envs // group.replicas, 'environment')} each, "
    )
    owned = [part for part in OwnedPart if part in role.owned_parts]
    rows = [
        " + ".join(group.fragments),
        f"{share}device: {group.device}{waits}",
        f"stages:   {', '.join(role.stages)}",
        f"snapshot: {', '.join(owned) or 'nothing'}",
        f"if lost:  {'replaced alone' if role.replaceable else 'all begin again from the last snapshot'}",
    ]
    width = max(len(title) + 2, *(len(row) + 2 for row in rows))
    return [
        f"  +-{title}{'-' * (width - len(title) - 1)}+",
        *(f"  | {row:<{width - 2}} |" for row in rows),
        f"  +{'-' * width}+",
    ]


def _edge(partition: Partition, interface: Interface, rate: float) -> str:
    edge = interface.edge
    source, target = partition.holder(edge.source), partition.holder(edge.target)
    copies = target.replicas if edge.name in ("weights", "parameters") else 1
    senders = source.replicas if edge.name == "gradients" and not source.synchronous else 1
    carried = interface.bytes_per_iteration * copies * senders
    way = f"{source.name} -> {target.name}"
    return f"  {way:<26} {edge.name:<11} {_bytes(carried * rate):>12}/s  ({_bytes(carried)} an iteration)"


def _reductions(partition: Partition, gradients: Interface, rate: float) -> list[str]:
    group = partition.holder("gradients")
    if group.replicas == 1 or not group.synchronous:
        return []
    carried = gradients.bytes_per_iteration * group.replicas
    way = f"{group.name} = {group.name}"
    return [f"  {way:<26} {'reduction':<11} {_bytes(carried * rate):>12}/s  ({_bytes(carried)} an iteration)"]


def _bytes(count: int | float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError
