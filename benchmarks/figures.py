"""Draws the figures of the documentation from benchmarks/results. Needs matplotlib.

python benchmarks/figures.py [learning tag_learning fusion-study ...]
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from measure import HERE, options, read_result, some_of
from oscillators import Complexity
from tables import ROBOTS, player_of, stored

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#757575"
LEARNING_COLOURS = {"Rollmill": BLUE, "Rejax": ORANGE, "Rollmill, GRU": BLUE, "Rollmill, MLP": GREY}
STUDY_STYLES = {
    "Gymnasium": (GREY, "x", "-"),
    "PyTorch": ("#e69f00", "v", ":"),
    "PyTorch, CUDA graph": ("#e69f00", "^", "-"),
    "torch.compile": (ORANGE, "<", ":"),
    "torch.compile, CUDA graph": (ORANGE, ">", "-"),
    "XLA": (BLUE, "o", "-"),
    "XLA, unrolled": (BLUE, "s", ":"),
    "XLA, calls": ("#56b4e9", "D", "--"),
    "kernel": ("#000000", "*", "-"),
}
"""Colour, marker and kind of line of each side: they differ without colours too."""
SEED_STYLES = ((BLUE, "-"), (ORANGE, "--"), (GREEN, "-."))


def draw_band(panel: Any, steps: Any, returns: Any, label: str, colour: str | None = None) -> None:
    """Draws the mean of returns `[seed, point]` as a line, and the range of the seeds around it."""
    returns = np.asarray(returns, float)
    (line,) = panel.plot(steps, np.nanmean(returns, axis=0), color=colour, linewidth=1.8, label=label)
    low, high = np.nanmin(returns, axis=0), np.nanmax(returns, axis=0)
    panel.fill_between(steps, low, high, color=line.get_color(), alpha=0.18, linewidth=0)


def finish(panel: Any, title: str) -> None:
    panel.set_title(title, fontsize=11)
    panel.set_xlim(left=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25, linewidth=0.6)


def learning() -> Any:
    figure, panels = pyplot.subplots(2, 2, figsize=(9, 6.2), layout="constrained")
    for panel, row in zip(panels.flat, read_result("learning")["rows"], strict=True):
        panel.axhline(row["target"], color="black", linewidth=0.8, linestyle=(0, (4, 3)), label="target")
        for name, curves in row["sides"].items():
            draw_band(panel, np.divide(curves["steps"], 1000), curves["returns"], name, LEARNING_COLOURS[name])
        finish(panel, row["environment"])
        place = "center right" if "Rollmill, GRU" in row["sides"] else "lower right"
        panel.legend(frameon=False, fontsize=9, loc=place)
    for panel in panels[-1]:
        panel.set_xlabel("environment steps (thousands)")
    for panel in panels[:, 0]:
        panel.set_ylabel("mean return, greedy policy")
    return figure


def tag_learning() -> Any:
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for panel, row in zip(panels, read_result("tag_learning")["rows"], strict=True):
        untrained = float(np.mean(row["taggers_return"]["untrained"]["untrained"]))
        panel.axhline(untrained, color=GREY, linewidth=1, linestyle=(0, (1, 2)), label="untrained taggers")
        for kind, colour in {"tagger": ORANGE, "runner": BLUE}.items():
            steps, returns = np.divide(row["curves"]["steps"], 1000), np.transpose(row["curves"][kind])
            draw_band(panel, steps, returns, f"{kind}s", colour)
        finish(panel, row["title"])
        panel.set_xlabel("environment steps (thousands)")
    panels[0].legend(frameon=False, fontsize=9, loc="upper left", ncols=3)
    panels[0].set_ylabel("return of an agent, mean of its kind")
    return figure


def robots_learning() -> Any:
    """Draws the return of each seed by seconds of training, beside the published return."""
    results = {name: found["result"] for name in ROBOTS if (found := stored(f"robots-learning-{name}-gpu"))}
    panels_of = [name for name in results if not name.endswith("-rollout")]
    figure, axes = pyplot.subplots(
        2, -(-len(panels_of) // 2), figsize=(13, 6), layout="constrained", squeeze=False
    )
    for panel, name in zip(axes.flat, panels_of, strict=False):
        ((mean, deviation),) = results[name]["published"].values()
        panel.axhline(mean, color="black", linewidth=0.8, linestyle=(0, (4, 3)), label="published")
        panel.axhspan(mean - deviation, mean + deviation, color="black", alpha=0.08, linewidth=0)
        for side, colour, label in ((name, BLUE, "XLA"), (f"{name}-rollout", ORANGE, "rollout kernel")):
            for training in results.get(side, {"trainings": []})["trainings"]:
                seconds, _, returns, _ = zip(*training["curve"]["points"], strict=True)
                for seed in np.transpose(returns):
                    panel.plot(seconds, seed, color=colour, linewidth=1.4, label=label)
                    label = None
        finish(panel, ROBOTS[name].strip("`").removeprefix("robots:"))
    for panel in axes[-1]:
        panel.set_xlabel("seconds of training")
    for panel in axes[:, 0]:
        panel.set_ylabel("mean return of training episodes")
    first = axes.flat[panels_of.index("ant") if "ant" in panels_of else 0]
    first.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def distributed_learning() -> Any:
    results = {name: each for name, each in read_result("distributed-learning").items() if each["recipe"]}
    figure, axes = pyplot.subplots(1, len(results), figsize=(4 * len(results), 3), squeeze=False)
    for axis, (name, result) in zip(axes[0], results.items(), strict=True):
        for run in result["runs"]:
            points = [point for point in run["curve"] if point[1] is not None]
            steps, returns = zip(*points, strict=True)
            colour, line = SEED_STYLES[run["seed"]]
            axis.plot(np.divide(steps, 1000), returns, color=colour, linestyle=line, label=f"seed {run['seed']}")
        axis.axhline(result["target"], color=GREY, linestyle=":", label="target")
        axis.set(title=name, xlabel="environment steps (thousands)", ylabel="mean return")
    axes[0][0].legend()
    figure.tight_layout()
    return figure


def fusion_learning() -> Any:
    result = read_result("fusion-learning-cpu")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for colour, (name, seeds) in zip((BLUE, ORANGE, GREEN), result["curves"].items(), strict=False):
        thousands = np.arange(1, len(seeds[0]) + 1) * result["steps_an_iteration"] / 1000
        draw_band(axes, thousands, seeds, {"xla": "XLA", "full": "both kernels"}.get(name, name), colour)
    axes.set(
        xlabel="environment steps (thousands)",
        ylabel="mean return of training episodes",
        title="PPO on CartPole-v1, mean and range of ten seeds",
    )
    axes.legend()
    return figure


def connect_four() -> Any:
    """Draws the shares of contested positions in which the value is kept, by moves of self-play."""
    result = read_result("connect-four-curve")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for simulations in sorted({row["simulations"] for row in result["checkpoints"]}):
        rows = [row for row in result["checkpoints"] if row["simulations"] == simulations]
        steps, shares = [row["env_steps"] / 1e6 for row in rows], [row["positions"]["all"] for row in rows]
        mean, error = ([100 * share[key] for share in shares] for key in ("share", "standard_error"))
        name = f"{simulations} simulations" if simulations else "the network alone"
        axes.errorbar(steps, mean, yerr=error, marker="o", capsize=3.0, label=name)
    for row in result["baselines"][:2]:
        share = 100 * row["positions"]["all"]["share"]
        axes.axhline(share, linestyle="--", color="#9e9e9e", linewidth=1)
        axes.annotate(player_of(row), (axes.get_xlim()[1], share), ha="right", va="bottom", color="#616161")
    axes.set_xlabel("million moves of self-play")
    axes.set_ylabel("contested positions in which\nthe value is kept, %")
    axes.set_ylim(25, 102)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    return figure


def fusion_study() -> Any:
    """Draws six panels: environments, steps of a launch, both at once; then the three axes of complexity."""
    study = read_result("fusion-study")
    if apart := read_result("fusion-study-complexity"):
        study["cases"] = [case for case in study["cases"] if case["sweep"] != "complexity"] + apart["cases"]
    figure, panels = pyplot.subplots(2, 3, figsize=(13, 7.4), layout="constrained")
    at, wide = study["plan"]["at"], study["plan"]["wide"]
    sweep = lambda name: [case for case in study["cases"] if case["sweep"] == name]
    cartpole = [case for case in sweep("environments") if case["simulator"] == "CartPole-v1"]
    draw_rates(panels[0, 0], cartpole, lambda case: case["num_envs"], "(a) CartPole-v1", "environments")
    title = f"(b) CartPole-v1, {at:,} environments"
    unrolled = [case | {"fused": max(case["fused"], 2), "x": case["fused"]} for case in sweep("steps fused")]
    draw_rates(panels[0, 1], unrolled, lambda case: case["x"], title, "steps of one launch")
    draw_gains(panels[0, 2], study["multiplication"])
    middle, cases = (
        Complexity(),
        [(case, *(case[name] for name in Complexity._fields)) for case in sweep("complexity")],
    )
    axes: dict[str, tuple[Callable[..., bool], Callable[..., float]]] = {
        "operations of a step for each number of the state": (
            lambda n, k, m: (n, m) == (middle.oscillators, middle.observed),
            lambda case: 3 * case["substeps"],
        ),
        "numbers of the state": (
            lambda n, k, m: k == middle.substeps and m == min(n, middle.observed),
            lambda case: 2 * case["oscillators"],
        ),
        "numbers observed a step": (
            lambda n, k, m: k == middle.substeps and n == wide,
            lambda case: case["observed"],
        ),
    }
    for letter, panel, (label, (fits, x)) in zip("def", panels[1], axes.items(), strict=True):
        own = [case for case, *complexity in cases if fits(*complexity)]
        draw_rates(panel, own, x, f"({letter}) Oscillators, {at:,} environments", label)
    shown: dict[str, Any] = {}
    for panel in panels.flat:
        if panel is not panels[0, 2]:
            handles, labels = panel.get_legend_handles_labels()
            shown |= dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown), fontsize=8)
    return figure


def draw_rates(panel: Any, cases: list, x: Callable[[dict], float], title: str, label: str) -> None:
    """Draws a line for each side, of its fastest variant at each x."""
    named = lambda case: "XLA, unrolled" if case["side"] == "XLA" and case["fused"] > 1 else case["side"]
    for side, (colour, marker, line) in STUDY_STYLES.items():
        points: dict[float, float] = {}
        for case in cases:
            if named(case) == side:
                points[x(case)] = max(points.get(x(case), 0.0), case["median"])
        if points:
            panel.plot(
                *zip(*sorted(points.items()), strict=True), ls=line, marker=marker, ms=5, color=colour, label=side
            )
    panel.set(title=title, xlabel=label, ylabel="environment steps a second", xscale="log", yscale="log")
    panel.grid(alpha=0.3)


def draw_gains(panel: Any, rows: list[dict[str, Any]]) -> None:
    """Draws the gains of vectorisation, of fusion, and of both, for each number of environments."""
    parts = {"vectorised": "#56b4e9", "fused": "#e69f00", "product": "#ffffff", "both": "#000000"}
    rows = [row for row in rows if row["simulator"] == "CartPole-v1" and row["num_envs"] > 16]
    rows.sort(key=lambda row: (row["sides"], row["num_envs"]))
    short = {"XLA and kernel": "XLA, kernel", "PyTorch and torch.compile, CUDA graph": "PyTorch, compiled"}
    for n, (part, colour) in enumerate(parts.items()):
        places = [at + 0.2 * n for at in range(len(rows))]
        panel.bar(
            places, [row[part] for row in rows], 0.19, color=colour, edgecolor="black", linewidth=0.5, label=part
        )
    labels = [f"{row['num_envs']:,}\n{short[row['sides']]}" for row in rows]
    panel.set_xticks([at + 0.3 for at in range(len(rows))], labels, fontsize=6, rotation=45)
    panel.set(title="(c) CartPole-v1: gains", ylabel="times one environment, unfused", yscale="log")
    panel.grid(alpha=0.3, axis="y")
    panel.set_ylim(1, 20 * panel.get_ylim()[1])  # room for the legend
    panel.legend(fontsize=7, ncols=4, loc="upper center")


FIGURES: dict[str, tuple[Callable[[], Any], int]] = {
    "learning": (learning, 150),
    "tag_learning": (tag_learning, 150),
    "robots-learning": (robots_learning, 110),
    "distributed-learning": (distributed_learning, 120),
    "fusion-learning": (fusion_learning, 120),
    "fusion-study": (fusion_study, 130),
    "connect-four": (connect_four, 110),
}
"""Figures and their dots per inch."""


def main() -> None:
    chosen = options(__doc__, {"figures": some_of(FIGURES)}, docs=HERE.parent / "docs")
    folder: Path = chosen.docs / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for name in chosen.figures:
        draw, resolution = FIGURES[name]
        draw().savefig(folder / f"{name}.png", dpi=resolution)
        print(f"wrote {folder / name}.png")


if __name__ == "__main__":
    main()
