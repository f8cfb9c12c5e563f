"""Plans runs that share a program, and builds the graph once, for the first run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rollmill.algorithms.hyperparameters import differing, numbers_for
from rollmill.core.errors import UsageError
from rollmill.core.json_data import writable
from rollmill.core.types import Environment
from rollmill.dataflow import Graph
from rollmill.envs import make
from rollmill.envs.numbers import held_numbers
from rollmill.runs.algorithms import ALGORITHMS
from rollmill.training.evolution import EvolutionRule
from rollmill.training.placing import prepare_devices
from rollmill.training.preparing import PlannedTraining
from rollmill.training.recorder import default_log_every
from rollmill.training.request import ResolvedRequest, TrainingRequest, resolve
from rollmill.training.training import plan_training

ALONE = ("evaluate_every", "stop_at_return", "start_from", "clone", "pool_from")
"""Run options that require a separate program for each run."""

SHARED = ("unroll", "fusion", "numerics", "devices", "checkpoint_iterations", "log_every")
"""Run options that must be equal for all runs in one program."""


class _Built(NamedTuple):
    """A request and its graph."""

    resolved: ResolvedRequest
    graph: Graph


def plan_population(
    requests: Sequence[TrainingRequest], *, rule: EvolutionRule | None = None, goes_on: bool = False
) -> list[PlannedTraining]:
    """Checks that runs can share a program, and plans each of them.

    Args:
        requests: the training requests, one per run.
        rule: settings of population-based training, or None. With it, all runs save their states at the rungs and
            every `checkpoint_seconds`.
        goes_on: whether the runs already exist.

    Raises:
        UsageError: the requests differ in anything but seeds and numeric hyperparameters.
    """
    if len(requests) < 2:
        raise UsageError("a population needs at least two members.")
    prepare_devices(requests[0].options, environment=requests[0].environment)
    resolved = resolve(requests[0])
    first = _Built(resolved, resolved.graph())
    loops = first.graph.loops
    shared = _SharedProgram(
        num_runs=len(requests),
        checkpoint_iterations=None if rule is None else rule.rung_iterations(loops.batch_size, loops.iterations),
        goes_on=goes_on,
    )
    planned = [_plan(first, None, shared)]
    _check_same_program(planned[0], planned[0])
    for request in requests[1:]:
        resolved = resolve(request)
        built = _Built(resolved, _graph_beside(first, resolved) or resolved.graph())
        planned.append(_plan(built, planned[0].described, shared))
        _check_same_program(planned[0], planned[-1])
    return planned


class _SharedProgram(NamedTuple):
    """Properties shared by all runs."""

    num_runs: int
    checkpoint_iterations: int | None
    """Iterations between checkpoints, or None for the interval in the options."""
    goes_on: bool


def _plan(built: _Built, described: Mapping[str, Any] | None, shared: _SharedProgram) -> PlannedTraining:
    """Plans one of several runs, with the description traced for the first run's graph."""
    (request, _, options), graph = built
    if options.log_every is None:  # one process writes the lines of all runs
        options = replace(options, log_every=default_log_every(graph, num_runs=shared.num_runs))
    if shared.checkpoint_iterations is not None:
        options = replace(options, checkpoint_iterations=shared.checkpoint_iterations)
    planned = plan_training(
        graph,
        # a new run would reject its existing directory
        replace(options, run_dir=None) if shared.goes_on else options,
        imports=request.imports,
        recipe=request.recipe,
        described=None if described is None else {**described, **_differing_settings(graph)},
    )
    return replace(planned, options=replace(planned.options, run_dir=options.run_dir))


def _graph_beside(first: _Built, resolved: ResolvedRequest) -> Graph | None:
    """Returns the graph of a run with other hyperparameters than the first run, without building it.

    None if they differ in more. It shares the first graph's functions, which read hyperparameters from the learner
    and the environment.
    """
    (request, config, _), (other, ours, _) = resolved, first.resolved
    names = (request.algorithm, request.environment, resolved.planned_envs)
    if names != (other.algorithm, other.environment, first.resolved.planned_envs):
        return None
    if not ALGORITHMS.is_built_in(request.algorithm):  # other algorithms may read their configuration in any way
        return None
    if getattr(config, "desired_kl", None) is not None:  # the algorithm compares hyperparameters with each other
        return None
    numbers = numbers_for(first.graph.hyperparameters, ours, config)
    parameters = _parameters_beside(first, resolved)
    if numbers is None or parameters is None:
        return None
    values = {name: getattr(config, name) for name in differing(ours, config)}
    options = {name: value for name, value in resolved.environment_options.items() if name in parameters}
    settings = dict(first.graph.settings)
    settings["config"] = {**settings["config"], **values}
    settings["environment_options"] = {**settings["environment_options"], **options}
    return first.graph._replace(settings=settings, hyperparameters=numbers, parameters=parameters)


def _parameters_beside(first: _Built, resolved: ResolvedRequest) -> Mapping[str, float] | None:
    """Returns the parameters of the environment that are program inputs, or None if they are not the same
    parameters.
    """
    ours, theirs, held = first.resolved.environment_options, resolved.environment_options, first.graph.parameters
    if ours == theirs:
        return held
    differ = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    if differ - held.keys():
        return None
    env = make(resolved.request.environment, **theirs)
    inputs = env.inputs if isinstance(env, Environment) else {}
    numbers = held_numbers({name: course for name, course in inputs.items() if name in held})
    before = {name for name in held if name.partition(":")[0] in ours}
    return {**held, **numbers} if numbers.keys() == before else None


def _differing_settings(graph: Graph) -> dict[str, Any]:
    """Returns the settings that may differ between the runs of a program."""
    settings = writable(graph.settings)
    return {name: settings[name] for name in ("config", "environment_options")}


def _check_same_program(first: PlannedTraining, other: PlannedTraining) -> None:
    """Checks that two runs differ only in seeds and hyperparameters."""
    for name in ALONE:
        if getattr(other.options, name) is not None:
            raise UsageError(f"a run with {name} needs a program of its own.")
    if other.plan.place != "program" or other.options.num_seeds > 1 or other.graph.host is not None:
        raise UsageError(
            "each run of a population must have one seed, and must train as one program in this process."
        )
    ours, theirs = _constants(first), _constants(other)
    if differ := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        raise UsageError(f"runs that differ in {', '.join(differ)} cannot share a program.")


def _constants(planned: PlannedTraining) -> dict[str, Any]:
    """Returns the settings compiled into a program."""
    graph, options = planned.graph, planned.options
    config = {
        name: type(value) if name in graph.hyperparameters else value  # a schedule is not a number
        for name, value in graph.settings["config"].items()
    }
    settings = {name: value for name, value in graph.settings.items() if name != "config"}
    settings["environment_options"] = {
        name: value for name, value in settings["environment_options"].items() if name not in graph.parameters
    }
    held = {"inputs": sorted(graph.inputs), "loops": graph.loops, "plan": planned.plan.to_json()}
    how = {name: getattr(options, name) for name in SHARED}
    return {**settings, **config, **held, **how}
