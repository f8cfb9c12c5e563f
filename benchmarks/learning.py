"""PPO on small environments: Rollmill beside Rejax at Rejax's hyperparameters, and a memory probe.

    python benchmarks/learning.py --rejax .rejax/bin/python     # make benchmark-learning

Five seeds a side, all in one program; every point of a curve is the mean return of 100 episodes with
the policy's most likely action. Writes results/learning.json, docs/figures/learning.png and the table
in docs/learning.md. Needs matplotlib.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from measure import RESULTS, rejax_curves, write_result, write_table

import rollmill
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from rollmill.programs.evaluation.compiled import evaluate
from rollmill.recipes.classic import RECIPES, Recipe

DOCS = Path(__file__).parent.parent / "docs"
SEEDS = tuple(range(5))
EPISODES, POINTS = 100, 25


class Curves(NamedTuple):
    """Mean returns `[seed][point]` after so many environment steps."""

    steps: list[int]
    returns: list[list[float]]

    @property
    def final(self) -> list[float]:
        """Return of each seed, after the whole training."""
        return [of_seed[-1] for of_seed in self.returns]


class Study(NamedTuple):
    """A recipe, and the return that it should reach."""

    recipe: str
    target: float
    worst_seed: bool
    """Whether every seed must reach the target, or their mean."""


STUDIES = (
    Study("rejax-cartpole", 475.0, worst_seed=True),
    Study("rejax-acrobot", -95.0, worst_seed=False),
    Study("rejax-pendulum", -250.0, worst_seed=False),
)
MEMORY = Study("t-maze-gru", 0.95, worst_seed=True)


def of_rollmill(recipe: Recipe) -> Curves:
    graph = rollmill.ppo(rollmill.make(recipe.environment), recipe.config)
    program = lower(graph, seeds=SEEDS)
    iterations = graph.loops.iterations
    marks = np.unique(np.linspace(0, iterations, POINTS + 1).round().astype(int)).tolist()
    state, means = program.start(), [_greedy_means(graph, program.start(), 0)]
    for first, until in zip(marks, marks[1:], strict=False):
        for window in dispatch_ahead(program, state, first=first, until=until):
            state = window.after
        means.append(_greedy_means(graph, state, until))
    return Curves([mark * graph.loops.batch_size for mark in marks], np.transpose(means).tolist())


def of_rejax(recipe: Recipe, python: str) -> tuple[Curves, dict]:
    settings = _as_rejax(recipe)
    answer = rejax_curves(python, "PPO", settings, seeds=SEEDS, episodes=EPISODES)
    steps = [settings["eval_freq"] * point for point in range(POINTS + 1)]
    return Curves(steps, answer["returns"]), answer["versions"]


def _greedy_means(graph, state, iteration: int) -> list[float]:
    means = []
    for i in range(len(SEEDS)):
        weights = jax.tree.map(lambda leaf, i=i: leaf[i], graph.weights(state.learner))
        means.append(float(evaluate(graph, weights, episodes=EPISODES, seed=iteration).returns.mean()))
    return means


def _as_rejax(recipe: Recipe) -> dict:
    """The recipe in the words of `rejax.PPO.create`; what Rejax has no word for is off, and stays off."""
    config = recipe.config
    assert not config.anneal_lr and config.clip_vloss and config.norm_adv and config.target_kl is None
    return {
        "env": recipe.environment,
        "agent_kwargs": {
            "activation": config.network.activation,
            "hidden_layer_sizes": list(config.network.hidden_sizes),
        },
        "num_envs": config.num_envs,
        "num_steps": config.num_steps,
        "num_epochs": config.update_epochs,
        "num_minibatches": config.num_minibatches,
        "learning_rate": config.learning_rate,
        "max_grad_norm": config.max_grad_norm,
        "total_timesteps": config.total_timesteps,
        "eval_freq": config.total_timesteps // POINTS,
        "gamma": config.gamma,
        "gae_lambda": config.gae_lambda,
        "clip_eps": config.clip_coef,
        "ent_coef": config.ent_coef,
        "vf_coef": config.vf_coef,
        "normalize_observations": config.normalize_observations,
        "normalize_rewards": config.normalize_rewards,
    }


# --- the studies --------------------------------------------------------------------------------------


def beside_rejax(study: Study, python: str) -> dict:
    recipe = RECIPES[study.recipe]()
    own = of_rollmill(recipe)
    peer, versions = of_rejax(recipe, python)
    row = _row(study, recipe, {"Rollmill": own, "Rejax": peer}, judged="Rollmill")
    return row | {"rejax_settings": _as_rejax(recipe), "rejax_versions": versions}


def memory_probe(study: Study) -> dict:
    recipe = RECIPES[study.recipe]()
    network = replace(recipe.config.network, torso="mlp")
    without = recipe._replace(config=replace(recipe.config, network=network))
    sides = {"Rollmill, GRU": of_rollmill(recipe), "Rollmill, MLP": of_rollmill(without)}
    row = _row(study, recipe, sides, judged="Rollmill, GRU")
    solved_without_memory = max(sides["Rollmill, MLP"].final) >= 0.5
    return row | {"met": row["met"] and not solved_without_memory}


def _row(study: Study, recipe: Recipe, sides: dict[str, Curves], *, judged: str) -> dict:
    final = sides[judged].final
    reached = min(final) if study.worst_seed else float(np.mean(final))
    for name, curves in sides.items():
        each = ", ".join(f"{value:.4g}" for value in curves.final)
        print(f"{recipe.environment}, {name}: {each}; mean {np.mean(curves.final):.4g}", flush=True)
    return {
        "environment": recipe.environment,
        "recipe": study.recipe,
        "target": study.target,
        "target_is_for": "every seed" if study.worst_seed else "the mean",
        "met": bool(reached >= study.target),
        "sides": {name: curves._asdict() | {"final": curves.final} for name, curves in sides.items()},
    }


# --- what is written ----------------------------------------------------------------------------------

COLOURS = {"Rollmill": "#1565c0", "Rejax": "#ef6c00", "Rollmill, GRU": "#1565c0", "Rollmill, MLP": "#757575"}


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(9, 6.2), layout="constrained")
    for panel, row in zip(panels.flat, rows, strict=True):
        _draw_row(panel, row)
    for panel in panels[-1]:
        panel.set_xlabel("environment steps (thousands)")
    for panel in panels[:, 0]:
        panel.set_ylabel("mean return, greedy policy")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def _draw_row(panel, row: dict) -> None:
    panel.axhline(row["target"], color="black", linewidth=0.8, linestyle=(0, (4, 3)), label="target")
    for name, curves in row["sides"].items():
        steps, returns = np.asarray(curves["steps"]) / 1_000, np.asarray(curves["returns"])
        panel.plot(steps, returns.mean(axis=0), color=COLOURS[name], linewidth=1.8, label=name)
        panel.fill_between(
            steps, returns.min(axis=0), returns.max(axis=0), color=COLOURS[name], alpha=0.18, linewidth=0
        )
    panel.set_title(row["environment"], fontsize=11)
    panel.set_xlim(left=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.legend(
        frameon=False, fontsize=9, loc="lower right" if row["recipe"] != MEMORY.recipe else "center right"
    )


def table(rows: list[dict]) -> str:
    lines = [
        "| Environment | | Final return of seeds 0 to 4 | Mean | Target | Met |",
        "|---|---|---|---:|---|---|",
    ]
    for row in rows:
        for i, (name, curves) in enumerate(row["sides"].items()):
            each = ", ".join(f"{_rounded(value)}" for value in curves["final"])
            target = f"≥ {row['target']:g}, {row['target_is_for']}" if i == 0 else ""
            met = ("yes" if row["met"] else "no") if i == 0 else ""
            place = row["environment"] if i == 0 else ""
            mean = _rounded(float(np.mean(curves["final"])))
            lines.append(f"| {place} | {name} | {each} | {mean} | {target} | {met} |")
    return "\n".join(lines)


def _rounded(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rejax", required=True, help="a Python with rejax==0.1.3 and gymnax==0.0.9")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where figures/learning.png and learning.md go")
    options = parser.parse_args()
    enable_compilation_cache()
    rows = [beside_rejax(study, options.rejax) for study in STUDIES] + [memory_probe(MEMORY)]
    protocol = {"seeds": SEEDS, "episodes_per_point": EPISODES, "action": "most likely"}
    write_result("learning", protocol | {"rows": rows}, directory=options.output)
    draw(rows, options.docs / "figures" / "learning.png")
    write_table(table(rows), options.docs / "learning.md")


if __name__ == "__main__":
    main()
