"""Runs examples/tour.ipynb and keeps what its cells print and show.

    python scripts/notebook.py

Needs the extras `plot` and `render`, but no Jupyter: a cell's last line is shown as a picture if it can be one
(`_repr_png_`), and by `repr` otherwise.
"""

import ast
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples/tour.ipynb"


def main() -> None:
    """Runs the cells in order, and writes the notebook with their outputs."""
    notebook = json.loads(NOTEBOOK.read_text())
    names: dict[str, Any] = {}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        number += 1
        printed, value = run_cell("".join(cell["source"]), names)
        cell["execution_count"] = number
        cell["outputs"] = outputs_of(printed, value, number)
        print(f"cell {number}: {printed}{value!r}"[:200], flush=True)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def run_cell(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """Runs a cell with the names of those before. Returns what it printed, and the value of its last line."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last else None  # type: ignore
    return printed.getvalue(), value


def outputs_of(printed: str, value: Any, number: int) -> list[dict[str, Any]]:
    """Returns the outputs of a cell in the format of notebooks."""
    outputs: list[dict[str, Any]] = []
    if printed:
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    if value is not None:
        shown = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_png_"):
            shown = {"image/png": base64.b64encode(value._repr_png_()).decode(), "text/plain": ["picture"]}
        result = {"data": shown, "execution_count": number, "metadata": {}, "output_type": "execute_result"}
        outputs.append(result)
    return outputs


if __name__ == "__main__":
    main()
