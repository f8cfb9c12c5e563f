"""Builds the graph of an actor-critic from an environment, hyperparameters and a network."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import gymnasium
import jax.numpy as jnp
import optax

from rollmill.algorithms.environment_fragments import EnvironmentFunctions, environment_functions, host_functions
from rollmill.algorithms.hyperparameters import (
    PLANNED_UPDATES,
    configured_schedule,
    current_config,
    follows_schedules,
    numbers_of,
    schedule_evaluator,
)
from rollmill.algorithms.network_policy import NetworkPolicy, network_policy
from rollmill.algorithms.on_policy import merge_metrics, no_condition, report, start_learner, update
from rollmill.algorithms.optimisers import (
    Optimiser,
    at_iteration_end,
    check_count,
    check_schedule,
    clipped_descent,
    planned_rate,
    planned_updates,
    rate_schedule,
)
from rollmill.algorithms.reports import with_schedules
from rollmill.algorithms.sizes import check_positive, check_shards, iterations_for, steps_each
from rollmill.core.bounds import scheduled_fields
from rollmill.core.errors import UsageError
from rollmill.core.json_data import is_json
from rollmill.core.machine import leave_device_memory
from rollmill.core.schema import check_names, coerce, coerce_fields
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment, Params, StartHost
from rollmill.dataflow import ElementwiseUpdate, Graph, Hyperparameters, Loops, Metrics, choose_num_shards
from rollmill.envs import is_on_host
from rollmill.envs.registry import single_agent
from rollmill.gpus.jax_settings import check_jax
from rollmill.networks import TORSOS, NetworkConfig, actor_critic, is_network, resolve_layout

Config = TypeVar("Config")

NOT_HERE = "Options of the run, such as seed and run_dir, belong to rollmill.train."


class Choices(NamedTuple):
    """A user's hyperparameters, and the parts that the user passed as Python functions."""

    config: Any
    network: Callable[..., Any] | None
    """Function that creates the network and replaces `config.network`, or None."""
    schedule: Callable[..., Any] | None
    """Learning rate as a function of the number of updates, which replaces `config.learning_rate`, or None."""

    def made_in_python(self, **others: Any) -> list[str]:
        """Returns the names of parts that were given as Python objects, which no file can store.

        `others` are further parts by name. They are included unless they are None.
        """
        parts = {**others, "network": self.network, "learning_rate": self.schedule}
        return [name for name, part in parts.items() if part is not None]


class Parts(NamedTuple):
    """Checked inputs of a graph: environment, policy and hyperparameters."""

    env: Environment | HostEnvironment
    environment: EnvironmentFunctions
    host: StartHost | None
    """Starts host environments. None for JAX environments."""
    policy: NetworkPolicy
    config: Any
    """Hyperparameters, with automatic choices resolved by the environment's spaces."""
    custom: list[str]
    """Names of the parts given as Python objects, which no file can store."""


def validate_config(
    kind: type[Config],
    env: Any,
    config: Config | Mapping[str, Any] | None,
    network: Callable[..., Any] | NetworkConfig | Mapping[str, Any] | str | None,
    overrides: dict[str, Any],
) -> tuple[Config, Choices]:
    """Validates a user's hyperparameters and overrides, and separates parts given as Python objects.

    `config` is an instance of `kind`, or a dictionary of some of its fields. Fields that are not given have their
    defaults. The network may be a `NetworkConfig`, the name of a torso or of a registered network, or a function
    that creates it. `learning_rate` may be an Optax schedule, which is a function of the number of updates. Raises
    a `UsageError` for an unknown name, or a value of the wrong type.
    """
    if isinstance(env, HostEnvironment | gymnasium.Env) or (isinstance(env, str) and is_on_host(env)):
        leave_device_memory()
    check_jax()
    if isinstance(config, Mapping):
        config, overrides = None, {**config, **overrides}
    if not isinstance(config, kind | None):
        raise UsageError(_other_config(kind, config))
    check_names(kind, overrides, what="hyperparameter", hint=NOT_HERE)
    settings, make_network = _network_of(network)
    chosen: Any = kind() if config is None else config
    if changes := {**overrides, **settings}:
        chosen = replace(chosen, **changes)
    rate: Any = chosen.learning_rate
    schedule = rate if callable(rate) else None
    chosen = coerce_fields(replace(chosen, learning_rate=_first_rate(schedule)) if schedule else chosen)
    return chosen, Choices(chosen, make_network, schedule)


