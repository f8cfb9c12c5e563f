"""The tables of docs/algorithms: hyperparameters from the configurations, figures from the results.

    python benchmarks/algorithm_tables.py

Reads docs/algorithms and results/*.json; measures nothing. A table stands between the markers
`<!-- table: benchmarks/algorithm_tables.py, PART -->` and `<!-- end of table -->` of a page, and PART names one of
`TABLES`.
"""

import argparse
import ast
import dataclasses
import inspect
import json
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from measure import RESULTS, table_of

from rollmill.core.bounds import Range, bounds_of
from rollmill.networks import NetworkConfig
from rollmill.runs.algorithms import BUILTIN

PAGES = Path(__file__).parents[1] / "docs/algorithms"
MARKED = re.compile(r"(<!-- table: benchmarks/algorithm_tables\.py, (.+?) -->\n).*?(<!-- end of table -->)", re.S)
DEFAULTS = NetworkConfig()


# --- hyperparameters ----------------------------------------------------------------------------------


def fields_of(config: type) -> str:
    """The fields of a configuration: name, default, valid values and meaning, as its docstrings say."""
    meanings, ranges = docstrings_of(config), bounds_of(config)
    hints = typing.get_type_hints(config)
    values = config()
    rows = [
        [
            f"`{name}`",
            _default(getattr(values, name)),
            _allowed(hints[name], ranges.get(name)),
            meanings[name],
        ]
        for name in (field.name for field in dataclasses.fields(config))
    ]
    return table_of(["Field", "Default", "Allowed", "Meaning"], rows, numbers=())


def docstrings_of(config: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config)))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef))
    found = {}
    for field, text in zip(body, body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def _default(value: Any) -> str:
    if isinstance(value, NetworkConfig):
        names = [field.name for field in dataclasses.fields(value)]
        changed = [name for name in names if getattr(value, name) != getattr(DEFAULTS, name)]
        shown = ", ".join(f"{name}={getattr(value, name)!r}" for name in changed)
        return f"`NetworkConfig({shown})`"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"`{value!r}`" if isinstance(value, str | tuple | dict) else str(value)


def _allowed(hint: Any, bounds: Range | None) -> str:
    """The valid values of a field, in words."""
    if str in typing.get_args(hint) and typing.get_origin(hint) in (types.UnionType, typing.Union):
        return f"{_allowed(float, bounds)}, or a schedule"
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        some = next(part for part in typing.get_args(hint) if part is not types.NoneType)
        return f"{_allowed(some, bounds)}, or None"
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice!r}`" for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"tuple of {'triples of ' if _is_nested(hint) else ''}whole numbers{_limits(bounds, whole=True)}"
    if typing.get_origin(hint) is dict:
        return f"dictionary of {_kind(typing.get_args(hint)[1])}"
    return f"{_kind(hint)}{_limits(bounds, whole=hint is int)}"


def _is_nested(hint: Any) -> bool:
    return typing.get_origin(typing.get_args(hint)[0]) is tuple


def _kind(hint: Any) -> str:
    names = {int: "whole number", float: "number", bool: "True, False", str: "text"}
    return names.get(hint) or f"`{hint.__name__}`"


def _limits(bounds: Range | None, *, whole: bool) -> str:
    if bounds is None:
        return ""
    if math.isfinite(bounds.high):
        return f" from {bounds.low} to {bounds.high}"
    if not math.isfinite(bounds.low):
        return ""
    least = f" greater than {bounds.low}" if bounds.exclusive else f" of at least {bounds.low}"
    return least + ("" if bounds.finite or whole else ", or infinite")


# --- results ------------------------------------------------------------------------------------------


REPLAY_RESULTS = ("replay-learning", "replay-learning-breakout", "replay-learning-sac", "replay-learning-td3")


def replay_studies(algorithm: str) -> Callable[[], str]:
    """The table of what an algorithm with a replay memory learned, beside what is published."""

    def table() -> str:
        studies = [
            study for name in REPLAY_RESULTS for study in _result(name).values() if study["algorithm"] == algorithm
        ]
        head = [
            "Environment",
            "Steps",
            "Final return of each seed",
            "Mean",
            "Greedy policy, mean",
            "Published",
            "0.5 % random actions",
            "Rejax, 0.5 % random actions",
        ]
        rows = [_replay_row(study) for study in studies]
        # Columns that no study fills are left out.
        used = [column for column in range(len(head)) if any(row[column] for row in rows)]
        chosen = [[row[column] for column in used] for row in [head, *rows]]
        return table_of(
            chosen[0], chosen[1:], numbers=[n for n, column in enumerate(used) if column not in (0, 2)]
        )

    return table


def _replay_row(study: dict[str, Any]) -> list[str]:
    greedy, published, rejax = study.get("greedy_returns"), study["published"], study.get("rejax")
    return [
        study["environment"],
        _steps(study),
        ", ".join(_three_digits(value) for value in study["final_returns"]),
        _mean_of(study["final_returns"]),
        "" if greedy is None else _mean_of(greedy),
        "" if published is None else "{:,.1f} ± {:,.1f}".format(*published),
        "" if rejax is None else _mean_of(study["returns_beside_rejax"]),
        "" if rejax is None else _mean_of(rejax["final_returns"]),
    ]


def _mean_of(values: Sequence[float]) -> str:
    return f"{fmean(values):,.1f} ± {pstdev(values):,.1f}"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _steps(study: dict[str, Any]) -> str:
    """The steps of the trainings, which may have been stopped before their end."""
    planned = study["config"]["total_timesteps"]
    made = study.get("env_steps", [planned])
    return f"{max(made):,}" if min(made) >= planned else f"{min(made):,} to {max(made):,}"


def placed_studies(*names: str) -> Callable[[], str]:
    """The table of what recipes learned under a distribution policy."""

    def table() -> str:
        results = _result("distributed-learning")
        return table_of(
            ["Recipe", "Placement", "Seed", "Final return", "Greedy policy", "Mean policy lag", "Seconds"],
            [_placed_row(results[name], run) for name in names for run in results[name]["runs"]],
            numbers=(2, 3, 4, 5, 6),
        )

    return table


def _placed_row(study: dict[str, Any], run: dict[str, Any]) -> list[str]:
    return [
        f"`{study['recipe']}`",
        f"`{' '.join(study['placement'])}`",
        str(run["seed"]),
        f"{run['final_return']:,.1f}",
        "" if run["greedy"] is None else f"{run['greedy']:,.1f}",
        f"{run['policy_lag_mean']:.1f}",
        f"{run['seconds']:.0f}",
    ]


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())["result"]


# --- pages --------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], str]] = {
    **{f"fields of {name}": lambda config=each.config: fields_of(config) for name, each in BUILTIN.items()},
    "fields of a network": lambda: fields_of(NetworkConfig),
    "results of ppo": placed_studies("half-cheetah"),
    "results of a3c": placed_studies("a3c-cartpole"),
    "results of impala": placed_studies("impala-cartpole"),
    "results of dqn": replay_studies("dqn"),
    "results of sac": replay_studies("sac"),
    "results of td3": replay_studies("td3"),
}


def with_tables(text: str) -> str:
    """The text of a page with all of its tables as they have to be."""
    return MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, default=PAGES)
    for page in sorted(parser.parse_args().pages.glob("*.md")):
        page.write_text(with_tables(page.read_text()))
        print(f"wrote the tables in {page}")


if __name__ == "__main__":
    main()
