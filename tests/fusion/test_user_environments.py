"""Environments as users write them are fused, and their steps are the unfused ones; what is refused says why."""

from functools import partial

import jax
import numpy as np
import pytest
from drawn_compare import WAYS
from game_runs import differing, unfused_steps
from user_environments import ENVIRONMENTS
from user_games import GAMES_OF_USERS
from user_systems import SYSTEMS

from rollmill.fusion import CannotFuse, lower_function

REFUSED = {"landscape": "1600 numbers per environment"}
FUSED = [name for name in ENVIRONMENTS | GAMES_OF_USERS | SYSTEMS if name not in REFUSED]

ROUNDED = {"half_rocket": 2e-3, "reach": 5e-5, "thermostat": 1e-5}
"""Tolerances of environments that magnify rounding.

XLA joins products with constants in float16, `reach` solves equations that are nearly singular, and `thermostat`
squares small differences of temperatures.
"""


@pytest.fixture(autouse=True)
def as_users():
    """Types are promoted as JAX does by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED)
def test_steps_are_those_of_the_program(name):
    played = unfused_steps(name, steps=60, copies=8)
    assert len(np.unique(np.asarray(played.expected.reward))) >= 2
    assert differing(played, WAYS["machine code"], tolerance=ROUNDED.get(name, 1e-6)) == 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name):
    env = ENVIRONMENTS[name]()
    key, action = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), "int32")
    _, state = jax.eval_shape(partial(env.reset, params=env.params), key)
    with pytest.raises(CannotFuse, match=REFUSED[name]):
        lower_function(partial(env.step, params=env.params), (key, state, action))
