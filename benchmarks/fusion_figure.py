"""The figure of `fusion.py`, from its results alone. Needs matplotlib."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from oscillators import Complexity

COLOURS = {
    "Gymnasium": "#757575",
    "PyTorch": "#ef9a9a",
    "PyTorch, CUDA graph": "#e53935",
    "torch.compile": "#ffb74d",
    "torch.compile, CUDA graph": "#ef6c00",
    "XLA": "#64b5f6",
    "XLA, unrolled": "#1565c0",
    "XLA, calls": "#4db6ac",
    "kernel": "#2e7d32",
}
AXES: dict[str, Callable[[dict], float]] = {
    "operations of a step for each number of the state": lambda case: 3 * case["substeps"],
    "numbers of the state": lambda case: 2 * case["oscillators"],
    "numbers observed a step": lambda case: case["observed"],
}


def figure_of(study: dict[str, Any], path: Path) -> None:
    """Six panels: environments, steps of a launch, both at once; then the three axes of complexity."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, figsize=(13, 7.4), layout="constrained")
    at = study["plan"]["at"]
    of_sweep = lambda name: [case for case in study["cases"] if case["sweep"] == name]
    cartpole = [case for case in of_sweep("environments") if case["simulator"] == "CartPole-v1"]
    lines(panels[0, 0], cartpole, lambda case: case["num_envs"], "(a) CartPole-v1", "environments")
    title = f"(b) CartPole-v1, {at:,} environments"
    lines(
        panels[0, 1], of_sweep("steps fused"), lambda case: case["fused"], title, "steps of one launch", told=False
    )
    bars(panels[0, 2], study["multiplication"])
    axes = along(of_sweep("complexity"), study["plan"]["wide"])
    for panel, (label, x), cases in zip(panels[1], AXES.items(), axes, strict=True):
        lines(panel, cases, x, f"(c) Oscillators, {at:,} environments", label)
    shown: dict[str, Any] = {}
    for panel in panels.flat:
        if panel is not panels[0, 2]:
            handles, labels = panel.get_legend_handles_labels()
            shown |= dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def lines(
    panel: Any, cases: list, x: Callable[[dict], float], title: str, label: str, *, told: bool = True
) -> None:
    """A line for each side, of its fastest variant at each x; `told` tells XLA unrolled from XLA."""
    for side in COLOURS:
        points: dict[float, float] = {}
        for case in cases:
            if named(case, told=told) == side:
                points[x(case)] = max(points.get(x(case), 0.0), case["median"])
        if points:
            panel.plot(*zip(*sorted(points.items()), strict=True), "o-", ms=3.5, color=COLOURS[side], label=side)
    panel.set(title=title, xlabel=label, ylabel="environment steps a second", xscale="log", yscale="log")
    panel.grid(alpha=0.3)


def named(case: dict[str, Any], *, told: bool) -> str:
    """The side as the legend has it."""
    return "XLA, unrolled" if case["side"] == "XLA" and (case["fused"] > 1 or not told) else case["side"]


def along(cases: list[dict[str, Any]], wide: int) -> list[list[dict[str, Any]]]:
    """For each of `AXES` the cases that differ in nothing else."""
    middle = Complexity()
    chosen = lambda fits: [case for case in cases if fits(*(case[name] for name in Complexity._fields))]
    return [
        chosen(lambda n, k, m: (n, m) == (middle.oscillators, middle.observed)),
        chosen(lambda n, k, m: k == middle.substeps and m == min(n, middle.observed)),
        chosen(lambda n, k, m: k == middle.substeps and n == wide),
    ]


def bars(panel: Any, rows: list[dict[str, Any]]) -> None:
    """Gains of vectorisation, of fusion, and of both, for each number of environments."""
    parts = {"vectorised": "#64b5f6", "fused": "#a5d6a7", "product": "#bdbdbd", "both": "#2e7d32"}
    rows = [row for row in rows if row["simulator"] == "CartPole-v1" and row["num_envs"] > 16]
    rows.sort(key=lambda row: (row["sides"], row["num_envs"]))
    short = {"XLA and kernel": "XLA, kernel", "PyTorch and torch.compile, CUDA graph": "PyTorch, compiled"}
    for n, (part, colour) in enumerate(parts.items()):
        places = [at + 0.2 * n for at in range(len(rows))]
        panel.bar(places, [row[part] for row in rows], 0.19, color=colour, label=part)
    labels = [f"{row['num_envs']:,}\n{short[row['sides']]}" for row in rows]
    panel.set_xticks([at + 0.3 for at in range(len(rows))], labels, fontsize=6, rotation=45)
    panel.set(title="CartPole-v1, times one unfused", yscale="log")
    panel.grid(alpha=0.3, axis="y")
    panel.set_ylim(1, 20 * panel.get_ylim()[1])  # room for the legend
    panel.legend(fontsize=7, ncols=4, loc="upper center")
