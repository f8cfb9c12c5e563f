"""PPO on small environments: Rollmill beside Rejax at Rejax's hyperparameters, and a memory probe.

    python benchmarks/learning.py --rejax .rejax/bin/python     # make benchmark-learning

Five seeds a side train in one program. Every point of a curve is the mean return of 100 episodes with the policy's
most likely action. Writes results/learning.json.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from measure import REJAX, advance, foreign, marks, options, write_result

import rollmill
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiled import lower
from rollmill.programs.evaluation.compiled import evaluate
from rollmill.recipes.classic import RECIPES, Recipe

SEEDS, EPISODES, POINTS = tuple(range(5)), 100, 25
TARGETS = {
    "rejax-cartpole": (475.0, "every seed"),
    "rejax-acrobot": (-95.0, "the mean"),
    "rejax-pendulum": (-250.0, "the mean"),
    "t-maze-gru": (0.95, "every seed"),
}
"""Returns that recipes should reach."""


class Curves(NamedTuple):
    """Mean returns `[seed][point]` by environment steps."""

    steps: list[int]
    returns: list[list[float]]

    @property
    def final(self) -> list[float]:
        return [returns[-1] for returns in self.returns]


def of_rollmill(recipe: Recipe) -> Curves:
    graph = rollmill.ppo(rollmill.make(recipe.environment), recipe.config)
    program = lower(graph, seeds=SEEDS)
    points = marks(graph.loops.iterations, POINTS)
    state, means = program.start(), [_greedy_means(graph, program.start(), 0)]
    for first, until in zip(points, points[1:], strict=False):
        state, _ = advance(program, state, first, until)
        means.append(_greedy_means(graph, state, until))
    return Curves([point * graph.loops.batch_size for point in points], np.transpose(means).tolist())


def _greedy_means(graph: Any, state: Any, iteration: int) -> list[float]:
    weights = [jax.tree.map(lambda leaf, i=i: leaf[i], graph.weights(state.learner)) for i in range(len(SEEDS))]
    return [float(evaluate(graph, each, episodes=EPISODES, seed=iteration).returns.mean()) for each in weights]


def rejax_settings(recipe: Recipe) -> dict[str, Any]:
    """Returns the recipe as arguments of `rejax.PPO.create`; Rejax lacks all that is asserted to be off."""
    config = recipe.config
    assert not config.anneal_lr and config.clip_vloss and config.norm_adv and config.target_kl is None
    same = ("num_envs", "num_steps", "num_minibatches", "learning_rate", "max_grad_norm", "total_timesteps")
    same += ("gamma", "gae_lambda", "ent_coef", "vf_coef", "normalize_observations", "normalize_rewards")
    network = {"activation": config.network.activation, "hidden_layer_sizes": list(config.network.hidden_sizes)}
    return {
        **{name: getattr(config, name) for name in same},
        **{"env": recipe.environment, "agent_kwargs": network, "num_epochs": config.update_epochs},
        **{"eval_freq": config.total_timesteps // POINTS, "clip_eps": config.clip_coef},
    }


def beside_rejax(name: str, python: str) -> dict[str, Any]:
    recipe = RECIPES[name]()
    settings, own = rejax_settings(recipe), of_rollmill(recipe)
    order = {"algorithm": "PPO", "settings": settings, "seeds": SEEDS, "episodes": EPISODES}
    peer = foreign(python, "rejax_side.py", order)
    steps = [settings["eval_freq"] * point for point in range(POINTS + 1)]
    sides = {"Rollmill": own, "Rejax": Curves(steps, peer["returns"])}
    return row_of(name, recipe, sides) | {"rejax_settings": settings, "rejax_versions": peer["versions"]}


def memory_probe(name: str) -> dict[str, Any]:
    recipe = RECIPES[name]()
    network = replace(recipe.config.network, torso="mlp")
    without = recipe._replace(config=replace(recipe.config, network=network))
    sides = {"Rollmill, GRU": of_rollmill(recipe), "Rollmill, MLP": of_rollmill(without)}
    row = row_of(name, recipe, sides)
    return row | {"met": row["met"] and max(sides["Rollmill, MLP"].final) < 0.5}


def row_of(name: str, recipe: Recipe, sides: dict[str, Curves]) -> dict[str, Any]:
    """Returns all curves, and whether those of the first side reach the target."""
    (target, of), final = TARGETS[name], next(iter(sides.values())).final
    for side, curves in sides.items():
        each = ", ".join(f"{value:.4g}" for value in curves.final)
        print(f"{recipe.environment}, {side}: {each}; mean {np.mean(curves.final):.4g}", flush=True)
    return {
        **{"environment": recipe.environment, "recipe": name, "target": target, "target_is_for": of},
        "met": bool((min(final) if of == "every seed" else np.mean(final)) >= target),
        "sides": {side: curves._asdict() | {"final": curves.final} for side, curves in sides.items()},
    }


def main() -> None:
    chosen = options(__doc__, rejax=(str, REJAX))
    if not chosen.rejax:
        raise SystemExit(f"--rejax is missing: {REJAX}.")
    enable_compilation_cache()
    *beside, memory = TARGETS
    rows = [*(beside_rejax(name, chosen.rejax) for name in beside), memory_probe(memory)]
    protocol = {"seeds": SEEDS, "episodes_per_point": EPISODES, "action": "most likely"}
    write_result("learning", protocol | {"rows": rows}, chosen.output)


if __name__ == "__main__":
    main()
