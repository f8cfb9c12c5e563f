"""Hyperparameters that differ between the roles of a multi-agent environment.

These are the learning rates and frozen weights of parameter sets, and the coefficients of kinds of agents. A
learner stores them with its other hyperparameters, under names such as `gammas/tagger`.
"""

from typing import Any

from rollmill.algorithms.sharing import ParameterSet
from rollmill.core.errors import UsageError, unknown_name
from rollmill.dataflow import Hyperparameters

SET_FIELDS = ("learning_rates",)
"""Hyperparameters of parameter sets, by name."""

KIND_FIELDS = ("gammas", "ent_coefs")
"""Hyperparameters of kinds of agents, by name."""

COMMON = {"learning_rates": "learning_rate", "gammas": "gamma", "ent_coefs": "ent_coef"}
"""Common hyperparameter that each hyperparameter of a role replaces."""


def numbers_of_roles(config: Any, sets: tuple[ParameterSet, ...]) -> dict[str, float]:
    """Returns the hyperparameters of single roles that a learner holds.

    Raises a `UsageError` for a role that does not exist, or if all parameter sets are frozen.
    """
    names = [group.name for group in sets]
    kinds = [name for group in sets for name in group.names]
    for option, roles in {
        **dict.fromkeys((*SET_FIELDS, "frozen"), names),
        **dict.fromkeys(KIND_FIELDS, kinds),
    }.items():
        for name in getattr(config, option):
            if name not in roles:
                what = "kind of agents" if option in KIND_FIELDS else "parameter set"
                raise unknown_name(f"{what} in {option}", name, roles)
    if not set(names) - set(config.frozen):
        raise UsageError(f"frozen={config.frozen} leaves no parameter set to learn. hint: name fewer of {names}.")
    numbers = {}
    for option in (*SET_FIELDS, *KIND_FIELDS):
        numbers |= {_key(option, name): value for name, value in getattr(config, option).items()}
    return numbers


def check_rates(config: Any, *, is_function: bool) -> None:
    """Raises a `UsageError` if `learning_rates` is set although `learning_rate` is a schedule."""
    if config.learning_rates and (is_function or isinstance(config.learning_rate, str)):
        raise UsageError(
            f"learning_rates={config.learning_rates} cannot be combined with the schedule "
            f"learning_rate={'a function' if is_function else config.learning_rate}, because they are annealed "
            "in the same way. hint: use a number as learning_rate, with or without anneal_lr."
        )


def numbers_of_role(held: Hyperparameters, option: str, name: str) -> Hyperparameters:
    """Returns a learner's hyperparameters for one role, whose own values replace the common values."""
    own = held.get(_key(option, name))
    return held if own is None else {**held, COMMON[option]: own}


def _key(option: str, name: str) -> str:
    return f"{option}/{name}"
