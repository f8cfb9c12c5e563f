"""`brax:ID`: Brax environments (Freeman et al., "Brax: A Differentiable Physics Engine for Large Scale Rigid Body
Simulation", NeurIPS Datasets and Benchmarks 2021), version 0.14.
"""

from typing import Any

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import Environment
from rollmill.envs.adapters import import_extra
from rollmill.envs.adapters.brax_form import RESET_RATIO, from_brax_form
from rollmill.envs.options import keyword_names, unknown_option
from rollmill.gpus.jax_settings import standard_promotion

BACKENDS = ("generalized", "mjx", "positional", "spring")


def make(name: str, *, episode_length: int = 1000, reset_ratio: int = RESET_RATIO, **options: Any) -> Environment:
    """Makes the Brax environment called `name`.

    Args:
        name: an id of Brax, such as `ant`.
        episode_length: steps after which an episode is truncated.
        reset_ratio: see `rollmill.Environment`. Every episode has a new initial state, whereas auto-reset in Brax
            always returns to the same state.
        **options: arguments of the environment's class, such as `backend="spring"`.

    Raises:
        UsageError: Brax is not installed, or has no such environment, backend or option.
    """
    brax = import_extra("brax.envs", "brax")
    if name not in brax._envs:
        raise unknown_name("brax environment", name, brax._envs)
    known = sorted({*keyword_names(brax._envs[name]), "backend"})
    for option in options:
        if option not in known:
            raise unknown_option(f"brax:{name}", option, [*known, "episode_length", "reset_ratio"])
    if options.get("backend", BACKENDS[0]) not in BACKENDS:
        raise UsageError(f"brax:{name}: backend={options['backend']!r} must be one of {', '.join(BACKENDS)}.")
    try:
        with standard_promotion():
            source = brax.get_environment(name, **options)
    except (TypeError, ValueError, NotImplementedError) as error:  # an option's value is invalid
        raise UsageError(
            f"brax:{name} cannot be created with {options}: {type(error).__name__}: {error}"
        ) from error
    return from_brax_form(f"brax:{name}", source, episode_length=episode_length, reset_ratio=reset_ratio)
