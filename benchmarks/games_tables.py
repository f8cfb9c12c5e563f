"""The tables and the figure of docs/games.md, from the results that the other scripts have written.

    python benchmarks/games_tables.py

Reads results/connect-four-judge.json, connect-four-curve.json, self-play-gpu.json, self-play-cpu.json and
random-play-gpu.json; measures nothing. Needs matplotlib.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import RESULTS, table_of, write_table

DOCS = Path(__file__).parent.parent / "docs"
NETWORKS = {
    "mlp": "two layers of 64",
    "small-resnet": "2 residual blocks, 32 channels",
    "resnet": "6 residual blocks, 128 channels",
}


def result_of(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())["result"]


def strength(judged: dict[str, Any]) -> str:
    """The share of contested positions in which each policy keeps the value, and its games."""
    head = ["policy", "all positions", "quiet ones", "moving first", "moving second", "decisions in games"]
    rows = []
    for row in [*judged["baselines"], *judged["checkpoints"]]:
        games = row["games"]
        cells = [per_cent(row["positions"][kind]) for kind in ("all", "quiet")]
        cells += [slashed(games[side]) for side in ("first", "second_off_centre")]
        kept = sum(count_of(games[side]) for side in ("first", "second_off_centre"))
        number = sum(games[side]["decisions"]["number"] for side in ("first", "second_off_centre"))
        rows.append([name_of(row), *cells, f"{kept / number:.1%}"])
    return table_of(head, rows)


def name_of(row: dict[str, Any]) -> str:
    if "simulations" not in row:
        policy = str(row["policy"])
        return {"random": "random moves", "perfect": "perfect player"}.get(policy, policy)
    return f"AlphaZero, {row['simulations']} simulations" if row["simulations"] else "AlphaZero, the network alone"


def per_cent(figure: dict[str, float]) -> str:
    return f"{100 * figure['share']:.1f} ± {100 * figure['standard_error']:.1f} %"


def slashed(games: dict[str, Any]) -> str:
    return f"{games['won']} / {games['drawn']} / {games['lost']}"


def count_of(games: dict[str, Any]) -> float:
    decisions = games["decisions"]
    return decisions["number"] * (decisions["share"] or 0.0)


def speed(machines: dict[str, dict[str, Any]]) -> str:
    """Moves of self-play a second beside Pgx and mctx, and where the time goes."""
    head = ["machine", "network", "games", "simulations", "Pgx and mctx", "Rollmill", "ratio"]
    head += ["network, ms", "environment, ms", "rest, ms", "Pgx and mctx, rest"]
    rows = []
    for machine, result in machines.items():
        for case in result["self_play"]:
            ours, theirs = case["rollmill"], case["pgx"]
            rate = lambda side: side["moves_per_second"]["median"]
            parts, others = (side["seconds_of_a_move_of_all_games"] for side in (ours, theirs))
            times = [parts["network"], parts["environment"], parts["rest"], others["rest"]]
            rows.append(
                [machine, NETWORKS[case["network"]], f"{case['games']:,}", str(case["simulations"])]
                + [f"{rate(theirs):,.0f}", f"{rate(ours):,.0f}", f"{case['over_pgx']['median']:.2f} x"]
                + [f"{1e3 * seconds:.2f}" for seconds in times]
            )
    return table_of(head, rows, numbers=range(2, len(head)))


def random_play(result: dict[str, Any]) -> str:
    """Steps a second of random moves, as XLA's program and as one kernel."""
    head = ["game, games side by side, stored", "XLA", "kernel", "ratio"]
    rows = [
        [name, f"{case['xla']['median'] / 1e6:,.0f} M", f"{case['kernel']['median'] / 1e6:,.0f} M"]
        + [f"{case['over_xla']:.1f} x"]
        for name, case in result["play"].items()
    ]
    return table_of(head, rows)


def curves(result: dict[str, Any]) -> Iterator[tuple[str, list[float], list[float], list[float]]]:
    """Each number of simulations: million moves of self-play, shares in per cent, and their standard errors."""
    for simulations in sorted({row["simulations"] for row in result["checkpoints"]}):
        rows = [row for row in result["checkpoints"] if row["simulations"] == simulations]
        shares = [row["positions"]["all"] for row in rows]
        yield (
            f"{simulations} simulations" if simulations else "the network alone",
            [row["env_steps"] / 1e6 for row in rows],
            [100 * share["share"] for share in shares],
            [100 * share["standard_error"] for share in shares],
        )


def figure(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, steps, shares, errors in curves(result):
        axes.errorbar(steps, shares, yerr=errors, marker="o", capsize=3.0, label=name)
    for row in result["baselines"][:2]:
        share = 100 * row["positions"]["all"]["share"]
        axes.axhline(share, linestyle="--", color="#9e9e9e", linewidth=1)
        axes.annotate(name_of(row), (axes.get_xlim()[1], share), ha="right", va="bottom", color="#616161")
    axes.set_xlabel("million moves of self-play")
    axes.set_ylabel("contested positions in which\nthe value is kept, %")
    axes.set_ylim(25, 102)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    drawing.savefig(path, dpi=110)
    print(f"wrote {path}")


def main() -> None:
    page = DOCS / "games.md"
    write_table(strength(result_of("connect-four-judge")), page, part=", strength")
    machines = {"one H200": result_of("self-play-gpu"), "two cores": result_of("self-play-cpu")}
    write_table(speed(machines), page, part=", self-play")
    write_table(random_play(result_of("random-play-gpu")), page, part=", random play")
    figure(result_of("connect-four-curve"), DOCS / "figures" / "connect-four.png")


if __name__ == "__main__":
    main()
