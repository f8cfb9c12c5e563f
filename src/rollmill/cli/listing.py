"""The command `rollmill list`."""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rollmill.cli.parsing import parse
from rollmill.cli.shared_options import Imports
from rollmill.core.installation import install_command
from rollmill.core.plugins import Plugin
from rollmill.envs import TRANSFORMS, registered
from rollmill.envs.registry import ENVIRONMENTS
from rollmill.networks import registered_networks
from rollmill.networks.registry import NETWORKS
from rollmill.recipes import RECIPES
from rollmill.runs.algorithms import ALGORITHMS
from rollmill.runs.specification import import_modules


@dataclass(frozen=True)
class List:
    """List algorithms, environments, networks and recipes."""

    imports: Imports = ()
    """Module to import first, because it registers environments, networks or algorithms."""


def run(arguments: list[str]) -> int:
    """Prints algorithms, environments, networks and recipes."""
    import_modules(parse(List, arguments, prog="rollmill list").imports)
    adapted = [
        ("brax:ID", f"environments of Brax, with `{install_command('brax')}`"),
        ("craftax:ID", f"Craftax and Craftax-Classic, with `{install_command('craftax')}`"),
        ("gymnax:ID", f"environments of gymnax, with `{install_command('gymnax')}`"),
        ("jaxmarl:ID", f"particles and battles of JaxMARL, with `{install_command('jaxmarl')}`"),
        ("pgx:ID", f"games of Pgx for one or two players, with `{install_command('pgx')}`"),
        ("playground:ID", f"environments of MuJoCo Playground, with `{install_command('playground')}`"),
        ("robots:ID", f"robots in our own physics, with `{install_command('robots')}`"),
        ("xminigrid:ID", f"grid worlds of XLand-MiniGrid, with `{install_command('xminigrid')}`"),
        ("ale:GAME", f"Atari 2600 games, on the host CPU, with `{install_command('ale')}`"),
        ("gymnasium:ID", "environments of Gymnasium, on the host CPU"),
        ("pettingzoo:ID", f"PettingZoo, several agents, on the host CPU, with `{install_command('pettingzoo')}`"),
        ("envpool:ID", f"environments of EnvPool, on the host CPU, with `{install_command('envpool')}`"),
    ]
    recipes = [(name, make().summary) for name, make in RECIPES.items()]
    found = [registry.load_plugins() for registry in (ALGORITHMS, ENVIRONMENTS, NETWORKS)]
    algorithms = [(name, algorithm.summary) for name, algorithm in ALGORITHMS.items()]
    _print("algorithms", _with_packages(algorithms, found[0]))
    _print("environments", [*_with_packages(registered(), found[1]), *adapted])
    networks = _with_packages(registered_networks(), found[2])
    _print(
        "networks (--network NAME)",
        [("by --network.torso etc.", "MLP, CNN, GRU, LSTM, ResNet or IMPALA's network"), *networks],
    )
    transforms = [(name, (inspect.getdoc(make) or "").partition("\n")[0]) for name, make in TRANSFORMS.items()]
    _print("transforms (--transform NAME[:ARGUMENT])", transforms)
    _print("recipes (--recipe NAME)", recipes)
    for problem in dict.fromkeys(problem for plugins in found for _, problem in plugins if problem):
        print(f"note: {problem}", file=sys.stderr)
    return 0


def _with_packages(
    rows: Sequence[tuple[str, str]], plugins: Sequence[tuple[Plugin, str]]
) -> list[tuple[str, str]]:
    """Adds the names of the packages that offer names to the rows."""
    packages = {plugin.name: plugin.package for plugin, problem in plugins if not problem}
    return [
        (name, f"{summary} [{packages[name]}]".lstrip() if name in packages else summary) for name, summary in rows
    ]


def _print(title: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    print(f"{title}:", *(f"  {name:<{width}}  {summary}" for name, summary in rows), "", sep="\n")
