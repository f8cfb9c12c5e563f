"""MAPPO on Tag: taggers' returns while both kinds learn, and each side against untrained ones.

    python benchmarks/tag_learning.py     # make benchmark-tag-learning

Three seeds train in one program. Every point of a curve is the mean return of the training episodes that ended
since the point before, with actions drawn from the policies. Writes results/tag_learning.json.
"""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from measure import advance, marks, options, write_result

import rollmill
from rollmill.dataflow import collect, start
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiled import lower
from rollmill.recipes import RECIPES

SEEDS, EPISODES, POINTS = tuple(range(3)), 200, 40
EPISODE_STEPS = 100
"""Steps of an episode in both environments."""
STUDIES = {
    "tag-gridworld": ("TagGridWorld, 4 taggers, 1 runner", 5.0),
    "tag-continuous": ("TagContinuous, 3 taggers, 9 runners", 10.0),
}
"""Title of a recipe, and the return that its taggers should reach against the runners that learned with them."""
SIDES = ("untrained", "trained")
PAIRINGS = [(taggers, runners) for taggers in SIDES for runners in SIDES]


def study(name: str) -> dict[str, Any]:
    (title, target), recipe = STUDIES[name], RECIPES[name]()
    graph = rollmill.mappo(rollmill.make(recipe.environment), recipe.config)
    before, after, curves = train(graph)
    found = cross_play(graph, before, after)
    pairs = zip(found["trained"]["trained"], found["untrained"]["trained"], strict=True)
    met = all(trained >= max(target, untrained) for trained, untrained in pairs)
    for taggers, runners in PAIRINGS:
        each = ", ".join(f"{value:.2f}" for value in found[taggers][runners])
        print(f"{recipe.environment}: {taggers} taggers, {runners} runners: taggers' return {each}", flush=True)
    said = {"environment": recipe.environment, "title": title, "recipe": name, "target": target, "met": met}
    return {**said, "taggers_return": found, "curves": curves}


def train(graph: Any) -> tuple[Any, Any, dict[str, list]]:
    """Returns the weights of all seeds before and after, and the curves of both kinds' returns."""
    program = lower(graph, seeds=SEEDS)
    begin = state = program.start()
    points = marks(graph.loops.iterations, POINTS)
    curves: dict[str, list] = {"steps": [point * graph.loops.batch_size for point in points[1:]]}
    for first, until in zip(points, points[1:], strict=False):
        state, rows = advance(program, state, first, until)
        ended = np.asarray([row["episodes/ended"] for row in rows])
        for kind in ("tagger", "runner"):
            returns = np.asarray([row[f"returns/{kind}"] for row in rows])
            mean = np.sum(ended * returns, axis=0) / ended.sum(axis=0)
            curves.setdefault(kind, []).append(mean.tolist())
    return graph.weights(begin.learner), graph.weights(state.learner), curves


def cross_play(graph: Any, before: Any, after: Any) -> dict[str, dict[str, list[float]]]:
    """Returns the taggers' mean return of each seed, by which taggers play against which runners."""
    play = eqx.filter_jit(partial(_play, graph))
    found: dict[str, dict[str, list[float]]] = {taggers: {runners: [] for runners in SIDES} for taggers in SIDES}
    for i, seed in enumerate(SEEDS):
        old, new = (jax.tree.map(lambda leaf, i=i: leaf[i], weights) for weights in (before, after))
        networks = {"untrained": old.networks, "trained": new.networks}
        for taggers, runners in PAIRINGS:
            both = {"tagger": networks[taggers]["tagger"], "runner": networks[runners]["runner"]}
            weights = eqx.tree_at(lambda w: w.networks, new, both)
            found[taggers][runners].append(float(play(weights, jax.random.key(seed))))
    return found


def _play(graph: Any, weights: Any, key: Any) -> Any:
    """Returns the taggers' mean return over the first episode of each of `EPISODES` environments."""
    graph = graph._replace(loops=graph.loops._replace(num_envs=EPISODES, num_steps=EPISODE_STEPS))
    collector = start(graph, key, jnp.arange(EPISODES, dtype=jnp.int32)).collector
    steps = collect(graph, weights, collector, key)[1].steps
    end = jnp.argmax(steps.terminated | steps.truncated, axis=0)
    return jnp.mean(steps.info["agent_returns"]["tagger"][end, jnp.arange(EPISODES)])


def main() -> None:
    chosen = options(__doc__)
    enable_compilation_cache()
    protocol = {"seeds": SEEDS, "episodes": EPISODES, "action": "drawn"}
    write_result("tag_learning", protocol | {"rows": [study(name) for name in STUDIES]}, chosen.output)


if __name__ == "__main__":
    main()
