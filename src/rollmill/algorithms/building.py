"""From an environment, hyperparameters and a network to a graph: what actor-critics have in common."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import gymnasium
import optax

from rollmill.algorithms.fragments import (
    EnvironmentFunctions,
    NetworkPolicy,
    environment_functions,
    host_functions,
    network_policy,
)
from rollmill.algorithms.on_policy import report, start_learner, unconditioned, update
from rollmill.algorithms.optimisers import clipped_descent, planned_updates, rate_schedule
from rollmill.algorithms.sizes import check_positive, check_shards, iterations_for
from rollmill.core.errors import UsageError
from rollmill.core.fields import check_names, fit, fitted
from rollmill.core.jax_settings import check_jax
from rollmill.core.json_data import is_json
from rollmill.core.types import Environment, HostEnvironment, Params, StartHost
from rollmill.dataflow import ElementwiseUpdate, Fragment, Graph, Loops, choose_num_shards
from rollmill.envs import as_environment
from rollmill.networks import TORSOS, NetworkConfig, actor_critic, registered_networks, resolve_layout

Config = TypeVar("Config")

NOT_HERE = "Options of the run, such as seed and run_dir, go to rollmill.train."


class Choices(NamedTuple):
    """Hyperparameters as a user chose them."""

    config: Any
    network: Callable[..., Any] | None
    """The function that makes the network, where it is not of `config.network`."""
    schedule: Callable[..., Any] | None
    """The learning rate by updates, where it is not that of `config`."""

    def made_in_python(self, **others: Any) -> list[str]:
        """Names of the parts that no file can hold: of these choices, and of the others that are not None."""
        parts = {**others, "network": self.network, "learning_rate": self.schedule}
        return [name for name, part in parts.items() if part is not None]


class Parts(NamedTuple):
    """What a user handed over, ready for use."""

    env: Environment | HostEnvironment
    environment: EnvironmentFunctions
    host: StartHost | None
    """Starts environments that live on the host."""
    policy: NetworkPolicy
    config: Any
    """The hyperparameters, in which what is chosen by the environment's spaces is resolved."""
    custom: list[str]
    """What was made in Python, and no file can hold."""


def configured(
    kind: type[Config],
    config: Config | Mapping[str, Any] | None,
    network: Callable[..., Any] | NetworkConfig | Mapping[str, Any] | str | None,
    overrides: dict[str, Any],
) -> tuple[Config, Choices]:
    """The hyperparameters with single ones replaced, each of the type that its field has; and all choices.

    Args:
        kind: the dataclass of the algorithm's hyperparameters.
        config: an instance of it, or a dictionary of some of its fields; the defaults if left out.
        network: settings of the network, or the name of a torso or of a registered one, or the
            function that makes it.
        overrides: fields to replace. A `learning_rate` may be a schedule of Optax, from the number of updates.

    Raises:
        UsageError: for names and values that are none of these.
    """
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
    chosen = fitted(replace(chosen, learning_rate=_first_rate(schedule)) if schedule else chosen)
    return chosen, Choices(chosen, make_network, schedule)


def _network_of(network: Any) -> tuple[dict[str, NetworkConfig], Any]:
    """The field of the hyperparameters, or the function that makes the network; neither where it is None."""
    if isinstance(network, str):
        network = {"name" if network in dict(registered_networks()) else "torso": network}
    if isinstance(network, Mapping):
        network = fit("network", NetworkConfig, network)
    if isinstance(network, NetworkConfig):
        return {"network": network}, None
    if network is not None and not callable(network):
        raise UsageError(
            f"network is a {type(network).__name__}. hint: give rollmill.NetworkConfig(...), the name of a torso "
            f"({', '.join(TORSOS)}), or a function that makes a network from a key and two spaces."
        )
    return {}, network


def _other_config(kind: type, config: Any) -> str:
    name = config.__name__ if isinstance(config, type) else type(config).__name__
    if config is kind:
        return f"config is the class {name}. hint: give an instance, {name}(...)."
    algorithm = name.removesuffix("Config").lower()
    others = f", or rollmill.{algorithm}(env, config)" if name.endswith("Config") and name != kind.__name__ else ""
    return f"config is a {name}, expected a {kind.__name__}. hint: rollmill.{kind.__name__}(...){others}."


def _first_rate(schedule: Callable[[int], Any]) -> float:
    try:
        return float(schedule(0))
    except Exception as error:  # whatever the user's function does
        raise UsageError(
            f"learning_rate is a function that does not return a number for 0 updates ({type(error).__name__}: "
            f"{error}). hint: give a number, or a schedule as optax.linear_schedule makes one."
        ) from error


def optimiser_of(
    choices: Choices, scaling: optax.GradientTransformation, loops: Loops
) -> optax.GradientTransformation:
    """The descent of these hyperparameters; a schedule takes the place of annealing."""
    return clipped_descent(scaling, max_grad_norm=choices.config.max_grad_norm, **_learning_rate(choices, loops))


