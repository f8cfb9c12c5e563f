"""`jaxmarl:ID`: JaxMARL's particle environments and SMAX (Rutherford et al., "JaxMARL: Multi-Agent RL Environments
and Algorithms in JAX", NeurIPS Datasets and Benchmarks 2024), version 0.2.

Agents whose names differ only in a number belong to one kind. For example, `adversary_0` and `adversary_1` are of
the kind `adversary`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import Action, AgentKind, Environment, Key, Observation, Params, State, Timestep
from rollmill.envs.adapters import import_extra
from rollmill.envs.adapters.promotion import promoting
from rollmill.envs.agents import joint_spaces
from rollmill.envs.options import keyword_names, unknown_option
from rollmill.gpus.jax_settings import standard_promotion

BATTLES = ("SMAX", "HeuristicEnemySMAX")
"""Battles of two armies, which both learn in `SMAX`. In `HeuristicEnemySMAX`, the enemies follow fixed rules."""

Members = dict[str, list[str]]
"""JaxMARL's names of the agents of each kind."""


def make(name: str, **options: Any) -> Environment:
    """Makes the JaxMARL environment called `name`.

    Args:
        name: an id of JaxMARL, such as `MPE_simple_spread_v3` or `SMAX`.
        **options: arguments of the environment's class, such as `num_agents=5`, and for SMAX also `scenario="3m"`.

    Returns:
        The environment, whose time limit truncates. Units of SMAX that died are inactive. Its action mask marks
        the targets in range, and its `central` features are JaxMARL's world state.

    Raises:
        UsageError: JaxMARL is not installed, or has no such environment or option.
    """
    jaxmarl = import_extra("jaxmarl", "jaxmarl")
    known = [known for known in jaxmarl.registered_envs if known.startswith("MPE_")] + list(BATTLES)
    if name not in known:
        raise unknown_name("jaxmarl environment", name, known)
    with standard_promotion():
        source = _source(jaxmarl, name, options)
        members = _members(source)
        agents = tuple(_kind(source, kind, names) for kind, names in members.items())
        observation_space, action_space = joint_spaces(agents)
        is_battle = name in BATTLES
        env = Environment(
            name=f"jaxmarl:{name}",
            reset=_reset_of(source, members),
            step=_step_of(source, members, _battle_is_over if is_battle else _never),
            observation_space=observation_space,
            action_space=action_space,
            agents=agents,
        )
        env = promoting(env)
        return _battle(env, source, members) if is_battle else env


def _source(jaxmarl: Any, name: str, options: dict[str, Any]) -> Any:
    """Returns the JaxMARL environment with an id."""
    options = dict(options)
    default = jaxmarl.make(name)
    known = [*keyword_names(type(default))]
    if name in BATTLES:
        known += keyword_names(jaxmarl.registration.SMAX)
        if "scenario" in options:
            options["scenario"] = _scenario(options["scenario"])
    for option in options:
        if option not in known:
            raise unknown_option(f"jaxmarl:{name}", option, dict.fromkeys(known))
    try:
        return jaxmarl.make(name, **options) if options else default
    except (AssertionError, TypeError, ValueError, NotImplementedError) as error:  # an option's value is invalid
        raise UsageError(
            f"jaxmarl:{name} cannot be created with {options}: {type(error).__name__}: {error}"
        ) from error


def _scenario(name: Any) -> Any:
    scenarios = import_extra("jaxmarl.environments.smax.smax_env", "jaxmarl").MAP_NAME_TO_SCENARIO
    if name not in scenarios:
        raise unknown_name("scenario of SMAX", str(name), scenarios)
    return scenarios[name]


def _members(source: Any) -> Members:
    """Returns the agents of each kind, in JaxMARL's order.

    Agents whose names have the same stem but whose spaces differ become separate kinds of one agent each.
    """
    by_stem: Members = {}
    for agent in source.agents:
        by_stem.setdefault(agent.rpartition("_")[0] or agent, []).append(agent)
    members: Members = {}
    for stem, names in by_stem.items():
        sizes = {str((_space(source.observation_space(a)), _space(source.action_space(a)))) for a in names}
        members |= {stem: names} if len(sizes) == 1 else {agent: [agent] for agent in names}
    return members


def _kind(source: Any, kind: str, names: list[str]) -> AgentKind:
    observation, action = source.observation_space(names[0]), source.action_space(names[0])
    return AgentKind(kind, len(names), _remove_bounds(_space(observation)), _space(action))


def _space(space: Any) -> spaces.Space:
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    if hasattr(space, "num_categories"):
        return spaces.MultiDiscrete(np.asarray(space.num_categories))
    return spaces.Box(np.float32(space.low), np.float32(space.high), tuple(space.shape), np.float32)


def _remove_bounds(space: spaces.Space) -> spaces.Space:
    """Observations without bounds: units of SMAX that are far away, or hurt, exceed those that it names."""
    return spaces.Box(-np.inf, np.inf, space.shape, np.float32) if isinstance(space, spaces.Box) else space


def _stack(by_agent: dict[str, Any], members: Members) -> dict[str, Array]:
    return {kind: jnp.stack([by_agent[name] for name in names]) for kind, names in members.items()}


def _reset_of(source: Any, members: Members) -> Any:
    def reset(key: Key, params: Params) -> tuple[Observation, State]:
        observations, state = source.reset(key)
        return _stack(observations, members), state

    return reset


def _step_of(source: Any, members: Members, is_over: Callable[[Any, State], Bool[Array, ""]]) -> Any:
    def step(key: Key, state: State, action: Action, params: Params) -> Timestep:
        actions = {name: action[kind][i] for kind, names in members.items() for i, name in enumerate(names)}
        observations, after, rewards, dones, _ = source.step_env(key, state, actions)
        terminated = is_over(source, after)
        truncated = dones["__all__"] & ~terminated
        return Timestep(_stack(observations, members), after, _stack(rewards, members), terminated, truncated, {})

    return step


def _never(source: Any, state: State) -> Bool[Array, ""]:
    """Returns False: particle environments end only at their time limit."""
    return jnp.asarray(False)


def _alive(state: State) -> Bool[Array, " A"]:
    """Returns which units of both armies are alive. JaxMARL nests the state if it controls the enemies."""
    return getattr(state, "state", state).unit_alive


def _battle_is_over(source: Any, state: State) -> Bool[Array, ""]:
    allies, enemies = jnp.split(_alive(state), [source.num_allies])
    return ~jnp.any(allies) | ~jnp.any(enemies)


def _battle(env: Environment, source: Any, members: Members) -> Environment:
    """Adds the living units, the legal actions and the world state to a battle."""

    def action_mask(state: State, params: Params) -> dict[str, Bool[Array, "..."]]:
        with standard_promotion():
            masks = _stack(source.get_avail_actions(state), members)
            return {kind: mask.astype(bool) for kind, mask in masks.items()}

    def active(state: State, params: Params) -> dict[str, Bool[Array, " A"]]:
        parts = jnp.split(_alive(state), [source.num_allies])
        return dict(zip(members, parts, strict=False))

    def central(state: State, params: Params) -> Array:
        with standard_promotion():
            return jnp.asarray(source.get_world_state(state), jnp.float32)

    discrete = all(isinstance(kind.action_space, spaces.Discrete) for kind in env.agents)
    return env._replace(action_mask=action_mask if discrete else None, active=active, central=central)
