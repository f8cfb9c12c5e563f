"""Counts what the source looks like: files, lines, comments, import circles, names of classes.

    python benchmarks/source_numbers.py [--commit COMMIT]

Lines are those that are not blank. A circle of imports is a set of modules each of which imports all others,
directly or not; imports for type checking alone count as well. Writes results/source-numbers.json.
"""

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from measure import RESULTS, write_result

ROOT, PACKAGE = RESULTS.parents[1], "src/rollmill"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", nargs="+", default=["HEAD"])
    options = parser.parse_args()
    numbers = {commit: count(dict(files_of(commit))) for commit in options.commit}
    for commit, found in numbers.items():
        print(commit, found)
    write_result("source-numbers", numbers, directory=RESULTS)


def files_of(commit: str) -> Iterator[tuple[str, str]]:
    """Modules of the package at a commit, by name."""
    archive = subprocess.run(["git", "archive", commit, PACKAGE], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files.getmembers():
            if member.name.endswith(".py") and (file := files.extractfile(member)) is not None:
                parts = PurePosixPath(member.name).relative_to("src").with_suffix("").parts
                yield ".".join(parts).removesuffix(".__init__"), file.read().decode()


def count(modules: dict[str, str]) -> dict[str, Any]:
    """All numbers of the package, and those of its part `fusion`."""
    trees = {name: ast.parse(text) for name, text in modules.items()}
    classes = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if _is_class(node))
    fusion = {name: text for name, text in modules.items() if name.startswith("rollmill.fusion")}
    return {
        "files": len(modules),
        "lines": sum(map(lines, modules.values())),
        "class names defined more than once": sorted(name for name, many in classes.items() if many > 1),
        "import circles": circles(trees),
        "comments per 100 lines": round(100 * _comments(modules) / sum(map(lines, modules.values())), 2),
        "comments per 100 lines in fusion": round(100 * _comments(fusion) / sum(map(lines, fusion.values())), 2),
        "files in fusion": len(fusion),
    }


def lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip())


def _is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef)


def _comments(modules: dict[str, str]) -> int:
    tokens = (token for text in modules.values() for token in tokenize.generate_tokens(io.StringIO(text).readline))
    return sum(token.type == tokenize.COMMENT for token in tokens)


def circles(trees: dict[str, ast.Module]) -> list[list[str]]:
    """Strongly connected sets of modules; what stands in functions is imported later, and does not count."""
    imports = {name: set(_imports(name, tree, trees)) for name, tree in trees.items()}
    reached = {name: _reached(name, imports) for name in imports}
    together = {
        frozenset(other for other in reached[name] if name in reached[other]) | {name}
        for name in imports
        if name in reached[name]
    }
    return sorted(map(sorted, together))


def _imports(name: str, tree: ast.Module, known: dict[str, ast.Module]) -> Iterator[str]:
    for node in _outside_functions(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield from (found for found in (module if module in known else node.module,) if found in known)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node
            yield from _outside_functions(node)


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    found, pending = set(), list(imports[start])
    while pending:
        module = pending.pop()
        if module not in found:
            found.add(module)
            pending.extend(imports[module])
    return found


if __name__ == "__main__":
    main()
