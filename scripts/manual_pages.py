"""Writes the pages of the manual that follow from other files: python scripts/manual_pages.py.

`docs/commands.md` is made of what `--help-all` prints, `docs/llms.txt` of the navigation and the pages themselves,
and `docs/reference/index.md` of the names that `import rollmill` offers.
"""

import contextlib
import io
import os
import re
from pathlib import Path
from typing import NamedTuple

import yaml

import rollmill as package
from rollmill.cli import main as rollmill
from rollmill.cli.main import COMMANDS  # type: ignore[attr-defined]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SUBJECTS = {name: ["ppo"] for name in ("train", "plan", "warm", "profile")} | {"explain": ["fusion"]}
"""Words that follow a command before `--help`, where the options depend on them."""

LIKE_TRAIN = ("plan", "warm", "profile", "explain")
ELSEWHERE = ("algorithm", "network")
"""Groups of options that the pages on algorithms explain."""

HEAD = """# Command line

<!-- Written by python scripts/manual_pages.py from what the commands print. -->

This page lists all commands and their options, as `rollmill COMMAND --help-all` prints them. You can
write integers as `1e6`. The last section lists all [exit codes](#exit-codes).

| command | |
|---|---|
"""


EXIT_CODES = {
    0: ("The command succeeded. A [hook](hooks.md) may have stopped the run early.", "everything"),
    1: (
        "The run failed, for example because of a NaN, a failing environment or hook, lost workers, or a full "
        "disk. For `sweep`: a trial failed. For `serve`: several batches in a row failed. For `help WORD`: no "
        "option contains the word. For a command that prints its result: the output could not be written.",
        "the newest checkpoint; continue with `rollmill resume`",
    ),
    2: ("The command is not valid. For `doctor RUN`: the run is damaged.", "all existing files"),
    3: ("A device ran out of memory.", "the newest checkpoint"),
    4: ("A GPU failed, or another process made it fail.", "the newest checkpoint"),
    129: ("SIGHUP: the terminal was closed.", "a final checkpoint"),
    130: ("SIGINT: Ctrl-C was pressed.", "a final checkpoint; after a second Ctrl-C, the newest checkpoint"),
    140: (
        "SIGUSR2: a batch system announced the end of the job.",
        "a final checkpoint; nothing if training had not begun",
    ),
    141: (
        "The reader of the output exited, as in `rollmill list \\| head`. Training continues without a reader.",
        "",
    ),
    143: ("SIGTERM.", "a final checkpoint, or the newest checkpoint if saving took too long"),
}
"""What each exit code means, and what is kept then."""


REFERENCE_HEAD = """# All names

<!-- Written by python scripts/manual_pages.py from the names that `import rollmill` offers. -->

This page lists all public names of `import rollmill`. `help(rollmill.NAME)` prints the same description as the
reference page.

| Name | |
|---|---|
"""


class Option(NamedTuple):
    """An entry of a help text."""

    group: str
    names: str
    meaning: str
    default: str


def help_of(words: list[str]) -> str:
    """The text that `rollmill ... --help-all` prints."""
    printed = io.StringIO()
    os.environ["COLUMNS"] = "110"
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        rollmill([*words, "--help-all"])
    return printed.getvalue()


def options_of(text: str) -> list[Option]:
    """The options of a help text, in its order."""
    options: list[Option] = []
    group = ""
    for line in text.splitlines():
        if re.match(r"^[a-z ]+:$", line):
            group = line[:-1]
        elif entry := re.match(r"^  (-\S.*?|[\[A-Z][A-Z\]]*)(?:  +(.*))?$", line):
            options.append(Option(group, entry[1], entry[2] or "", ""))
        elif options and line.startswith(" " * 10):
            options[-1] = options[-1]._replace(meaning=joined(options[-1].meaning, line.strip()))
        elif line.strip():
            group = ""
    return [with_default(option) for option in options if option.names != "-h, --help"]


def joined(text: str, more: str) -> str:
    """Two lines as one; a word that was broken at its hyphen becomes whole."""
    return text + more if re.search(r"\w-$", text) else f"{text} {more}".strip()


def with_default(option: Option) -> Option:
    """The option with its default apart from its meaning."""
    found = re.search(r" ?\(default: (.*?)\)\.?$", option.meaning)
    if found is None:
        return option._replace(meaning=option.meaning.replace(" (repeatable)", ""))
    return option._replace(meaning=option.meaning[: found.start()], default="" if found[1] == "none" else found[1])


def table(options: list[Option]) -> str:
    """The options as a table."""
    return "\n".join(["| option | meaning | default |", "| --- | --- | --- |", *map(row, options)])


def row(option: Option) -> str:
    """The option as a row of a table."""
    default = f"`{option.default}`" if option.default.strip() else ""
    return f"| `{cell(option.names)}` | {cell(option.meaning)} | {default} |"


