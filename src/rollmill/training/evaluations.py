"""Evaluates the policy of a run at regular intervals while it trains."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from rollmill.core.errors import UsageError, unknown_name
from rollmill.dataflow import Graph, State, Weights, flow
from rollmill.envs import as_environment, parse_options
from rollmill.hooks import evaluation_return
from rollmill.programs.dispatch import Pauses, Window
from rollmill.programs.evaluation.episodes import EvaluationEpisodes, Evaluator
from rollmill.programs.faults.locate import is_finite
from rollmill.programs.kernel_choice import backend_beside_training
from rollmill.programs.states import state_shapes
from rollmill.record.display import Display
from rollmill.runs.options import RunOptions

OPTIONS = ("evaluate_episodes", "evaluate_seed", "evaluate_stochastic", "evaluate_env_options")
"""Fields of `RunOptions` that configure evaluations, and have no effect without `evaluate_every`."""


@dataclass(frozen=True)
class EvaluationProgress:
    """The evaluations that a run has completed so far."""

    iteration: int = 0
    """Iteration of the latest evaluation."""
    mean_return: float | None = None
    """Mean return of the latest evaluation. With the option `return_of`, only the agents of that kind count."""
    best_iteration: int | None = None
    best_return: float | None = None
    """Highest mean return of all evaluations so far. `best_iteration` is the newest iteration that reached it, as
    among checkpoints with equal scores."""


class _PlayedAhead(NamedTuple):
    iteration: int
    of_seeds: list[EvaluationEpisodes]
    seconds: float


class PeriodicEvaluation:
    """Evaluates a policy with `play` at regular iterations and after the last iteration, even if a hook stops the
    run.
    """

    def __init__(self, graph: Graph, options: RunOptions, play: Evaluator) -> None:
        self._graph, self._play, self._seeds = graph, play, options.seeds
        self._metric = evaluation_return(options.return_of)
        self.every = iterations_between(graph, options)
        """Iterations between two evaluations."""
        self.progress = EvaluationProgress()
        """Evaluations completed so far. It is replaced if the run goes back to an earlier state."""
        self._played: _PlayedAhead | None = None

    def is_due(self, iteration: int) -> bool:
        """Returns whether the policy should be evaluated after this iteration."""
        ends = self.is_new(iteration) and iteration == self._graph.loops.iterations
        return ends or iteration // self.every > self.progress.iteration // self.every

    def is_new(self, iteration: int) -> bool:
        """Returns whether the policy after this iteration has not been evaluated yet."""
        return self.progress.iteration < iteration

    @property
    def pauses(self) -> Pauses:
        """Returns the pauses in which a program leaves the device to evaluations."""
        return Pauses(self.every, self._play_ahead)

    def _play_ahead(self, window: Window) -> None:
        """Plays the episodes that `run` will report, once the window's metrics have been written down."""
        if self.is_due(window.last) and all(map(is_finite, window.metrics)):
            self._played = self._play_episodes(window.last, window.after)

    def run(self, iteration: int, state: State) -> dict[str, Any]:
        """Evaluates the policy of a training state and returns the metrics.

        If the policy has already been evaluated during a pause, its metrics are returned. Raises a `UsageError` if
        an episode does not end, and a `ContractError` if a host environment raises an exception.
        """
        played, self._played = self._played, None
        if played is None or played.iteration != iteration:
            played = self._play_episodes(iteration, state)
        metrics = _metrics(played.of_seeds, self._seeds)
        mean, best = metrics[self._metric], self.progress.best_return
        improved = best is None or mean >= best
        self.progress = EvaluationProgress(
            iteration=iteration,
            mean_return=mean,
            best_iteration=iteration if improved else self.progress.best_iteration,
            best_return=mean if improved else best,
        )
        return {**metrics, "evaluation/seconds": played.seconds}

    def _play_episodes(self, iteration: int, state: State) -> _PlayedAhead:
        began = time.perf_counter()
        weights = jax.device_get(self._graph.weights(state.learner))
        of_seeds = [self._play(own) for own in self._of_each_seed(weights)]
        return _PlayedAhead(iteration, of_seeds, time.perf_counter() - began)

    def _of_each_seed(self, weights: Weights) -> list[Weights]:
        count = len(self._seeds)
        return (
            [weights]
            if count == 1
            else [jax.tree.map(lambda leaf, s=s: np.asarray(leaf[s]), weights) for s in range(count)]
        )

    @property
    def summary(self) -> dict[str, Any]:
        """Results of the evaluations for the summary of the run."""
        return {
            "evaluation_return": self.progress.mean_return,
            "best_evaluation_return": self.progress.best_return,
            "best_evaluation_iteration": self.progress.best_iteration,
        }


