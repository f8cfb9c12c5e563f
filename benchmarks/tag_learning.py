"""MAPPO on Tag: taggers' returns while both kinds learn, and each side against untrained ones.

    python benchmarks/tag_learning.py     # make benchmark-tag

Three seeds, all in one program; every point of a curve is the mean return over the episodes of training that
ended since the point before it, with actions drawn from the policies. Writes results/tag_learning.json,
docs/figures/tag_learning.png and the table in docs/multi_agent.md. Needs matplotlib.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from measure import RESULTS, write_result, write_table

import rollmill
from rollmill.dataflow import collect, start
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from rollmill.recipes import RECIPES
from rollmill.recipes.classic import Recipe

DOCS = Path(__file__).parent.parent / "docs"
SEEDS = tuple(range(3))
EPISODES, POINTS = 200, 40
LONGEST = 100  # steps of an episode, in both environments


class Study(NamedTuple):
    """A recipe, and what its taggers should get from the runners that learned with them."""

    recipe: str
    title: str
    target: float


STUDIES = (
    Study("tag-gridworld", "TagGridWorld, 4 taggers, 1 runner", 5.0),
    Study("tag-continuous", "TagContinuous, 3 taggers, 9 runners", 10.0),
)
SIDES = ("untrained", "trained")
PAIRINGS = [(taggers, runners) for taggers in SIDES for runners in SIDES]


def study(of: Study) -> dict:
    recipe: Recipe = RECIPES[of.recipe]()
    graph = rollmill.mappo(rollmill.make(recipe.environment), recipe.config)
    program = lower(graph, seeds=SEEDS)
    before, after, curves = _train(graph, program)
    found = _cross_play(graph, before, after)
    pairs = zip(found["trained"]["trained"], found["untrained"]["trained"], strict=True)
    met = all(trained >= max(of.target, untrained) for trained, untrained in pairs)
    for taggers, runners in PAIRINGS:
        each = ", ".join(f"{value:.2f}" for value in found[taggers][runners])
        print(f"{recipe.environment}: {taggers} taggers, {runners} runners: taggers' return {each}", flush=True)
    return {
        "environment": recipe.environment,
        "title": of.title,
        "recipe": of.recipe,
        "target": of.target,
        "met": met,
        "taggers_return": found,
        "curves": curves,
    }


def _train(graph, program):
    """The weights of all seeds before and after, and the curves of both kinds' returns."""
    begin = state = program.start()
    marks = np.unique(np.linspace(0, graph.loops.iterations, POINTS + 1).round().astype(int)).tolist()
    curves = {"steps": [mark * graph.loops.batch_size for mark in marks[1:]], "tagger": [], "runner": []}
    for first, until in zip(marks, marks[1:], strict=False):
        rows = []
        for window in dispatch_ahead(program, state, first=first, until=until):
            state = window.after
            rows += window.metrics
        ended = np.asarray([row["episodes/ended"] for row in rows])
        for kind in ("tagger", "runner"):
            returns = np.asarray([row[f"returns/{kind}"] for row in rows])
            curves[kind].append((np.sum(ended * returns, axis=0) / ended.sum(axis=0)).tolist())
    return graph.weights(begin.learner), graph.weights(state.learner), curves


def _cross_play(graph, before, after) -> dict[str, dict[str, list[float]]]:
    """The taggers' mean return of each seed, by which taggers play against which runners."""
    play = eqx.filter_jit(partial(_play, graph))
    found = {taggers: {runners: [] for runners in SIDES} for taggers in SIDES}
    for i, seed in enumerate(SEEDS):
        old, new = (jax.tree.map(lambda leaf, i=i: leaf[i], weights) for weights in (before, after))
        networks = {"untrained": old.networks, "trained": new.networks}
        for taggers, runners in PAIRINGS:
            both = {"tagger": networks[taggers]["tagger"], "runner": networks[runners]["runner"]}
            weights = eqx.tree_at(lambda w: w.networks, new, both)
            found[taggers][runners].append(float(play(weights, jax.random.key(seed))))
    return found


def _play(graph, weights, key):
    """The taggers' mean return over the first episode of each of `EPISODES` environments."""
    graph = graph._replace(loops=graph.loops._replace(num_envs=EPISODES, num_steps=LONGEST))
    collector = start(graph, key, jnp.arange(EPISODES, dtype=jnp.int32)).collector
    steps = collect(graph, weights, collector, key)[1].steps
    end = jnp.argmax(steps.terminated | steps.truncated, axis=0)
    return jnp.mean(steps.info["agent_returns"]["tagger"][end, jnp.arange(EPISODES)])


# --- what is written ----------------------------------------------------------------------------------

COLOURS = {"tagger": "#1565c0", "runner": "#ef6c00"}


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for panel, row in zip(panels, rows, strict=True):
        untrained = float(np.mean(row["taggers_return"]["untrained"]["untrained"]))
        panel.axhline(untrained, color=COLOURS["tagger"], linewidth=0.8, linestyle=(0, (1, 2)))
        for kind, colour in COLOURS.items():
            steps, returns = np.asarray(row["curves"]["steps"]) / 1_000, np.asarray(row["curves"][kind])
            panel.plot(steps, returns.mean(axis=1), color=colour, linewidth=1.8, label=f"{kind}s")
            panel.fill_between(
                steps, returns.min(axis=1), returns.max(axis=1), color=colour, alpha=0.18, linewidth=0
            )
        panel.set_title(row["title"], fontsize=11)
        panel.set_xlim(left=0)
        panel.set_xlabel("environment steps (thousands)")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, linewidth=0.6)
    panels[0].legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
    panels[0].set_ylabel("return of an agent, mean of its kind")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def table(rows: list[dict]) -> str:
    lines = [
        "| Environment | Taggers | Runners | Taggers' return, seeds 0 to 2 | Mean | Target | Met |",
        "|---|---|---|---|---:|---|---|",
    ]
    for row in rows:
        for taggers, runners in PAIRINGS:
            found = row["taggers_return"][taggers][runners]
            place = row["environment"] if taggers == runners == "untrained" else ""
            each = ", ".join(f"{value:.2f}" for value in found)
            judged = taggers == runners == "trained"
            target = f"≥ {row['target']:g}, every seed" if judged else ""
            met = ("yes" if row["met"] else "no") if judged else ""
            lines.append(f"| {place} | {taggers} | {runners} | {each} | {np.mean(found):.2f} | {target} | {met} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where figures and multi_agent.md go")
    options = parser.parse_args()
    enable_compilation_cache()
    rows = [study(of) for of in STUDIES]
    protocol = {"seeds": SEEDS, "episodes": EPISODES, "action": "drawn"}
    write_result("tag_learning", protocol | {"rows": rows}, directory=options.output)
    draw(rows, options.docs / "figures" / "tag_learning.png")
    write_table(table(rows), options.docs / "multi_agent.md")


if __name__ == "__main__":
    main()
