"""`craftax:ID`: Craftax and Craftax-Classic (Matthews et al., "Craftax: A Lightning-Fast Benchmark for Open-Ended
Reinforcement Learning", ICML 2024), version 1.6.

The adapter calls `step_env`, which does not reset. Its `done` includes the time limit. To find terminations, the
adapter therefore calls `is_terminal` on the same state with a time limit that no episode reaches.
"""

import contextlib
import dataclasses
import sys
from typing import Any

import numpy as np
from gymnasium import spaces

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import Action, Environment, Key, Params, State, Timestep
from rollmill.envs.adapters import import_extra
from rollmill.envs.adapters.promotion import promoting
from rollmill.envs.options import like, unknown_option
from rollmill.envs.rare_resets import checked_ratio
from rollmill.gpus.jax_settings import standard_promotion

IDS = {
    "Craftax-Symbolic-v1": ("craftax.craftax.envs.craftax_symbolic_env", "CraftaxSymbolicEnvNoAutoReset"),
    "Craftax-Pixels-v1": ("craftax.craftax.envs.craftax_pixels_env", "CraftaxPixelsEnvNoAutoReset"),
    "Craftax-Classic-Symbolic-v1": (
        "craftax.craftax_classic.envs.craftax_symbolic_env",
        "CraftaxClassicSymbolicEnvNoAutoReset",
    ),
    "Craftax-Classic-Pixels-v1": (
        "craftax.craftax_classic.envs.craftax_pixels_env",
        "CraftaxClassicPixelsEnvNoAutoReset",
    ),
}
"""Module and class of each environment, those without auto-reset."""

NO_LIMIT = 2**30
"""Time limit that no episode reaches, in steps."""

RESET_RATIO = 16
"""Default reset ratio. Generating a world takes as long as tens of steps."""


def make(name: str, *, reset_ratio: int = RESET_RATIO, **options: Any) -> Environment:
    """Makes the Craftax environment called `name`.

    Args:
        name: an id of Craftax, such as `Craftax-Classic-Symbolic-v1`.
        reset_ratio: see `rollmill.Environment`. With 1, a world is generated for every environment in every step.
        **options: fields of the Craftax parameters, such as `max_timesteps=500`, including static fields, such as
            `max_zombies=5`.

    Returns:
        The environment, without auto-reset. Its time limit truncates episodes, and everything else that ends an
        episode terminates it. Textures are loaded only for environments with pixels. Craftax generates them the
        first time, and caches them in its own folder.

    Raises:
        UsageError: Craftax is not installed, or has no such environment or option, or its textures cannot be
            stored.
    """
    if name not in IDS:
        import_extra("craftax", "craftax")
        raise unknown_name("craftax environment", name, IDS)
    module, kind = IDS[name]
    build = getattr(import_extra(module, "craftax"), kind)
    with standard_promotion():
        static = build.default_static_params()
        default = build(static).default_params
        chosen = _read_options(name, options, default, static)
        source = build(_replace_fields(static, chosen))
        env = Environment(
            name=f"craftax:{name}",
            reset=source.reset_env,
            step=_step_of(source),
            observation_space=_observation_space(source, default),
            action_space=spaces.Discrete(source.num_actions),
            params=_replace_fields(default, chosen),
            reset_ratio=checked_ratio(reset_ratio),
        )
        return _with_textures(name, env)


def _read_options(name: str, options: dict[str, Any], *defaults: Any) -> dict[str, Any]:
    """Returns the options, cast to the types of the Craftax defaults."""
    known: dict[str, Any] = {}
    for part in defaults:
        known |= {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    known.pop("fractal_noise_angles", None)  # angles or None, which have no default of their type
    for option in options:
        if option not in known:
            raise unknown_option(f"craftax:{name}", option, [*known, "reset_ratio"])
    return {option: like(f"craftax:{name}", option, value, known[option]) for option, value in options.items()}


def _replace_fields(part: Any, chosen: dict[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(part)}
    return part.replace(**{option: value for option, value in chosen.items() if option in names})


def _step_of(source: Any) -> Any:
    def step(key: Key, state: State, action: Action, params: Params) -> Timestep:
        observation, next_state, reward, _, info = source.step_env(key, state, action, params)
        terminated = source.is_terminal(next_state, params.replace(max_timesteps=NO_LIMIT))
        truncated = next_state.timestep >= params.max_timesteps
        return Timestep(observation, next_state, reward, terminated, truncated, info)

    return step


def _observation_space(source: Any, params: Params) -> spaces.Box:
    space = source.observation_space(params)
    return spaces.Box(float(space.low), float(space.high), tuple(space.shape), np.float32)


def _with_textures(name: str, env: Environment) -> Environment:
    """Traces the environment, which loads textures if it observes pixels. What Craftax prints goes to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return promoting(env)
    except OSError as error:
        raise UsageError(
            f"craftax:{name} could not create its textures, which Craftax stores in its own folder: "
            f"{type(error).__name__}: {error}. hint: create the environment once as a user who may write to that "
            "folder."
        ) from error
