"""`rollmill plan [ALGORITHM ENVIRONMENT] [OPTIONS]`."""

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from rollmill.api import ALGORITHMS, RunOptions, build_graph, choose_plan, import_modules
from rollmill.cli.environment_options import EnvOptions, parse_env_options
from rollmill.cli.parsing import parse
from rollmill.cli.train import Imports, NetworkName, find_own_algorithm, with_network
from rollmill.core.errors import UsageError
from rollmill.planning import draw, list_distributions, write_plan


@dataclass(frozen=True)
class Showing:
    """Whether the plan is drawn, and where it is written."""

    show: bool = True
    """Draw groups, and what passes between them."""
    rate: float = 100_000.0
    """Environment steps a second that bytes a second are computed for."""
    output: Path | None = None
    """File to write the plan to, for `rollmill train --plan FILE`."""


def run(arguments: list[str]) -> int:
    """Draws a plan, or lists the distribution policies."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    name, *rest = arguments
    find_own_algorithm(name, rest)
    chosen = parse(_arguments(name), rest, prog=f"rollmill plan {name}")
    if chosen.showing.rate <= 0:
        raise UsageError(f"rate={chosen.showing.rate} steps a second must be greater than 0.")
    import_modules(chosen.imports)
    options = parse_env_options(chosen.env_options)
    config = with_network(chosen.hyperparameters, chosen.network_name)
    graph = build_graph(name, chosen.environment, config, options=options)
    plan = choose_plan(graph, chosen.run)
    if chosen.showing.show:
        print(draw(plan, graph, steps_per_second=chosen.showing.rate))
    if chosen.showing.output is not None:
        write_plan(plan, chosen.showing.output)
        print(f"wrote {chosen.showing.output}")
    return 0


def _arguments(name: str) -> Any:
    config, merged = ALGORITHMS[name].config(), tyro.conf.arg(name="")
    environment = tyro.conf.arg(metavar="ENVIRONMENT", help="Id of the environment.")
    return make_dataclass(
        "Plan",
        [
            ("environment", Annotated[tyro.conf.Positional[str], environment]),
            ("env_options", EnvOptions, ()),
            ("network_name", NetworkName, None),
            ("imports", Imports, ()),
            ("showing", Annotated[Showing, merged], Showing()),
            ("hyperparameters", Annotated[type(config), merged], config),
            ("run", Annotated[RunOptions, merged], RunOptions()),
        ],
        frozen=True,
    )


def _usage() -> str:
    policies = list_distributions()
    width = max(map(len, policies))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in policies.items()]
    return "\n".join(
        [
            "usage: rollmill plan ALGORITHM ENVIRONMENT [--distribution NAME] [OPTIONS]",
            "",
            "distribution policies:",
            *lines,
            "",
            "`rollmill plan ALGORITHM --help` lists the options.",
        ]
    )
