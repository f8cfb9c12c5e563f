"""Rules that hold for every program, on which a kernel's source may rely."""

from rollmill.fusion import Program
from rollmill.fusion.ir import OPERATIONS, ROWS, STRUCTURAL, TYPED, Node

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "is_finite")


def check_program(program: Program) -> None:
    seen: set[Node] = set()
    for place, node in enumerate(program.inputs):
        assert node.op == "input" and node.attributes == (place,)
    for node in program.nodes():
        assert seen.issuperset(node.operands), f"{node} comes before its operands"
        seen.add(node)
        check_node(node, program)


def check_node(node: Node, program: Program) -> None:
    if node.op == "input":
        assert program.inputs[node.attributes[0]] is node, f"{node} is an input of another program"
    elif node.op in OPERATIONS:
        check_arithmetic(node)
    elif node.op in TYPED:
        (operand,) = node.operands
        assert operand.width in (None, node.width) and operand.dtype != node.dtype
        assert node.op == "convert" or operand.dtype.itemsize == node.dtype.itemsize
    elif node.op in ROWS:
        check_row(node)
    elif node.op == "loop":
        check_loop(node)
    elif node.op == "item":
        (loop,) = node.operands
        output = loop.attributes[0].body.outputs[node.attributes[0]]
        assert (output.dtype, output.width) == (node.dtype, node.width)
    else:
        assert node.op in STRUCTURAL
        assert node.op != "table" or node.operands[0].dtype == "int32"


def check_arithmetic(node: Node) -> None:
    widths = {operand.width for operand in node.operands}
    assert widths - {None} == ({node.width} - {None}), f"{node} of {node.operands}"
    kinds = [operand.dtype for operand in node.operands]
    if node.op == "select":
        assert kinds[0].kind == "b"
        kinds = kinds[1:]
    assert len(set(kinds)) == 1, f"{node} of {node.operands}"
    assert node.dtype == ("bool" if node.op in COMPARISONS else kinds[0]), f"{node} of {node.operands}"


def check_row(node: Node) -> None:
    first = node.operands[0]
    assert all(operand.dtype == node.dtype for operand in node.operands) or node.op == "dot"
    match node.op:
        case "splat" | "stack":
            assert all(operand.width is None for operand in node.operands)
            assert node.width and (node.op == "splat" or len(node.operands) == node.width)
        case "column":
            assert node.width is None and 0 <= node.attributes[0] < first.width
        case "dot":
            _, row, column, size, transposed = node.attributes
            across, start = (first.width, row) if transposed else (node.width, column)
            assert row >= 0 and column >= 0 and start + across <= size
        case _:
            assert node.width is None and first.width


def check_loop(node: Node) -> None:
    loop = node.attributes[0]
    assert (loop.condition is None) != (loop.trip_count is None)
    carried = len(loop.body.outputs)
    asked = loop.condition.inputs[carried:] if loop.condition else ()
    taken = [*loop.body.inputs, *asked]
    assert len(taken) == len(node.operands)
    for operand, inside in zip(node.operands, taken, strict=True):
        assert (operand.dtype, operand.width) == (inside.dtype, inside.width)
    for before, after in zip(loop.body.inputs, loop.body.outputs, strict=False):
        assert (before.dtype, before.width) == (after.dtype, after.width)
    check_program(loop.body)
    if loop.condition:
        (goes_on,) = loop.condition.outputs
        assert goes_on.dtype.kind == "b" and goes_on.width is None
        check_program(loop.condition)
