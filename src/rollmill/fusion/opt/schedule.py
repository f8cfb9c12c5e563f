"""The order in which a kernel computes the nodes of a program, with branches and loops.

A schedule is a list of items, operands before their users. A guarded region becomes one branch, after all its
inputs. Scalars of a long program are divided into segments. Code generators translate the list item by item,
without further decisions.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from rollmill.fusion.ir import Loop, Node, Program, toposort
from rollmill.fusion.opt.branches import GuardedRegion, guarded_regions
from rollmill.fusion.opt.segments import segments_of

MIN_SEGMENT = 100
"""Minimum number of scalars of a long program that are worth a segment."""


class Emit(NamedTuple):
    """Item of a schedule that computes a node."""

    node: Node


class EmitLoop(NamedTuple):
    """Item of a schedule that computes a loop."""

    node: Node
    body: "Schedule"
    condition: "Schedule | None"
    """Schedule that decides whether another iteration follows. None for a counted loop."""

    @property
    def loop(self) -> Loop:
        """The loop that this item computes."""
        return self.node.attributes[0]


class If(NamedTuple):
    """Item of a schedule that runs its body if a condition is true for any environment of a block."""

    condition: Node
    body: tuple["Item", ...]
    results: tuple[Node, ...]
    """Nodes of the body that are used after it. Their values do not matter if the branch is not taken."""


class Segment(NamedTuple):
    """Item of a schedule that holds part of a long program, which Triton analyses separately."""

    body: tuple["Item", ...]
    results: tuple[Node, ...]
    """Nodes of the body that are used after it."""


class Accumulate(NamedTuple):
    """Item of a schedule that adds to a sum, after the nodes that the sum uses."""

    number: int


Item: TypeAlias = Emit | EmitLoop | If | Segment | Accumulate


class Schedule(NamedTuple):
    """A program, and the items that compute it in order. Its inputs are available from the start."""

    program: Program
    items: tuple[Item, ...]


def schedule_of(program: Program, *, segmented: bool = False, sums: Sequence[Sequence[Node]] = ()) -> Schedule:
    """Returns a program's schedule.

    If `segmented`, a long program may be divided into segments. `sums` holds, for each sum over environments, the
    nodes that it uses. A sum is accumulated as soon as these nodes are available, so that they need not be kept. A
    program with `sums` is not divided, but the bodies of its loops may be.
    """
    scheduler = _Scheduler(program, segmented, sums)
    scheduler.order()
    return Schedule(program, tuple(scheduler.items))


class _Scheduler:
    """The items of a program so far, and the nodes that are available behind them."""

    def __init__(self, program: Program, segmented: bool, sums: Sequence[Sequence[Node]]) -> None:
        self.items: list[Item] = []
        self._nodes, self._outputs = program.nodes(), program.outputs
        self._segmented, self._sums = segmented, dict(enumerate(sums))
        # In the order in which they become available, which is also the order of a branch's results.
        self._available = dict.fromkeys(node for node in self._nodes if node.op == "input")
        self._waiting = {
            node: region for region in guarded_regions(self._nodes, program.outputs) for node in region.nodes
        }

    def order(self) -> None:
        segments = segments_of(self._nodes) if self._segmented and not self._sums else []
        if len(segments) < 2:
            self._emit_each(self._nodes)
            return
        for segment in segments:
            if segment.of_rows or len(segment.nodes) < MIN_SEGMENT:
                self._emit_each(segment.nodes)
            else:
                body, results = self._in_branch(lambda nodes=segment.nodes: self._emit_segment(nodes))
                self.items.append(Segment(body, results))

    def _emit_each(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._emit_once(node)
            self._accumulate()

    def _emit_once(self, node: Node) -> None:
        """Emits a node that is neither available nor in a region, after the regions that it reads."""
        if node in self._available or node in self._waiting:
            return
        read = [self._waiting[operand] for operand in node.operands if operand in self._waiting]
        for region in dict.fromkeys(read):
            self._emit_region(region)
        self._emit(node)

    def _emit(self, node: Node) -> None:
        self._available[node] = None
        if node.op != "loop":
            self.items.append(Emit(node))
            return
        loop: Loop = node.attributes[0]
        body = schedule_of(loop.body, segmented=self._segmented)
        condition = None if loop.condition is None else schedule_of(loop.condition, segmented=self._segmented)
        self.items.append(EmitLoop(node, body, condition))

    def _accumulate(self) -> None:
        """Emits each sum whose nodes are all available, once."""
        for number, nodes in list(self._sums.items()):
            if all(node in self._available for node in nodes):
                self.items.append(Accumulate(number))
                del self._sums[number]

    # --- branches ----------------------------------------------------------------------------------------

    def _emit_region(self, region: GuardedRegion) -> None:
        # The region has been emitted. Of its nodes, only the results are available after its branch.
        if not self._available.keys().isdisjoint(region.results):
            return
        inside = set(region.nodes)
        read = [operand for node in region.nodes for operand in node.operands if operand not in inside]
        for node in dict.fromkeys([*read, region.condition]):
            self._emit_tree(node)
        body, results = self._in_branch(lambda: self._emit_body(region))
        self.items.append(If(region.condition, body, results))

    def _emit_tree(self, root: Node) -> None:
        """Emits a node, and all nodes that it depends on."""
        # A list, because emitting a region makes nodes available, and the walk must not depend on that.
        for node in list(toposort([root], self._available)):
            if node in self._waiting:
                self._emit_region(self._waiting[node])
            self._emit_once(node)

    def _emit_body(self, region: GuardedRegion) -> Sequence[Node]:
        for node in region.nodes:
            self._emit(node)
        return region.results

    def _emit_segment(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Emits the nodes of a segment, and returns those that later nodes read."""
        outside = set(self._available)
        self._emit_each(nodes)
        # This includes nodes of regions that are not emitted yet, whose operands must be results as well.
        left = [node for node in self._nodes if node not in self._available]
        read = {operand for node in left for operand in node.operands}.union(self._outputs)
        return [node for node in self._available if node in read and node not in outside]

    def _in_branch(self, emit: Callable[[], Sequence[Node]]) -> tuple[tuple[Item, ...], tuple[Node, ...]]:
        """Returns the items added by `emit`. Only the nodes returned by it are available afterwards."""
        items, available = self.items, self._available
        self.items, self._available = [], dict(available)
        results = tuple(emit())
        body, self.items = tuple(self.items), items
        self._available = available | dict.fromkeys(results)
        return body, results
