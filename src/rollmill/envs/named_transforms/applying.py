"""Applies named transforms to environments, and records them among the environment's options."""

from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium

from rollmill.core.errors import UsageError
from rollmill.core.types import Environment, HostEnvironment
from rollmill.envs.host import StartByName, StartPython
from rollmill.envs.named_transforms.definition import Spaces, Transform
from rollmill.envs.named_transforms.notation import REWARD_TRANSFORMS, TransformName, parse_transforms
from rollmill.envs.named_transforms.on_host import TransformedObject
from rollmill.envs.named_transforms.on_jax import on_environment

OPTION = "transforms"
"""Option of `make` that holds the transforms of an environment."""


def transform(env: Environment | HostEnvironment, *names: str) -> Environment | HostEnvironment:
    """Transforms an environment's observations, actions or rewards.

    `transform(env, "frame-stack:4", "reward-scale:0.1")` is like `make(name, transforms=[...])`, for an existing
    environment. The first transform is the innermost one.

    Args:
        env: one environment, unbatched, without auto-reset.
        *names: transforms, each as `NAME` or `NAME:ARGUMENT`.

    Returns:
        The transformed environment. If `make` created the environment, the transforms become one of its options,
        so that a run records them.

    Raises:
        UsageError: a transform does not exist, its argument cannot be used, or it does not fit the environment.

    Examples:
        >>> env = rollmill.transform(rollmill.make("CartPole-v1"), "frame-stack:3")
    """
    if not isinstance(env, Environment | HostEnvironment):
        raise UsageError(
            f"transform needs an environment, got a {type(env).__name__}. hint: rollmill.make creates an "
            "environment from an id."
        )
    before = list(env.options.get(OPTION, ()))
    for number, name in enumerate(parse_transforms(names), start=len(before)):
        _check_players(env, name)
        chosen = name.on(Spaces(env.observation_space, env.action_space))
        _check_actions(env, name, chosen)
        options = {**env.options, OPTION: [*env.options.get(OPTION, ()), str(name)]}
        if isinstance(env, HostEnvironment):
            env = _on_host(env, name, chosen, number, options)
        else:
            env = on_environment(env, chosen, number)._replace(options=options)
    return env


def _on_host(
    env: HostEnvironment, name: TransformName, chosen: Transform, number: int, options: dict[str, Any]
) -> HostEnvironment:
    start = env.start.start if isinstance(env.start, StartByName) else env.start
    if not isinstance(start, StartPython):
        raise UsageError(
            f"the transform {name} supports environments written in JAX and Python objects, but {env.name} "
            "steps its environments in another way. hint: use the options of its package, such as EnvPool's "
            "stack_num, frame_skip and reward_clip (--env-option)."
        )
    spaces = {"observation_space": chosen.observation_space, "action_space": chosen.action_space}
    start = replace(start, make=partial(_make, start.make, chosen, number), **spaces)
    named = StartByName(env.name, options, start) if isinstance(env.start, StartByName) else start
    return env._replace(start=named, options=options, **spaces)


def _make(make: Any, chosen: Transform, number: int) -> gymnasium.Env:
    return TransformedObject(make(), chosen, number)


def _check_players(env: Environment | HostEnvironment, name: TransformName) -> None:
    """Raises a `UsageError` if a transform does not fit the number of players and agents."""
    if isinstance(env, Environment) and env.num_players > 1:
        raise UsageError(
            f"the transform {name} does not support {env.name}, because the rewards and positions of a "
            "two-player game belong to the player to move."
        )
    if isinstance(env, HostEnvironment) and env.agents:
        raise UsageError(
            f"the transform {name} does not support {env.name}, a multi-agent environment on the host. hint: "
            "register a function that wraps the environment in a module, and use pettingzoo:MODULE:ID."
        )
    if isinstance(env, Environment) and env.agents and name.name not in REWARD_TRANSFORMS:
        raise UsageError(
            f"the transform {name} does not support {env.name}, a multi-agent environment. Only "
            f"{' and '.join(REWARD_TRANSFORMS)} do."
        )


def _check_actions(env: Environment | HostEnvironment, name: TransformName, chosen: Transform) -> None:
    """Raises a `UsageError` if an illegal action could be taken."""
    masked = env.has_action_mask if isinstance(env, HostEnvironment) else env.action_mask is not None
    if masked and chosen.takes_other_actions:
        raise UsageError(
            f"the transform {name} does not support {env.name}, because a repeated action may violate its "
            "action mask."
        )