def cell(text: str) -> str:
    """Text that a table can hold."""
    return text.replace("|", "\\|")


def section(name: str) -> str:
    """The part of the page on one command."""
    text = help_of([name, *SUBJECTS.get(name, [])])
    usage, _, rest = text.partition("\n\n")
    usage = usage.replace(" ppo ", " ALGORITHM ").replace("usage: ", "").replace("\n       ", "\n")
    options = [one for one in options_of(text) if one.group not in ELSEWHERE or one.names.startswith("--recipe")]
    also = ""
    if name in LIKE_TRAIN:
        known = {option.names for option in options_of(help_of(["train", "ppo"]))} - {"ENVIRONMENT"}
        options = [option for option in options if option.names not in known]
        parts = "environment and algorithm" if name == "explain" else "environment, algorithm and run"
        also = f"[`rollmill train`](#rollmill-train) lists the options for {parts}.\n\n"
    if name in ("train", "sweep"):
        page = "[Algorithms](algorithms/index.md#hyperparameters)"
        also = f"{page} lists the options for hyperparameters and networks.\n\n"
    shown = table(options) + "\n" if options else ""
    summary = COMMANDS[name].summary.partition(":")[0]
    summary = f"{summary[0].upper()}{summary[1:]}."
    return f"## rollmill {command_name(name)}\n\n{summary}\n\n```text\n{usage}\n```\n\n{also}{shown}"


def command_name(name: str) -> str:
    """The command as it is typed."""
    return "explain fusion" if name == "explain" else name


def command_page() -> str:
    """The page on the command line."""
    anchor = {name: f"rollmill-{command_name(name).replace(' ', '-')}" for name in COMMANDS}
    rows = [f"| [`{name}`](#{anchor[name]}) | {COMMANDS[name].summary.partition(':')[0]} |" for name in COMMANDS]
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(map(section, COMMANDS)) + exit_codes()


def exit_codes() -> str:
    """The part of the page on exit codes."""
    rows = [f"| {code} | {meaning} | {kept} |" for code, (meaning, kept) in EXIT_CODES.items()]
    head = ["## Exit codes", "", "| code | meaning | what is kept |", "| --- | --- | --- |"]
    return "\n".join(["", *head, *rows, ""])


def navigation() -> list[tuple[str, str, str]]:
    """Section, title and file of each page, in the order of the navigation."""
    pages = []
    for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]:
        ((title, inside),) = entry.items()
        for page in inside if isinstance(inside, list) else [entry]:
            ((name, file),) = page.items()
            pages.append((title if isinstance(inside, list) else "", name, file))
    return pages


def first_sentence(page: str) -> str:
    """The first sentence of a page's text."""
    text = re.sub(r"<!--.*?-->|^```.*?^```$", "", page, flags=re.M | re.S)
    text = re.sub(r"^[#!].*$", "", text, flags=re.M)
    paragraphs = [part for part in re.split(r"\n\s*\n", text) if part.strip() and part.strip()[0] not in "|-:"]
    words = " ".join(paragraphs[0].split()) if paragraphs else ""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words).replace("*", "")
    return re.split(r"(?<=[A-Za-z)`0-9][.:]) (?=[A-Z`])", plain)[0].rstrip(":.") + "."


def text_of(file: str) -> str:
    """A page's text, with the file that it includes."""
    text = (DOCS / file).read_text()
    return re.sub(r'^--8<-- "(.*)"$', lambda found: (ROOT / found[1]).read_text(), text, flags=re.M)


def llms_txt() -> str:
    """The index of pages for language models."""
    lines = ["# Rollmill", "", f"> {first_sentence((DOCS / 'index.md').read_text())}"]
    part = None
    for group, title, file in navigation():
        if group != part:
            lines += ["", f"## {group or 'More'}", ""]
            part = group
        address = re.sub(r"(^|/)index$", r"\1", file.removesuffix(".md"))
        address = f"{address.rstrip('/')}/" if address else "./"
        lines.append(f"- [{title}]({address}): {first_sentence(text_of(file))}")
    return "\n".join(lines) + "\n"


def reference_page() -> str:
    """The page that lists the public names, each with its page of the reference and its first sentence."""
    pages = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        pages |= dict.fromkeys(re.findall(r"^::: (\S+)$", page.read_text(), re.M), page.name)
    rows = []
    for name in sorted(package.__all__, key=str.lower):
        public = getattr(package, name)
        anchor = f"{pages[public.__module__]}#{public.__module__}.{name}"
        rows.append(f"| [`{name}`]({anchor}) | {cell(first_sentence(public.__doc__))} |")
    return REFERENCE_HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    (DOCS / "reference/index.md").write_text(reference_page())
    (DOCS / "commands.md").write_text(command_page())
    (DOCS / "llms.txt").write_text(llms_txt())
