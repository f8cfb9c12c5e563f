"""MAPPO on Tag: taggers' returns while both kinds learn, and each side against untrained ones.

    python benchmarks/tag_learning.py     # make benchmark-tag-learning
    python benchmarks/tag_learning.py tag-continuous-100 tag-gridworld-100     # on a GPU

Three seeds train in one program. Every point of a curve is the mean return of the training episodes that ended
since the point before, with actions drawn from the policies. Seconds are those of the whole study on the clock and
of the training alone, compilation included in both. Writes results/tag_learning.json, and for the worlds in which
WarpDrive publishes its trainings, results/tag_sizes.json. Rows of other studies stay there, each with its commit,
versions and hardware.
"""

import time
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from measure import advance, gpu_name, marks, options, read_result, some_of, this_commit, write_result

import rollmill
from rollmill.core.machine import hardware, versions
from rollmill.dataflow import collect, init_state
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiled import lower
from rollmill.recipes import RECIPES

SEEDS, EPISODES, POINTS = tuple(range(3)), 200, 40


class Study(NamedTuple):
    """A training in a world, with the return that its taggers should reach against the runners that it trains."""

    name: str
    title: str
    target: float | None
    recipe: str | None = None
    environment: str = ""
    world: dict[str, Any] = {}
    config: dict[str, Any] = {}
    episode_steps: int = 100

    def graph(self) -> Any:
        """Returns the training."""
        if self.recipe is None:
            return rollmill.mappo(rollmill.make(self.environment, **self.world), **self.config)
        recipe = RECIPES[self.recipe]()
        return rollmill.mappo(rollmill.make(recipe.environment), recipe.config)


STUDIES = [
    Study("tag-gridworld", "TagGridWorld, 4 taggers, 1 runner", 5.0, "tag-gridworld"),
    Study("tag-continuous", "TagContinuous, 3 taggers, 9 runners", 10.0, "tag-continuous"),
]
SIZES = [
    Study(
        *("tag-continuous-100", "TagContinuous, 5 taggers, 100 runners", None, None, "TagContinuous-v0"),
        *({"num_taggers": 5, "num_runners": 100}, {"total_timesteps": 524_288}, 500),
    ),
    Study(
        *("tag-gridworld-100", "TagGridWorld, 100 x 100, 4 taggers, 1 runner", None, None, "TagGridWorld-v0"),
        *({"num_taggers": 4}, {"total_timesteps": 50_331_648, "num_envs": 2_048}, 100),
    ),
]
"""WarpDrive's worlds (run_configs/tag_continuous.yaml and tag_gridworld.yaml), by MAPPO's defaults."""
OF_RESULTS = {"tag_learning": STUDIES, "tag_sizes": SIZES}

SIDES = ("untrained", "trained")
PAIRINGS = [(taggers, runners) for taggers in SIDES for runners in SIDES]


def studied(study: Study) -> dict[str, Any]:
    """Returns what a study's training learned."""
    began, graph = time.perf_counter(), study.graph()
    before, after, curves = train(graph)
    training = time.perf_counter() - began
    found = cross_play(graph, before, after, study.episode_steps)
    pairs = zip(found["trained"]["trained"], found["untrained"]["trained"], strict=True)
    met = None if study.target is None else all(own >= max(study.target, untrained) for own, untrained in pairs)
    name = graph.settings["environment"]
    for taggers, runners in PAIRINGS:
        each = ", ".join(f"{value:.2f}" for value in found[taggers][runners])
        print(f"{name}: {taggers} taggers, {runners} runners: taggers' return {each}", flush=True)
    whole = time.perf_counter() - began
    print(f"{name}: {training:.1f} s of training, {whole:.1f} s with matches", flush=True)
    said = {"study": study.name, "environment": name, "title": study.title, "recipe": study.recipe}
    judged = {"target": study.target, "met": met, "training_seconds": training, "seconds": whole}
    made = {"commit": this_commit(), "versions": versions(), "cpu": hardware()["cpu"], "gpu": gpu_name()}
    of = {"world": study.world, "config": study.config}
    return {**said, **judged, **of, "taggers_return": found, "curves": curves, **made}


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
            count = ended.sum(axis=0)  # none in short intervals of long episodes: then the newest mean stays
            mean = np.where(count > 0, np.sum(ended * returns, axis=0) / np.maximum(count, 1), returns[-1])
            curves.setdefault(kind, []).append(mean.tolist())
    return graph.weights(begin.learner), graph.weights(state.learner), curves


def cross_play(graph: Any, before: Any, after: Any, episode_steps: int) -> dict[str, dict[str, list[float]]]:
    """Returns the taggers' mean return of each seed, by which taggers play against which runners."""
    play = eqx.filter_jit(partial(_play, graph, episode_steps))
    found: dict[str, dict[str, list[float]]] = {taggers: {runners: [] for runners in SIDES} for taggers in SIDES}
    for i, seed in enumerate(SEEDS):
        old, new = (jax.tree.map(lambda leaf, i=i: leaf[i], weights) for weights in (before, after))
        networks = {"untrained": old.networks, "trained": new.networks}
        for taggers, runners in PAIRINGS:
            both = {"tagger": networks[taggers]["tagger"], "runner": networks[runners]["runner"]}
            weights = eqx.tree_at(lambda w: w.networks, new, both)
            found[taggers][runners].append(float(play(weights, jax.random.key(seed))))
    return found


def _play(graph: Any, episode_steps: int, weights: Any, key: Any) -> Any:
    """Returns the taggers' mean return over the first episode of each of `EPISODES` environments."""
    graph = graph._replace(loops=graph.loops._replace(num_envs=EPISODES, num_steps=episode_steps))
    collector = init_state(graph, key, jnp.arange(EPISODES, dtype=jnp.int32)).collector
    steps = collect(graph, weights, collector, key)[1].steps
    end = jnp.argmax(steps.terminated | steps.truncated, axis=0)
    return jnp.mean(steps.info["agent_returns"]["tagger"][end, jnp.arange(EPISODES)])


def main() -> None:
    every = [study.name for studies in OF_RESULTS.values() for study in studies]
    default = [study.name for study in STUDIES]
    chosen = options(__doc__, {"studies": some_of(every, default)})
    enable_compilation_cache()
    protocol = {"seeds": SEEDS, "episodes": EPISODES, "action": "drawn"}
    for name, studies in OF_RESULTS.items():
        rows = {row["study"]: row for row in read_result(name, chosen.output).get("rows", [])}
        for study in studies:
            if study.name not in chosen.studies:
                continue
            rows[study.name] = studied(study)
            kept = [rows[each.name] for each in studies if each.name in rows]
            write_result(name, protocol | {"rows": kept}, chosen.output)


if __name__ == "__main__":
    main()
