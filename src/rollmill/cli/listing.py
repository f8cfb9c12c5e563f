"""The command `rollmill list`."""

from dataclasses import dataclass

from rollmill.api import ALGORITHMS, import_modules
from rollmill.cli.parsing import parse
from rollmill.cli.train import Imports
from rollmill.core.installation import install_command
from rollmill.envs import registered
from rollmill.networks import registered_networks
from rollmill.recipes import RECIPES


@dataclass(frozen=True)
class List:
    """List algorithms, environments, networks and recipes."""

    imports: Imports = ()
    """Module to import first, because it registers environments, networks or algorithms."""


def run(arguments: list[str]) -> int:
    """Prints algorithms, environments, networks and recipes."""
    import_modules(parse(List, arguments, prog="rollmill list").imports)
    adapted = [
        ("gymnax:ID", f"environments of gymnax, with `{install_command('gymnax')}`"),
        ("pgx:ID", f"games of Pgx for one or two players, with `{install_command('pgx')}`"),
        ("gymnasium:ID", "environments of Gymnasium, on the host CPU"),
        ("envpool:ID", f"environments of EnvPool, on the host CPU, with `{install_command('envpool')}`"),
    ]
    recipes = [(name, make().summary) for name, make in RECIPES.items()]
    _print("algorithms", [(name, algorithm.summary) for name, algorithm in ALGORITHMS.items()])
    _print("environments", [*registered(), *adapted])
    networks = [("by --network.torso etc.", "MLP, CNN, GRU or ResNet"), *registered_networks()]
    _print("networks (--network NAME)", networks)
    _print("recipes (--recipe NAME)", recipes)
    return 0


def _print(title: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    print(f"{title}:", *(f"  {name:<{width}}  {summary}" for name, summary in rows), "", sep="\n")