def _network_of(network: Any) -> tuple[dict[str, NetworkConfig], Any]:
    """Returns the override of the field `network` and the function that creates the network. One is None."""
    if isinstance(network, str):
        network = {"name" if is_network(network) else "torso": network}
    if isinstance(network, Mapping):
        network = coerce("network", NetworkConfig, network)
    if isinstance(network, NetworkConfig):
        return {"network": network}, None
    if network is not None and not callable(network):
        raise UsageError(
            f"network is a {type(network).__name__}, expected rollmill.NetworkConfig(...), the name of a torso "
            f"({', '.join(TORSOS)}), or a function that creates a network from a random key, the observation "
            "space and the action space."
        )
    return {}, network


def _other_config(kind: type, config: Any) -> str:
    name = config.__name__ if isinstance(config, type) else type(config).__name__
    if config is kind:
        return f"config is the class {name}, expected an instance. hint: {name}(...)."
    if isinstance(config, str):
        algorithm = kind.__name__.removesuffix("Config").lower()
        return (
            f"config is the string {config!r:.60}, expected a {kind.__name__}. hint: the environment is the first "
            f'argument, as in rollmill.{algorithm}("CartPole-v1", learning_rate=1e-3), and network= chooses the '
            "network. docs/coming-from.md lists what calls of other libraries become."
        )
    algorithm = name.removesuffix("Config").lower()
    others = f", or rollmill.{algorithm}(env, config)" if name.endswith("Config") and name != kind.__name__ else ""
    return f"config is a {name}, expected a {kind.__name__}. hint: rollmill.{kind.__name__}(...){others}."


def _first_rate(schedule: Callable[[int], Any]) -> float:
    try:
        return float(schedule(0))
    except Exception as error:  # the user's function may raise anything
        raise UsageError(
            "the function learning_rate does not return a number for an update count of 0 "
            f"({type(error).__name__}: {error}). hint: use a number, or an Optax schedule such as "
            "optax.linear_schedule."
        ) from error


def optimiser_of(
    choices: Choices,
    scaling: Callable[[Any], optax.GradientTransformation],
    loops: Loops,
    *,
    rate: str = "learning_rate",
    every: int = 1,
) -> Optimiser:
    """Returns the optimiser for these hyperparameters. A schedule replaces annealing.

    `scaling` creates the optimiser's transformation from the configuration. `loops` must not count iterations that
    learn nothing. `rate` is the name of the learning rate's hyperparameter. The optimiser makes one update for
    every `every` updates of the run.
    """
    if choices.schedule is not None:
        check_schedule(choices.schedule, planned_updates(loops))

    def make(held: Hyperparameters) -> optax.GradientTransformation:
        config = current_config(_start_schedules(choices.config), held)
        rates = _learning_rate(choices, loops, every, held, rate)
        return clipped_descent(scaling(config), max_grad_norm=config.max_grad_norm, **rates)

    make({})  # raises now if the schedule is invalid
    return Optimiser(make)


def schedule_of(choices: Choices, loops: Loops, held: Hyperparameters, *, every: int = 1) -> optax.Schedule:
    """Returns the learning rate of `optimiser_of` as a function of the number of updates."""
    return rate_schedule(**_learning_rate(choices, loops, every, held))


def _start_schedules(config: Config) -> Config:
    """Returns the configuration with each schedule replaced by its initial value."""
    schedules = {name: configured_schedule(config, name) for name in scheduled_fields(type(config))}
    first = {name: schedule.first for name, schedule in schedules.items() if schedule is not None}
    return replace(config, **first) if first else config  # pyright: ignore[reportArgumentType]