def schedule_of(choices: Choices, loops: Loops) -> optax.Schedule:
    """The learning rate of these hyperparameters by the number of updates."""
    return rate_schedule(**_learning_rate(choices, loops))


def _learning_rate(choices: Choices, loops: Loops) -> dict[str, Any]:
    """The arguments that `clipped_descent` and `rate_schedule` have in common."""
    config = choices.config
    return {
        "learning_rate": choices.schedule or config.learning_rate,
        "anneal_over": planned_updates(loops) if config.anneal_lr else None,
    }


def parts_of(
    env: Environment | HostEnvironment | gymnasium.Env | str,
    choices: Choices,
    *,
    params: Params | None,
) -> Parts:
    """Checks what a user handed over.

    Args:
        env: the environment, or what stands for one.
        choices: of its hyperparameters `num_envs`, `gamma`, `network` and the normalisations are read.
        params: parameters of the environment instead of its own.

    Raises:
        UsageError: for spaces that have no policy, and environments that have several agents.
    """
    env, config = as_environment(env), choices.config
    if isinstance(env, Environment) and env.agents:
        kinds = ", ".join(kind.name for kind in env.agents)
        raise UsageError(f"{env.name} has several agents ({kinds}); train it with mappo or ippo.")
    recorded = config.gamma if config.normalize_rewards else None
    if isinstance(env, HostEnvironment):
        environment, host = host_functions(env, gamma=recorded), partial(env.start, gamma=recorded)
        _refuse_params(env, params)
    else:
        environment = environment_functions(env, params=params, num_envs=config.num_envs, gamma=recorded)
        host = None
    layout = resolve_layout(env.observation_space, config.network.image_layout)
    config = replace(config, network=replace(config.network, image_layout=layout))
    make_network = choices.network or partial(actor_critic, config=config.network)
    policy = network_policy(env, make_network, normalise_observations=config.normalize_observations)
    return Parts(env, environment, host, policy, config, choices.made_in_python(params=params))


def _refuse_params(env: HostEnvironment, params: Params | None) -> None:
    if params is not None:
        raise UsageError(
            f"{env.name} lives on the host and takes no params; give its options by name: "
            f"rollmill.make({env.name!r}, option=value)."
        )


def loops_of(config: Any, *, by_sequence: bool, epochs: int = 1, num_minibatches: int = 1) -> Loops:
    """The loops of these hyperparameters, of which all but the two named here are read from `config`.

    Raises:
        UsageError: for sizes that do not fit together.
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
        cut="sequences" if by_sequence else "samples",
    )


def settings_of(
    name: str, env: Environment | HostEnvironment, config: Any, *, custom: Sequence[str] = ()
) -> dict[str, Any]:
    """The settings that a graph is rebuilt from: names, options and hyperparameters, as JSON.

    Args:
        name: the algorithm's.
        env: its environment.
        config: hyperparameters, a dataclass.
        custom: parts that were made in Python, and no file can hold.
    """
    unwritable = sorted(option for option, value in env.options.items() if not is_json(value))
    written = {option: repr(value) if option in unwritable else value for option, value in env.options.items()}
    return {
        "algorithm": name,
        "environment": env.name,
        "environment_options": written,
        "config": asdict(config),
        "custom": [*custom, *(f"environment option {option}" for option in unwritable)],
    }


def graph_of(
    name: str,
    parts: Parts,
    choices: Choices,
    loops: Loops,
    *,
    scaling: optax.GradientTransformation,
    prepare: Any,
    gradients: Any,
    condition: Any = unconditioned,
    keep_learning: Any = None,
    appraise: Any = None,
) -> Graph:
    """The graph of an actor-critic: its fragments, around what makes it special.

    Args:
        name: the algorithm's.
        parts: what the user handed over.
        choices: the hyperparameters.
        loops: their sizes.
        scaling: what is special about the optimiser, such as `optax.scale_by_adam()`.
        prepare: see `Graph.prepare`.
        gradients: the function of the fragment `Graph.gradients`.
        condition: see `Graph.condition`.
        keep_learning: see `Graph.keep_learning`.
        appraise: see `Graph.appraise`.
    """
    policy, environment = parts.policy, parts.environment
    optimiser, rewards = optimiser_of(choices, scaling, loops), choices.config.normalize_rewards
    return Graph(
        settings=settings_of(name, parts.env, parts.config, custom=parts.custom),
        observation_space=parts.env.observation_space,
        action_space=parts.env.action_space,
        loops=loops,
        environment=Fragment("environment", environment.step),
        policy=Fragment("policy", policy.sample),
        gradients=Fragment("gradients", gradients),
        update=Fragment("update", ElementwiseUpdate(partial(update, optimiser))),
        start_environment=environment.start,
        start_memory=policy.start_memory,
        start_learner=partial(start_learner, policy, optimiser, normalise_rewards=rewards),
        action_mask=environment.action_mask,
        weights=lambda learner: learner.weights,
        prepare=prepare,
        condition=condition,
        greedy=policy.greedy,
        host=parts.host,
        keep_learning=keep_learning,
        appraise=appraise,
        report=partial(report, schedule_of(choices, loops)),
    )
