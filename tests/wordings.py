"""Errors by code: a test names an error by its code, and `wordings.txt` alone holds its class and its wording.

`python tests/wordings.py` writes that file anew from the source. A code stays when its error is reworded.
"""

import ast
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "rollmill"
SNAPSHOT = Path(__file__).with_name("wordings.txt")
FILLERS = {"a", "an", "it", "its", "of", "that", "the", "which"}
WORDS = 5
"""Words of a new code, more where it is taken."""
SIMILAR = 0.6
"""Similarity from which on a new wording takes the code of one that is gone."""


class Wording(NamedTuple):
    """What an error says. `{}` stands for each value."""

    kind: str
    """The class of the error."""
    text: str


def raises(code: str, *values: object, kind: type[BaseException] | None = None) -> Any:
    """Returns a `pytest.raises` for an error that tells `values`. kind: the class of an error that wraps it."""

    def check(error: BaseException) -> bool:
        kinds = [base.__name__ for base in type(error).__mro__]
        assert kind or WORDINGS[code].kind in kinds, f"{code} is a {WORDINGS[code].kind}, got {error!r}"
        assert tells(code, str(error), *values), f"expected {WORDINGS[code].text} with {values}, got {error}"
        return True

    return pytest.raises(kind or Exception, check=check)


def tells(code: str, text: str, *values: object) -> bool:
    """Whether `text` contains the wording of an error, and `values`. Line breaks count as spaces."""
    plain, position = _plain(text), 0
    for literal in WORDINGS[code].text.split("{}"):
        position = plain.find(literal.strip(), position)
        if position < 0:
            return False
        position += len(literal.strip())
    return all(_plain(str(value)) in plain for value in values)


def source_wordings() -> set[Wording]:
    """Collects the texts with which the source makes errors."""
    modules = [list(ast.walk(ast.parse(file.read_text()))) for file in SOURCE.rglob("*.py")]
    kinds = _error_classes([node for nodes in modules for node in nodes if isinstance(node, ast.ClassDef)])
    found = (
        Wording(_name(call.func), _plain(_text(text)))
        for nodes in modules
        for call in nodes
        if isinstance(call, ast.Call) and _name(call.func) in kinds
        for part in (*call.args, *(word.value for word in call.keywords))
        for text in _made_by(part, nodes)
    )
    return {wording for wording in found if re.search(r"[A-Za-z]{2}", wording.text)}


def updated(old: dict[str, Wording], wordings: Iterable[Wording]) -> dict[str, Wording]:
    """Returns the codes of `wordings`: the old ones where these stay or are reworded, and new ones."""
    new = set(wordings) - set(old.values())
    codes = {code: wording for code, wording in old.items() if wording in wordings}
    gone = {old[code]: code for code in old.keys() - codes}
    for wording in sorted(new):
        texts = {before.text: before for before in gone if before.kind == wording.kind}
        similar = difflib.get_close_matches(wording.text, texts, n=1, cutoff=SIMILAR)
        codes[gone.pop(texts[similar[0]]) if similar else _new_code(wording, {*old, *codes})] = wording
    return dict(sorted(codes.items()))


def _error_classes(classes: list[ast.ClassDef]) -> set[str]:
    """Returns the names of the exceptions among `classes`."""
    names: set[str] = set()
    while (
        more := {node.name for node in classes if {_name(base) for base in node.bases} & {*names, "Exception"}}
        - names
    ):
        names |= more
    return names


def _made_by(part: ast.expr, nodes: list[ast.AST]) -> list[ast.expr]:
    """Returns what a module computes `part` from: results of its own function, values of its variable."""
    match part:
        case ast.IfExp(body=one, orelse=other):
            return [one, other]
        case ast.Name(id=name):
            return [
                node.value for node in nodes if isinstance(node, ast.Assign) and _name(node.targets[0]) == name
            ]
        case ast.Call(func=function):
            named = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == _name(function)]
            inner = [
                node.value for function in named for node in ast.walk(function) if isinstance(node, ast.Return)
            ]
            return [value for value in inner if value is not None]
        case _:
            return [part]


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(_text, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case _:
            return "{}"


def _plain(text: str) -> str:
    return " ".join(text.split())


def _new_code(wording: Wording, taken: set[str]) -> str:
    words = re.findall(r"[a-z0-9]+", wording.text.lower().replace("'", ""))
    words = [word for word in words if word not in FILLERS]
    if len(words) < 2:
        words.insert(0, wording.kind.lower())
    longer = ("-".join(words[:count]) for count in range(min(WORDS, len(words)), len(words) + 1))
    numbered = (f"{'-'.join(words)}-{number}" for number in range(2, len(taken) + 3))
    return next(code for code in (*longer, *numbered) if code not in taken)


def read() -> dict[str, Wording]:
    """Reads the snapshot, one line of code, class and wording for each error."""
    lines = (line.split(": ", 2) for line in SNAPSHOT.read_text().splitlines())
    return {code: Wording(kind, text) for code, kind, text in lines}


WORDINGS = read() if SNAPSHOT.exists() else {}

if __name__ == "__main__":
    lines = (f"{code}: {kind}: {text}\n" for code, (kind, text) in updated(WORDINGS, source_wordings()).items())
    SNAPSHOT.write_text("".join(lines))
