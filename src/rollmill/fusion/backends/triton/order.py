"""The order in which nodes are written in Triton's language, and the branches that they stand behind."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from rollmill.fusion.backends.triton.operations import TYPES
from rollmill.fusion.backends.triton.source import KernelSource
from rollmill.fusion.ir import Node, Program, toposort
from rollmill.fusion.opt.branches import GuardedRegion, guarded_regions
from rollmill.fusion.opt.segments import segments_of

SEPARATOR = "; "
"""Between names of which a node has several."""

Names: TypeAlias = Mapping[Node, str]
"""Names of the nodes that are written."""

ALWAYS = "tl.num_programs(0) > 0"
"""A condition that Triton does not know to hold; LLVM does, and leaves the branch out."""

WORTH_A_BRANCH = 100
"""Scalars of a long program."""


@runtime_checkable
class NodeWriter(Protocol):
    """Writes one node at a time."""

    source: KernelSource
    tiles: dict[Any, str]
    """Names that several nodes share; those made in a branch are not known behind it."""

    def node(self, node: Node, operands: list[str]) -> str:
        """Writes a node whose operands have these names; returns its own."""
        ...

    def shape(self, node: Node) -> str:
        """The shape of the tensor that a node becomes."""
        ...


class Order:
    """Writes the nodes of one program."""

    def __init__(self, writer: NodeWriter, program: Program, inputs: Sequence[str]) -> None:
        """Nothing written but the inputs, which have these names."""
        self._writer = writer
        self._outputs = program.outputs
        self.nodes = program.nodes()
        """Operands first."""
        self._waiting = {
            node: guard for guard in guarded_regions(self.nodes, program.outputs) for node in guard.nodes
        }
        self.names = {node: inputs[int(node.attributes[0])] for node in self.nodes if node.op == "input"}
        """Names of the nodes that are written."""

    def write(self, then: Callable[[Names], None] | None) -> None:
        """Writes all nodes; calls this after each, with the names of all that is written."""
        if then is not None:
            for node in self.nodes:
                self._once(node)
                then(self.names)
            return
        for stretch in segments_of(self.nodes):
            if stretch.of_rows or len(stretch.nodes) < WORTH_A_BRANCH:
                self._each(stretch.nodes)
            else:
                self._behind(ALWAYS, lambda own=stretch.nodes: self._apart(own))

    def _each(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._once(node)

    def _once(self, root: Node) -> None:
        """Writes a node, and its guard where it has one, once everything that they read is written."""
        if root in self.names or root in self._waiting:
            return
        guarded = [self._waiting[operand] for operand in root.operands if operand in self._waiting]
        for guard in dict.fromkeys(guarded):
            self._guard(guard)
        self._node(root)

    def _node(self, node: Node) -> None:
        self.names[node] = self._writer.node(node, [self.names[operand] for operand in node.operands])

    # --- branches ----------------------------------------------------------------------------------------

    def _guard(self, guard: GuardedRegion) -> None:
        if not self.names.keys().isdisjoint(guard.results):
            return
        own = set(guard.nodes)
        read = [operand for node in guard.nodes for operand in node.operands if operand not in own]
        for node in dict.fromkeys([*read, guard.condition]):
            self._tree(node)

        def inside() -> Sequence[Node]:
            for node in guard.nodes:
                self._node(node)
            return guard.results

        self._behind(f"tl.max({self.names[guard.condition]}.to(tl.int32), axis=0) != 0", inside)

    def _tree(self, root: Node) -> None:
        """Writes a node, and all that it needs."""
        for node in list(toposort([root], self.names)):
            if node in self._waiting:
                self._guard(self._waiting[node])
            self._once(node)

    def _apart(self, own: Sequence[Node]) -> Sequence[Node]:
        """Writes nodes; returns those that are read by what is not written yet."""
        before = set(self.names)
        self._each(own)
        left = [node for node in self.nodes if node not in self.names]
        read = {operand for node in left for operand in node.operands}.union(self._outputs)
        return [node for node in self.names if node in read and node not in before]

    def _behind(self, condition: str, inside: Callable[[], Sequence[Node]]) -> None:
        """Writes a branch, which hands out the nodes that `inside` returns; zeros where it is not taken."""
        writer = self._writer
        lines, names, tiles = writer.source.lines, self.names, dict(writer.tiles)
        writer.source.lines, self.names = [], dict(names)
        writer.source.deeper()
        results = {node: self._handed_out(node) for node in inside()}
        writer.source.deeper(-1)
        branch, writer.source.lines, writer.tiles = writer.source.lines, lines, tiles
        for node, found in results.items():
            for name, kind in zip(found.split(SEPARATOR), _kinds(node), strict=True):
                writer.source.line(f"{name} = tl.zeros({writer.shape(kind)}, {TYPES[kind.dtype.name]})")
        writer.source.line(f"if {condition}:")
        writer.source.lines += branch
        self.names = names | results

    def _handed_out(self, node: Node) -> str:
        writer, found = self._writer, []
        for name, kind in zip(self.names[node].split(SEPARATOR), _kinds(node), strict=True):
            found.append(writer.source.fresh())
            whole = f"tl.broadcast_to({name}, {writer.shape(kind)})"
            writer.source.line(f"{found[-1]} = {whole}.to({TYPES[kind.dtype.name]})")
        return SEPARATOR.join(found)


def _kinds(node: Node) -> Sequence[Node]:
    """Nodes of the types and widths that a node's numbers have; a loop has several."""
    return node.attributes[0].body.outputs if node.op == "loop" else (node,)