def _learning_rate(
    choices: Choices, loops: Loops, every: int, held: Hyperparameters, name: str = "learning_rate"
) -> dict[str, Any]:
    """Returns the common arguments of `clipped_descent` and `rate_schedule`."""
    config, updates = current_config(choices.config, held), planned_updates(loops)
    planned: Any = held.get(PLANNED_UPDATES, updates)
    rate: Any = getattr(config, name)
    if choices.schedule is not None and name == "learning_rate":
        rate = choices.schedule
    elif (schedule := configured_schedule(choices.config, name, held)) is not None:
        rate = planned_rate(schedule, loops, planned)
    over = jnp.maximum(jnp.floor(planned / every), 1) if PLANNED_UPDATES in held else max(updates // every, 1)
    return {
        "learning_rate": _slow_down(rate, every) if callable(rate) and every > 1 else rate,
        "anneal_over": over if config.anneal_lr else None,
    }


def _slow_down(schedule: Callable[..., Any], every: int) -> optax.Schedule:
    """Converts a schedule to an optimiser that makes one update in `every`."""
    return lambda updates: schedule(updates * every)


def parts_of(
    env: Environment | HostEnvironment | GymnasiumObject | str, choices: Choices, *, params: Params | None
) -> Parts:
    """Checks the user's inputs and prepares them for a graph.

    `env` may be anything that `as_environment` accepts, and `params` replaces its parameters. The function uses
    the hyperparameters `num_envs`, `gamma`, `network` and the switches of normalisation. Raises a `UsageError` if
    the spaces are not supported, or if the environment is multi-agent.
    """
    gamma = _gamma_of_rewards(choices.config) if choices.config.normalize_rewards else None
    env, environment, host = environment_parts(env, choices.config, params=params, gamma=gamma)
    config = with_layout(choices.config, env)
    make_network = choices.network or partial(actor_critic, config=config.network)
    policy = network_policy(
        env,
        make_network,
        normalise_observations=config.normalize_observations,
        normalise_values=config.normalize_values,
    )
    return Parts(env, environment, host, policy, config, choices.made_in_python(params=params))


def _gamma_of_rewards(config: Any) -> float:
    """Returns the discount factor of the returns by which rewards are normalised."""
    if isinstance(config.gamma, str):
        raise UsageError(
            f"gamma={config.gamma!r} cannot be a schedule with normalize_rewards, because environments "
            "accumulate returns with a constant discount factor. hint: use a constant gamma, or "
            "normalize_values instead of normalize_rewards."
        )
    return config.gamma


def environment_parts(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: Any,
    *,
    params: Params | None,
    gamma: float | None = None,
    final_mask: bool = False,
) -> tuple[Environment | HostEnvironment, EnvironmentFunctions, StartHost | None]:
    """Returns the environment of a single agent, its functions, and the start function of a host environment.

    `env` may be anything that `as_environment` accepts, and `params` replaces its parameters. `config` contains
    the sizes of the run. With `gamma`, discounted returns are recorded, for reward normalisation. `final_mask`
    records the legal actions of final states, if the environment has action masks. Raises a `UsageError` if the
    environment is multi-agent, has two players, or does not support `params`.
    """
    env = single_agent(env)
    if isinstance(env, Environment) and env.num_players > 1:
        raise UsageError(
            f"{env.name} is a two-player game, which this algorithm does not support. hint: train it with "
            "alphazero."
        )
    if isinstance(env, Environment):
        functions = environment_functions(
            env,
            params=params,
            num_envs=config.num_envs,
            gamma=gamma,
            final_mask=final_mask,
            planned_steps=steps_each(config),
        )
        return env, functions, None
    refuse_params(env, params)
    return env, host_functions(env, gamma=gamma, final_mask=final_mask), partial(env.start, gamma=gamma)


def with_layout(config: Config, env: Environment | HostEnvironment) -> Config:
    """Returns the hyperparameters with an image layout that is resolved from the observation space."""
    settings: Any = config
    layout = resolve_layout(env.observation_space, settings.network.image_layout)
    return replace(settings, network=replace(settings.network, image_layout=layout))


def refuse_params(env: HostEnvironment, params: Params | None) -> None:
    """Raises a `UsageError`, because a host environment was given parameters."""
    if params is not None:
        raise UsageError(
            f"{env.name} is a host environment, which does not support params. hint: pass its options by "
            f"name: rollmill.make({env.name!r}, option=value)."
        )


def loops_of(config: Any, *, by_sequence: bool, epochs: int = 1, num_minibatches: int = 1) -> Loops:
    """Returns the loop sizes of a run: `epochs` and `num_minibatches`, and the other sizes from `config`.

    With `by_sequence`, a minibatch contains whole sequences. Raises a `UsageError` if sizes are not positive, or
    do not divide evenly.
    """
    check_positive({name: getattr(config, name) for name in ("total_timesteps", "num_envs", "num_steps")})
    check_positive({"update_epochs": epochs, "num_minibatches": num_minibatches})
    shards = config.num_shards
    if shards is None:
        shards = choose_num_shards(config.num_envs, config.num_steps, num_minibatches, by_sequence=by_sequence)
    check_shards(shards, config.num_envs, 1 if by_sequence else config.num_steps, num_minibatches)
    return Loops(
        iterations=iterations_for(config.total_timesteps, config.num_envs, config.num_steps),
        num_envs=config.num_envs,
        num_steps=config.num_steps,
        epochs=epochs,
        num_minibatches=num_minibatches,
        num_shards=shards,
        minibatch_items="sequences" if by_sequence else "samples",
    )


def graph_settings(
    name: str, env: Environment | HostEnvironment, config: Any, *, custom: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the settings from which a graph is rebuilt: names, options and hyperparameters, as JSON.

    Args:
        name: name of the algorithm.
        env: environment of the graph.
        config: dataclass of the hyperparameters.
        custom: names of parts given as Python objects, which no file can store.
    """
    unwritable = sorted(option for option, value in env.options.items() if not is_json(value))
    options = {option: repr(value) if option in unwritable else value for option, value in env.options.items()}
    return {
        "algorithm": name,
        "environment": env.name,
        "environment_options": options,
        "config": asdict(config),
        "custom": [*custom, *(f"environment option {option}" for option in unwritable)],
    }


def numbers_to_hold(config: Any, loops: Loops, **further: float | int) -> dict[str, float]:
    """Returns the hyperparameters that a learner holds as data (`numbers_of`).

    Args:
        config: dataclass of the hyperparameters.
        loops: loop sizes, without iterations that learn nothing.
        **further: derived hyperparameters.

    Raises:
        UsageError: schedules extend over more updates than the counter can hold.
    """
    numbers = numbers_of(config, **{PLANNED_UPDATES: planned_updates(loops)}, **further)
    if follows_schedules(numbers):
        check_count(planned_updates(loops))
    return numbers


def end_iteration_of(choices: Choices, loops: Loops, numbers: Mapping[str, float]) -> Callable[[Any], Any] | None:
    """Returns `Graph.end_iteration`, or None if nothing depends on the number of updates of the run."""
    rate = _learning_rate(choices, loops, 1, {})
    if rate["anneal_over"] is None and not callable(rate["learning_rate"]) and not follows_schedules(numbers):
        return None
    return partial(at_iteration_end, updates=loops.epochs * loops.num_minibatches)


def assemble_graph(
    name: str,
    env: Environment | HostEnvironment,
    environment: EnvironmentFunctions,
    config: Any,
    *,
    custom: Sequence[str],
    report: Callable[[Any, Any], Metrics],
    hyperparameters: Mapping[str, float],
    **fields: Any,
) -> Graph:
    """Assembles the graph of an algorithm from its environment and its fragments.

    Args:
        name: name of the algorithm.
        env: environment.
        environment: functions of the environment.
        config: dataclass of the hyperparameters.
        custom: names of parts given as Python objects, which no file can store.
        report: returns the metrics of an iteration. Metrics of scheduled hyperparameters are added.
        hyperparameters: hyperparameters that the learner holds (`numbers_to_hold`).
        **fields: the other fields of `Graph`.
    """
    return Graph(
        settings=graph_settings(name, env, config, custom=custom),
        observation_space=env.observation_space,
        action_space=env.action_space,
        environment=environment.step,
        start_environment=environment.start,
        action_mask=environment.action_mask,
        parameters=environment.parameters,
        report=with_schedules(report, hyperparameters),
        hyperparameters=hyperparameters,
        evaluate_schedules=schedule_evaluator(hyperparameters),
        **fields,
    )


def graph_of(
    name: str,
    parts: Parts,
    choices: Choices,
    loops: Loops,
    *,
    scaling: Callable[[Any], optax.GradientTransformation],
    condition: Any = no_condition,
    **fields: Any,
) -> Graph:
    """Assembles an actor-critic graph from the parts of `parts_of`.

    `scaling` creates the optimiser's transformation from the configuration, such as
    `lambda config: optax.scale_by_adam()`. `fields` are further fields of `Graph`, among them `prepare` and
    `gradients`.
    """
    policy, rewards = parts.policy, choices.config.normalize_rewards
    optimiser, numbers = optimiser_of(choices, scaling, loops), numbers_to_hold(parts.config, loops)
    return assemble_graph(
        name,
        parts.env,
        parts.environment,
        parts.config,
        custom=parts.custom,
        loops=loops,
        policy=policy.sample,
        update=ElementwiseUpdate(partial(update, optimiser)),
        start_memory=policy.start_memory,
        start_learner=partial(start_learner, policy, optimiser, numbers, normalise_rewards=rewards),
        weights=lambda learner: learner.weights,
        condition=condition,
        greedy=policy.greedy,
        host=parts.host,
        end_iteration=end_iteration_of(choices, loops, numbers),
        report=partial(report, partial(schedule_of, choices, loops)),
        outputs=policy.outputs,
        merge_metrics=partial(merge_metrics, loops.batch_size) if choices.config.normalize_values else None,
        hyperparameters=numbers,
        **fields,
    )
