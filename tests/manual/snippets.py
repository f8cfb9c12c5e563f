"""The snippets of README and manual: fenced blocks, and the comments that say how tests run them.

A comment directly above a block is about that block, and is not shown to readers:

    <!-- snippet: 500000 => 2048; slow -->

- `A => B`: tests run it with B in the place of A, which has to occur.
- `small`: commands that train do so with the sizes of `SMALL`. Nothing else is made smaller than readers see it.
- `slow`: run by `make test-slow` alone.
- `not run: REASON`: one of `REASONS`; its options and names are checked all the same.

In commands, RUN and SWEEP stand for the newest run and sweep, as in the text. A block with `title="mine.py"` is
written to that file, after what earlier blocks of the title wrote; other blocks of Python are one program.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_LANGUAGES = ("python", "bash")
OTHER_LANGUAGES = ("text", "toml", "json", "yaml", "xml")
REASONS = {
    "GPU": "needs a GPU",
    "cluster": "needs several hosts",
    "network": "downloads something",
    "account": "needs an account with another service",
    "long": "takes many minutes, and has no smaller size",
    "person": "waits for a person",
    "extra": "needs a package that the tests do not install",
    "example": "is about a package that exists on this page alone",
}
BLOCK = re.compile(
    r"^(?:<!-- snippet: (?P<marks>[^\n]*) -->\n)?```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<text>.*?)^```$",
    re.M | re.S,
)
SMALL = "--total-timesteps 2048 --num-envs 8 --num-steps 32"
TRAINS = re.compile(
    r"^((?:PYTHONPATH=\S+ )?rollmill (?:train|sweep (?!--resume)|plan [^#]*--search-plan)[^#\n]*?)(?= *(#.*)?$)",
    re.M,
)


class Snippet(NamedTuple):
    """A block of a page, as tests run it."""

    page: str
    line: int
    """Line of the page that its text begins with."""
    language: str
    title: str | None
    text: str
    slow: bool
    not_run: str | None

    @property
    def place(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.line}"


def snippets_of(page: Path) -> list[Snippet]:
    """All blocks of a page in order.

    Raises:
        ValueError: a comment is not as described above.
    """
    text = page.read_text()
    return [snippet(page, text, match) for match in BLOCK.finditer(text)]


def snippet(page: Path, text: str, match: re.Match[str]) -> Snippet:
    """One block.

    Raises:
        ValueError: a comment is not as described above.
    """
    line = text.count("\n", 0, match.start("text")) + 1
    items = items_of(match["marks"] or "")
    reasons = [item.removeprefix("not run: ") for item in items if item.startswith("not run: ")]
    replacements = [item for item in items if " => " in item]
    if unknown := set(items) - {"slow", "small", *replacements, *(f"not run: {reason}" for reason in REASONS)}:
        raise ValueError(f"{page}:{line}: unknown marks: {', '.join(sorted(unknown))}")
    shown = match["text"]
    if "small" in items:
        shown = TRAINS.sub(rf"\1 {SMALL}", shown.replace("\\\n", " "))
    for old, new in map(replacement, replacements):
        if old not in shown:
            raise ValueError(f"{page}:{line}: the block has no {old!r}")
        shown = shown.replace(old, new)
    name = str(page.relative_to(ROOT))
    return Snippet(
        name, line, match["language"], match["title"], shown, "slow" in items, reasons[0] if reasons else None
    )


def items_of(marks: str) -> list[str]:
    """The items of a comment."""
    return [item.strip() for item in marks.split(";") if item.strip()]


def replacement(item: str) -> tuple[str, str]:
    """Old and new text of `A => B`."""
    old, _, new = item.partition(" => ")
    return old, new


def commands_of(text: str) -> list[str]:
    """The commands of a block, without comments; a line that ends with a backslash goes on in the next."""
    lines = text.replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s)#.*", "", line).strip())]
