"""The command `rollmill list`, which lists algorithms, environments, networks, transforms and recipes."""

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from rollmill.cli.help import two_columns
from rollmill.cli.parsing import parse
from rollmill.cli.shared_options import Imports
from rollmill.core.installation import install_command
from rollmill.core.options import Arg
from rollmill.core.plugins import Plugin
from rollmill.envs import TRANSFORMS, registered
from rollmill.envs.registry import ENVIRONMENTS
from rollmill.networks import registered_networks
from rollmill.networks.registry import NETWORKS
from rollmill.recipes import RECIPES
from rollmill.runs.algorithms import ALGORITHMS
from rollmill.runs.specification import import_modules

Kind: TypeAlias = Literal["algorithms", "environments", "networks", "transforms", "recipes"]
HEADS: Mapping[Kind, str] = {
    "algorithms": "algorithms",
    "environments": "environments",
    "networks": "networks (--network NAME)",
    "transforms": "transforms (--transform NAME[:ARGUMENT])",
    "recipes": "recipes (--recipe NAME)",
}


@dataclass(frozen=True)
class List:
    """List algorithms, environments, networks, transforms and recipes."""

    kind: Annotated[Kind | None, Arg(metavar="[KIND]", positional=True)] = None
    """Kind to list: algorithms, environments, networks, transforms or recipes. Default: all."""
    json: Annotated[bool, Arg(only_on=True)] = False
    """Print a JSON object with an array of names and summaries for each kind."""
    imports: Imports = ()
    """Module to import first, because it registers environments, networks or algorithms."""


def run(arguments: list[str]) -> int:
    """Prints all algorithms, environments, networks, transforms and recipes. Returns the exit code."""
    options = parse(List, arguments, prog="rollmill list")
    import_modules(options.imports)
    kinds, problems = _parts()
    if options.kind is not None:
        kinds = {options.kind: kinds[options.kind]}
    if options.json:
        named = {kind: [{"name": n, "summary": summary} for n, summary in rows] for kind, rows in kinds.items()}
        print(json.dumps(named, indent=2))
    else:
        for kind, rows in kinds.items():
            print(f"{HEADS[kind]}:", *two_columns(rows), "", sep="\n")
    for problem in problems:
        print(f"note: {problem}", file=sys.stderr)
    return 0


def _parts() -> tuple[dict[Kind, Sequence[tuple[str, str]]], list[str]]:
    """Returns names and summaries by kind, and the problems of packages that offer further ones."""
    adapted = [
        ("brax:ID", f"Brax environments, with `{install_command('brax')}`"),
        ("craftax:ID", f"Craftax and Craftax-Classic, with `{install_command('craftax')}`"),
        ("gymnax:ID", f"gymnax environments, with `{install_command('gymnax')}`"),
        ("jaxmarl:ID", f"JaxMARL particle and battle environments, with `{install_command('jaxmarl')}`"),
        ("pgx:ID", f"Pgx games for one or two players, with `{install_command('pgx')}`"),
        ("playground:ID", f"MuJoCo Playground environments, with `{install_command('playground')}`"),
        ("robots:ID", f"robots simulated by Rollmill's own physics, with `{install_command('robots')}`"),
        ("xminigrid:ID", f"XLand-MiniGrid grid worlds, with `{install_command('xminigrid')}`"),
        ("ale:GAME", f"Atari 2600 games, on the host CPU, with `{install_command('ale')}`"),
        ("gymnasium:ID", "Gymnasium environments, on the host CPU"),
        (
            "pettingzoo:ID",
            (f"multi-agent PettingZoo environments, on the host CPU, with `{install_command('pettingzoo')}`"),
        ),
        ("envpool:ID", f"EnvPool environments, on the host CPU, with `{install_command('envpool')}`"),
    ]
    found = [registry.load_plugins() for registry in (ALGORITHMS, ENVIRONMENTS, NETWORKS)]
    algorithms = [(name, algorithm.summary) for name, algorithm in ALGORITHMS.items()]
    networks = _with_packages(registered_networks(), found[2])
    kinds: dict[Kind, Sequence[tuple[str, str]]] = {
        "algorithms": _with_packages(algorithms, found[0]),
        "environments": [*_with_packages(registered(), found[1]), *adapted],
        "networks": [("by --network.torso etc.", "MLP, CNN, GRU, LSTM, ResNet or the IMPALA network"), *networks],
        "transforms": [(n, (inspect.getdoc(make) or "").partition("\n")[0]) for n, make in TRANSFORMS.items()],
        "recipes": [(name, make().summary) for name, make in RECIPES.items()],
    }
    return kinds, list(dict.fromkeys(problem for plugins in found for _, problem in plugins if problem))


def _with_packages(
    rows: Sequence[tuple[str, str]], plugins: Sequence[tuple[Plugin, str]]
) -> list[tuple[str, str]]:
    """Adds the names of the packages that offer names to the rows."""
    packages = {plugin.name: plugin.package for plugin, problem in plugins if not problem}
    return [
        (name, f"{summary} [{packages[name]}]".lstrip() if name in packages else summary) for name, summary in rows
    ]
