"""`playground:ID`: MuJoCo Playground (Zakka et al., 2025, arXiv:2502.08844), version 0.2.

The DeepMind Control suite needs only the package. Robots for locomotion and manipulation need models from MuJoCo
Menagerie, which Playground would download. Rollmill does not download anything.
"""

import importlib
import math
from typing import Any

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import Environment
from rollmill.envs.adapters import import_extra
from rollmill.envs.adapters.brax_form import RESET_RATIO, from_brax_form
from rollmill.envs.named_transforms import transform
from rollmill.envs.options import like, unknown_option
from rollmill.gpus.jax_settings import standard_promotion

DOWNLOAD = "python -c 'from mujoco_playground._src import mjx_env; mjx_env.ensure_menagerie_exists()'"


def make(name: str, *, impl: str = "jax", reset_ratio: int = RESET_RATIO, **options: Any) -> Environment:
    """Makes the Playground environment called `name`.

    Args:
        name: an id of Playground, such as `CartpoleBalance`.
        impl: implementation of MuJoCo. `jax` runs on every device, and `warp` (NVIDIA Warp) needs an NVIDIA GPU.
        reset_ratio: see `rollmill.Environment`. Every episode has a new initial state, whereas auto-reset in
            Playground always returns to the same state.
        **options: entries of the environment's configuration, such as `episode_length=500`.

    Returns:
        The environment. Episodes are truncated after `episode_length` control steps, and each action is repeated
        `action_repeat` times.

    Raises:
        UsageError: Playground is not installed, or has no such environment or option, or models of robots are
            missing.
    """
    playground = import_extra("mujoco_playground", "playground")
    if name not in playground.registry.ALL_ENVS:
        raise unknown_name("playground environment", name, playground.registry.ALL_ENVS)
    _check_models(playground, name)
    defaults = playground.registry.get_default_config(name)
    known = {key: value for key, value in defaults.items() if isinstance(value, bool | int | float | str)}
    chosen = {"impl": impl} if "impl" in known else {}
    for option, value in options.items():
        if option not in known:
            raise unknown_option(f"playground:{name}", option, [*known, "impl", "reset_ratio"])
        chosen[option] = like(f"playground:{name}", option, value, known[option])
    settings = {**known, **chosen}
    source = _load(playground, name, chosen)
    length, repeat = math.ceil(settings["episode_length"]), settings.get("action_repeat", 1)
    env = from_brax_form(f"playground:{name}", source, episode_length=length, reset_ratio=reset_ratio)
    return env if repeat == 1 else _repeating(env, repeat)


def _check_models(playground: Any, name: str) -> None:
    """Raises a `UsageError` if making an environment would download something."""
    models = importlib.import_module("mujoco_playground._src.mjx_env").MENAGERIE_PATH
    if name not in playground.dm_control_suite.ALL_ENVS and not models.exists():
        raise UsageError(
            f"playground:{name} needs robot models from MuJoCo Menagerie, which are missing in {models}. hint: "
            f"download them once: {DOWNLOAD}"
        )


def _load(playground: Any, name: str, chosen: dict[str, Any]) -> Any:
    try:
        with standard_promotion():
            return playground.registry.load(name, config_overrides=chosen)
    except (ImportError, RuntimeError, NotImplementedError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"playground:{name} cannot be created with {chosen}: {type(error).__name__}: {reason}. hint: "
            "impl=jax runs on every device, and impl=warp needs warp-lang and an NVIDIA GPU."
        ) from error


def _repeating(env: Environment, times: int) -> Environment:
    repeating = transform(env, f"action-repeat:{times}")
    assert isinstance(repeating, Environment)
    return repeating
