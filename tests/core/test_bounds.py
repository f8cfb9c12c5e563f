"""Bounds of hyperparameters and options: each number has some, and what lies outside is refused by name."""

import dataclasses
import math
import typing

import pytest

import rollmill
from rollmill.core.bounds import bounds_of
from rollmill.core.errors import UsageError
from rollmill.planning.placement import Counts
from rollmill.recipes import RECIPES

CONFIGS = (
    rollmill.PPOConfig,
    rollmill.A3CConfig,
    rollmill.IMPALAConfig,
    rollmill.MAPPOConfig,
    rollmill.NetworkConfig,
    rollmill.RunOptions,
)


def holds_numbers(hint) -> bool:
    return hint in (int, float) or any(map(holds_numbers, typing.get_args(hint)))


@pytest.mark.parametrize("config", CONFIGS)
def test_every_number_of_a_configuration_has_bounds(config):
    hints = typing.get_type_hints(config)
    numbers = {field.name for field in dataclasses.fields(config) if holds_numbers(hints[field.name])}
    assert numbers and bounds_of(config).keys() == numbers


@pytest.mark.parametrize("config", CONFIGS)
def test_no_number_may_be_nan_and_only_limits_infinite(config):
    for name, bounds in bounds_of(config).items():
        assert not bounds.holds(math.nan)
        if typing.get_type_hints(config)[name] is float and bounds.holds(math.inf):
            assert name in ("max_grad_norm", "clip_rho", "clip_c") or name.endswith("_seconds")


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (rollmill.PPOConfig, {"clip_coef": -1.0}, "clip_coef=-1.0 must be greater than 0 and finite."),
        (rollmill.PPOConfig, {"clip_coef": 0.0}, "clip_coef=0.0 must be greater than 0 and finite."),
        (rollmill.PPOConfig, {"ent_coef": math.nan}, "ent_coef=nan must be at least 0 and finite."),
        (rollmill.PPOConfig, {"learning_rate": math.inf}, "learning_rate=inf must be at least 0 and finite."),
        (rollmill.PPOConfig, {"target_kl": -1.0}, "target_kl=-1.0 must be at least 0 and finite."),
        (rollmill.PPOConfig, {"max_grad_norm": -0.5}, "max_grad_norm=-0.5 must be at least 0."),
        (rollmill.A3CConfig, {"rms_decay": 1.5}, "rms_decay=1.5 must lie between 0 and 1."),
        (rollmill.A3CConfig, {"rms_eps": 0.0}, "rms_eps=0.0 must be greater than 0 and finite."),
        (rollmill.IMPALAConfig, {"clip_rho": 0.0}, "clip_rho=0.0 must be greater than 0."),
        (rollmill.MAPPOConfig, {"num_envs": 0}, "num_envs=0 must be at least 1."),
        (rollmill.NetworkConfig, {"hidden_sizes": (64, 0)}, "hidden_sizes[1]=0 must be at least 1."),
        (rollmill.NetworkConfig, {"convolutions": ((8, 3, -1),)}, "convolutions[0][2]=-1 must be at least 1."),
        (rollmill.NetworkConfig, {"initial_log_std": math.nan}, "initial_log_std=nan must be finite."),
        (rollmill.RunOptions, {"checkpoint_seconds": math.nan}, "checkpoint_seconds=nan must be at least 0."),
        (Counts, {"workers": 0}, "workers=0 must be at least 1."),
        (rollmill.RunOptions, {"seed": 2**32}, "seed=4294967296 must lie between 0 and 4294967295."),
    ],
)
def test_a_number_outside_is_named_with_its_bounds(config, values, message):
    with pytest.raises(UsageError) as refused:
        config(**values)
    assert str(refused.value) == message


def test_infinity_is_a_limit_that_is_not_there():
    assert rollmill.PPOConfig(max_grad_norm=math.inf).max_grad_norm == math.inf
    assert rollmill.IMPALAConfig(clip_rho=math.inf, clip_c=math.inf).clip_c == math.inf


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_lies_within(recipe):
    assert RECIPES[recipe]().config is not None
