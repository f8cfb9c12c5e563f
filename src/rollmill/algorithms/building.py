"""From an environment, hyperparameters and a network to a graph: what actor-critics have in common."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import optax

from rollmill.algorithms.fragments import (
    EnvironmentFunctions,
    MakeNetwork,
    NetworkPolicy,
    environment_functions,
    host_functions,
    network_policy,
)
from rollmill.algorithms.on_policy import start_learner, unconditioned, update
from rollmill.algorithms.sizes import check_positive, check_shards, iterations_for
from rollmill.core.errors import UsageError
from rollmill.core.json_data import is_json
from rollmill.core.types import Environment, HostEnvironment, Params, StartHost
from rollmill.dataflow import ElementwiseUpdate, Fragment, Graph, Loops, choose_num_shards
from rollmill.networks import NetworkConfig, actor_critic

Config = TypeVar("Config")
Make = TypeVar("Make")


class Parts(NamedTuple):
    """What a user handed over, ready for use."""

    env: Environment | HostEnvironment
    environment: EnvironmentFunctions
    host: StartHost | None
    """Starts environments that live on the host."""
    policy: NetworkPolicy
    custom: list[str]
    """What was made in Python, and no file can hold."""


def configured(
    config: Config, network: Make | NetworkConfig | None, overrides: dict[str, Any]
) -> tuple[Config, Make | None]:
    """The hyperparameters with single ones replaced, and the network where it is made by a function."""
    if isinstance(network, NetworkConfig):
        overrides, network = {**overrides, "network": network}, None
    if overrides:
        config = replace(config, **overrides)  # pyright: ignore[reportArgumentType] - a dataclass
    return config, network


def parts_of(
    env: Environment | HostEnvironment, config: Any, *, params: Params | None, network: MakeNetwork | None
) -> Parts:
    """Checks what a user handed over.

    Args:
        env: the environment.
        config: hyperparameters; of them `num_envs`, `gamma`, `network` and the normalisations are read.
        params: parameters of the environment instead of its own.
        network: the function that makes the network, instead of `config.network`.

    Raises:
        UsageError: for spaces that have no policy, and environments that have several agents.
    """
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
    make_network = network or partial(actor_critic, config=config.network)
    policy = network_policy(env, make_network, normalise_observations=config.normalize_observations)
    custom = [name for name, given in (("params", params), ("network", network)) if given is not None]
    return Parts(env, environment, host, policy, custom)


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
    """What a graph is built again from: names, options and hyperparameters, as JSON.

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
    config: Any,
    loops: Loops,
    *,
    optimiser: optax.GradientTransformation,
    prepare: Any,
    gradients: Any,
    condition: Any = unconditioned,
    keep_learning: Any = None,
    appraise: Any = None,
) -> Graph:
    """The graph of an actor-critic: its fragments, around what makes it special."""
    policy, environment = parts.policy, parts.environment
    return Graph(
        settings=settings_of(name, parts.env, config, custom=parts.custom),
        observation_space=parts.env.observation_space,
        action_space=parts.env.action_space,
        loops=loops,
        environment=Fragment("environment", environment.step),
        policy=Fragment("policy", policy.sample),
        gradients=Fragment("gradients", gradients),
        update=Fragment("update", ElementwiseUpdate(partial(update, optimiser))),
        start_environment=environment.start,
        start_memory=policy.start_memory,
        start_learner=partial(start_learner, policy, optimiser, normalise_rewards=config.normalize_rewards),
        action_mask=environment.action_mask,
        weights=lambda learner: learner.weights,
        prepare=prepare,
        condition=condition,
        greedy=policy.greedy,
        host=parts.host,
        keep_learning=keep_learning,
        appraise=appraise,
    )
