"""The code that the words of a training name: modules, files of options, and clusters."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rollmill.api.trust import cluster_name

PREFIXES = 2
"""Colons in the id of an environment that names a module, `gymnasium:MODULE:ID`."""


class NamedCode(NamedTuple):
    """What words name."""

    modules: frozenset[str]
    """Modules of `--import`, of distribution policies and of environments."""
    files: frozenset[str]
    """Files of `--config`, which may name all of these."""
    others: frozenset[str]
    """Files and clusters, as names that are trusted."""


def named_by(words: Sequence[str]) -> NamedCode:
    """The code that the words of a training name.

    More is found than a parser would: whatever follows an option counts as a value of it, so that no odd order of
    words hides a name.
    """
    modules, files, clusters = set(), set(), set()
    for option, value in _values(words):
        match option:
            case "import":
                modules.add(value)
            case "distribution" if ":" in value:
                modules.add(value.partition(":")[0])
            case "config":
                files.add(value)
            case "cluster" if ":" in value:
                clusters.add(value)
    environments = [word for word in words[:PREFIXES] if not word.startswith("-")]
    modules |= {word.partition(":")[2].rpartition(":")[0] for word in environments}
    others = {*map(cluster_name, clusters), *(f"config={file}" for file in files)}
    return NamedCode(frozenset(modules - {""}), frozenset(files), frozenset(others))


def _values(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each word with the option that it may be a value of."""
    option = ""
    for word in words:
        if not word.startswith("--"):
            yield option, word
            continue
        name, equals, value = word.partition("=")
        option = name.lstrip("-").replace("_", "-")
        if equals:
            yield option, value