def _metrics(found: Sequence[EvaluationEpisodes], seeds: Sequence[int]) -> dict[str, Any]:
    returns = np.concatenate([episodes.returns for episodes in found]).astype(np.float64)
    lengths = np.concatenate([episodes.lengths for episodes in found])
    of_seeds = {f"_seed{seed}": [part] for seed, part in zip(seeds, found, strict=True)} if len(seeds) > 1 else {}
    each = {f"evaluation/return{seed}": _mean(part.returns) for seed, (part,) in of_seeds.items()}
    kinds = {
        f"evaluation/returns/{kind}{seed}": _mean(np.concatenate([part.agent_returns[kind] for part in parts]))
        for kind in found[0].agent_returns
        for seed, parts in {"": found, **of_seeds}.items()
    }
    return {
        "evaluation/return": _mean(returns),
        "evaluation/return_std": float(np.std(returns)),
        "evaluation/return_min": float(np.min(returns)),
        "evaluation/return_max": float(np.max(returns)),
        "evaluation/length": _mean(lengths),
        "evaluation/episodes": int(returns.size),
        **kinds,
        **each,
    }


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values, dtype=np.float64))


def iterations_between(graph: Graph, options: RunOptions) -> int:
    """Returns the number of iterations between two evaluations, which take at least `evaluate_every` environment
    steps.
    """
    return -(-(options.evaluate_every or 1) // graph.loops.batch_size)


def prepare_evaluation(
    graph: Graph, described: dict[str, Any], options: RunOptions, display: Display
) -> PeriodicEvaluation | None:
    """Compiles the evaluation that the options of a run ask for. Returns None if they ask for none.

    `described` is the description of the graph. Raises a `UsageError` if the options contradict each other or do
    not fit the environment.
    """
    if options.evaluate_every is None:
        _refuse_unread(options)
        return None
    from rollmill.policies.environments import evaluator_on

    began = time.perf_counter()
    weights = jax.eval_shape(graph.weights, state_shapes(graph).learner)
    play = evaluator_on(
        graph,
        weights,
        _environment_of(described, options),
        episodes=options.evaluate_episodes,
        seed=options.evaluate_seed,
        stochastic=options.evaluate_stochastic,
        backend=backend_beside_training(graph, options.fusion, options.numerics),
    )
    evaluation = PeriodicEvaluation(graph, options, play)
    steps = evaluation.every * graph.loops.batch_size
    display.note(f"compiled the evaluation in {time.perf_counter() - began:.1f} s; it runs every {steps:,} steps")
    return evaluation


def check_return_of(graph: Graph, options: RunOptions) -> None:
    """Raises a `UsageError` if `return_of` is set, but is not one of several kinds of agents."""
    if options.return_of is None:
        return
    kinds = flow(graph).trajectory.steps.info.get("agent_returns", {})
    if len(kinds) < 2:
        raise UsageError(
            f"return_of={options.return_of} has no effect, because {graph.settings.get('environment')} has only "
            "one kind of agent. hint: leave it out."
        )
    if options.return_of not in kinds:
        raise unknown_name("kind of agents in return_of", options.return_of, kinds)


def without_evaluations(options: RunOptions) -> RunOptions:
    """Returns the options of a run without evaluations and without `stop_at_return`."""
    default = RunOptions()
    return replace(
        options, **{name: getattr(default, name) for name in ("evaluate_every", "stop_at_return", *OPTIONS)}
    )


def _environment_of(described: dict[str, Any], options: RunOptions) -> Any:
    """Returns the environment to evaluate on. None for the graph's own."""
    changed = parse_options(options.evaluate_env_options, flag="--evaluate-env-options")
    if not changed:
        return None
    name = described["environment"]
    if "environment" in described["custom"]:
        raise UsageError(
            f"evaluate_env_options={' '.join(options.evaluate_env_options)} is not supported for the environment "
            f"{name}, which was created in Python and cannot be created again with other options. hint: register "
            "it, or leave evaluate_env_options out."
        )
    return as_environment(name, {**described.get("environment_options", {}), **changed})


def _refuse_unread(options: RunOptions) -> None:
    default = RunOptions()
    for name in OPTIONS:
        if (value := getattr(options, name)) != getattr(default, name):
            raise UsageError(
                f"{name}={value} has no effect without evaluate_every. hint: add --evaluate-every 100000, for "
                "example."
            )
