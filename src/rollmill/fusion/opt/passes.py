"""Lists the passes over programs, and prints their results for `rollmill explain --ir`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rollmill.fusion.ir import Node, Program
from rollmill.fusion.ir.text import INDENT, NodeNames, inputs_line
from rollmill.fusion.opt.branches import GuardedRegion, guarded_regions
from rollmill.fusion.opt.schedule import Accumulate, EmitLoop, If, Item, Schedule, Segment, schedule_of
from rollmill.fusion.opt.segments import ProgramSegment, segments_of
from rollmill.fusion.opt.skinny_matmul import MAX_SKINNY, SkinnyMatmuls, find_skinny_matmuls, scattered_stacks


class Pass(NamedTuple):
    """An analysis pass over programs, which can print its result."""

    name: str
    run: Callable[[Program], Any]
    lines: Callable[[Any, NodeNames], Iterator[str]]
    """Formats the result of `run` in lines."""

    def text(self, program: Program) -> str:
        """Runs the pass on a program, and returns its result in printed form."""
        return "\n".join(self.lines(self.run(program), NodeNames(program))) or "none"


def schedule_lines(schedule: Schedule, names: NodeNames) -> Iterator[str]:
    """Yields a schedule in printed form, one line per node, indented by branches and loops."""
    yield inputs_line(schedule.program, names)
    yield from (INDENT + line for item in schedule.items for line in _item_lines(item, names))
    yield f"return {names.all_of(schedule.program.outputs)}"


def _item_lines(item: Item, names: NodeNames) -> Iterator[str]:
    match item:
        case If(condition, body, results):
            yield from _block(f"if any {names.of(condition)} -> {names.all_of(results)}:", body, names)
        case Segment(body, results):
            yield from _block(f"segment -> {names.all_of(results)}:", body, names)
        case Accumulate(number):
            yield f"accumulate sum {number}"
        case EmitLoop(node, body, condition):
            yield names.line(node)
            for title, part in (("while:", condition), ("do:", body)):
                if part is not None:
                    yield INDENT + title
                    yield from (INDENT * 2 + line for line in schedule_lines(part, NodeNames(part.program)))
        case _ if item.node.op not in ("constant", "uniform"):
            yield names.line(item.node)


def _block(head: str, body: Sequence[Item], names: NodeNames) -> Iterator[str]:
    yield head
    yield from (INDENT + line for item in body for line in _item_lines(item, names))


def _region_lines(regions: Sequence[GuardedRegion], names: NodeNames) -> Iterator[str]:
    for condition, nodes, results in regions:
        yield f"where {names.of(condition)}: {len(nodes)} nodes -> {names.all_of(results)}"


def _segment_lines(segments: Sequence[ProgramSegment], names: NodeNames) -> Iterator[str]:
    for of_rows, nodes in segments:
        first = next((node for node in nodes if node.op not in ("input", "constant", "uniform")), None)
        begin = "" if first is None else f", from {names.of(first)} on"
        yield f"{len(nodes)} nodes with rows{begin}" if of_rows else f"{len(nodes)} scalars{begin}"


def _skinny_matmuls(program: Program) -> SkinnyMatmuls:
    nodes = program.nodes()
    return find_skinny_matmuls(nodes, program.outputs, scattered_stacks(nodes, program.outputs, MAX_SKINNY))


def _skinny_lines(found: SkinnyMatmuls, names: NodeNames) -> Iterator[str]:
    for product, bias in found.first.items():
        addend = "" if bias is None else f", with {names.of(bias.row)} as one more row"
        yield f"{names.of(product)}: product of {len(product.operands[0].operands)} scalars{addend}"
    heads: dict[Any, list[Node]] = {}
    for node, (head, _) in found.heads.items():
        heads.setdefault(head, []).append(node)
    for head, nodes in heads.items():
        yield f"{names.all_of(nodes)}: columns of one product of {names.of(head.row)}"


PASSES = (
    Pass("branches", lambda program: guarded_regions(program.nodes(), program.outputs), _region_lines),
    Pass("segments", lambda program: segments_of(program.nodes()), _segment_lines),
    Pass("skinny products", _skinny_matmuls, _skinny_lines),
    Pass("schedule", lambda program: schedule_of(program, segmented=True), schedule_lines),
)
"""The passes that `rollmill explain --ir` shows, for Triton and without sums.

`schedule_of` finds branches and segments itself, and the Triton code generator finds skinny products. The CPU
backend uses only the branches."""
