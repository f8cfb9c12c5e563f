"""Environments that are written with Python numbers train like those that cast each of them."""

import inspect

import gymnasium
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill import dataflow, envs
from rollmill.core.errors import UsageError
from rollmill.core.types import AgentKind, Environment, Timestep
from wordings import raises

BOX = spaces.Box(-10.0, 10.0, (), np.float32)


def weak_reset(key, params):
    return 0, {"x": 1.0, "steps": 0}


def weak_step(key, state, action, params):
    x, steps = state["x"] * 0.5, state["steps"] + 1
    return Timestep(x, {"x": x, "steps": steps}, 1.0, False, steps >= 5, {})


def strong_reset(key, params):
    return jnp.float32(0), {"x": jnp.float32(1), "steps": jnp.int32(0)}


def strong_step(key, state, action, params):
    x, steps = state["x"] * jnp.float32(0.5), state["steps"] + jnp.int32(1)
    return Timestep(x, {"x": x, "steps": steps}, jnp.float32(1), jnp.asarray(False), steps >= 5, {})


def environment(reset=weak_reset, step=weak_step):
    return Environment("Halving", reset, step, BOX, spaces.Discrete(2))


def trained(env):
    graph = rollmill.ppo(env, num_envs=4, num_steps=8, total_timesteps=64, num_minibatches=1)
    state = dataflow.init_state(graph, jax.random.key(0), jnp.arange(4, dtype=jnp.int32))
    after, metrics = jax.jit(lambda state: dataflow.iterate(graph, state))(state)
    return after.learner, metrics


@pytest.mark.slow
def test_weakly_typed_environments_train_as_strongly_typed_ones_do():
    weak, strong = trained(environment()), trained(environment(strong_reset, strong_step))
    jax.tree.map(np.testing.assert_array_equal, weak, strong)
    assert weak[1]["episodes/return_sum"] == weak[1]["episodes/ended"] * 5


def test_every_weak_leaf_is_cast_to_what_its_place_says():
    env = envs.strongly_typed(environment())
    observation, state = jax.eval_shape(env.reset, jax.random.key(0), ())
    after = jax.eval_shape(env.step, jax.random.key(0), state, jnp.int32(0), ())
    assert observation.dtype == jnp.float32 and not observation.weak_type  # 0, in a space of floats
    assert jax.tree.map(lambda leaf: leaf.dtype, state) == {"x": jnp.float32, "steps": jnp.int32}
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((state, after)))
    assert after.terminated.dtype == jnp.bool_ and after.reward.dtype == jnp.float32


def test_strong_values_are_not_touched():
    env = environment(strong_reset, strong_step)
    own = jax.make_jaxpr(env.step)(jax.random.key(0), env.reset(None, ())[1], jnp.int32(0), ())
    strong = envs.strongly_typed(env)
    again = jax.make_jaxpr(strong.step)(jax.random.key(0), env.reset(None, ())[1], jnp.int32(0), ())
    assert str(own) == str(again)


def test_whole_rewards_are_floats():
    env = environment(step=lambda *args: weak_step(*args)._replace(reward=-1))
    assert envs.check_types(envs.strongly_typed(env)).timestep.reward.dtype == jnp.float32


def test_weak_floats_do_not_become_integers():
    space = spaces.Discrete(3)
    env = environment(step=lambda *args: weak_step(*args)._replace(observation=1.5))._replace(
        observation_space=space
    )
    with raises("is-after-reset-and-after", "observation", "int32[]", "float32[]"):
        rollmill.ppo(env)


def test_a_state_whose_dtype_changes_is_an_error_that_says_what_to_write():
    reset = lambda key, params: (0.0, {"x": 1, "steps": 0})
    message = ("is-after-reset-and-after", "int32", "float32", "jnp.asarray(value, jnp.float32) from reset")
    with jax.numpy_dtype_promotion("standard"), raises(*message):
        rollmill.ppo(environment(reset=reset))


@pytest.mark.parametrize(
    ("of_reset", "of_step", "shape", "expected"),
    [
        ((2,), (2,), (2, 1), ("observation-is-but-observation-space", "float32[2]", "add the missing axis")),
        ((2, 1), (2,), (2, 1), ("observation-is-after-but-observation", "after step", "add the missing axis")),
        ((), (1,), (1,), ("observation-is-after-but-observation", "after reset", ".reshape((1,)) in reset")),
        ((2,), (1, 2), (2,), ("observation-is-after-but-observation", "change the shape with .reshape((2,))")),
        ((3,), (3,), (2,), ("observation-is-but-observation-space", "reduce it to the shape (2,)")),
    ],
)
def test_observations_of_other_shapes_are_compared_with_the_declared_space(of_reset, of_step, shape, expected):
    def step(key, state, action, params):
        return rollmill.Timestep(jnp.zeros(of_step), state + 1, jnp.float32(0), state > 3, jnp.asarray(False), {})

    reset = lambda key, params: (jnp.zeros(of_reset), jnp.int32(0))
    box = spaces.Box(-1, 1, shape)
    with raises(*expected):
        rollmill.check_environment(rollmill.Environment("Axes", reset, step, box, spaces.Discrete(2)))


@pytest.mark.parametrize(
    ("reward", "advice"),
    [
        ({"a": jnp.float32(0), "b": jnp.zeros(1)}, "['a']: return one value for each place"),
        (jnp.float32(0), "a dictionary with an array for each kind of agents"),
        ({"a": jnp.zeros(2), "b": jnp.zeros(1, jnp.int32)}, "['b']: cast it with .astype(jnp.float32)"),
        ({"a": jnp.zeros((2, 3)), "b": jnp.zeros(1)}, "['a']: reduce it to the shape (2,)"),
    ],
)
def test_rewards_of_other_shapes_are_answered_with_what_to_write(reward, advice):
    box = spaces.Box(-1, 1, (1,))
    kinds = tuple(AgentKind(name, count, box, spaces.Discrete(2)) for name, count in (("a", 2), ("b", 1)))
    observation = {"a": jnp.zeros((2, 1)), "b": jnp.zeros((1, 1))}

    def step(key, state, action, params):
        return rollmill.Timestep(observation, state + 1, reward, state > 3, jnp.asarray(False), {})

    env = rollmill.Environment(
        "Axes", lambda key, params: (observation, jnp.int32(0)), step, *envs.joint_spaces(kinds), agents=kinds
    )
    with raises("is-expected-hint", "reward", advice):
        rollmill.check_environment(env)


def test_the_check_alone_advises(capsys):
    with pytest.warns(UserWarning, match=r"weakly typed.*the state after reset\['steps'\].*the reward") as warned:
        rollmill.check_environment(environment())
    callers = {__file__, jaxtyping._decorator.__file__}  # with checks of types, their wrapper is the caller
    assert warned[0].filename in callers  # the line that Python prints
    rollmill.ppo(environment())  # warnings are errors in tests
    assert "Halving passed all checks: 100 random steps, 20 episodes ended." in capsys.readouterr().out


# --- what stands for an environment -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("CartPole-v1", "CartPole-v1"),
        ("gymnasium:CartPole-v1", "gymnasium:CartPole-v1"),
        (gymnasium.make("CartPole-v1"), "gymnasium:CartPole-v1"),
    ],
)
def test_ids_and_gymnasium_environments_stand_for_environments(given, name):
    assert envs.as_environment(given).name == name


def test_options_of_a_gymnasium_environment_are_kept():
    env = envs.as_environment(gymnasium.make("CartPole-v1", max_episode_steps=3, sutton_barto_reward=True))
    vector = env.start(range(1), seed=0)
    steps = [vector.reset(), *(vector.step(np.zeros(1, np.int64)) for _ in range(3))]
    vector.close()
    assert [bool(step.truncated[0]) for step in steps] == [False, False, False, True]
    assert [float(step.reward[0]) for step in steps] == [0, 0, 0, 0]  # sutton_barto pays nothing before the fall


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "expected an environment, got a int. hint: give an id"),
        (None, "got a NoneType"),
        (gymnasium.Env, "got the class Env"),
        (gymnasium.envs.classic_control.CartPoleEnv(), "CartPoleEnv has no id from which copies could be created"),
        (
            gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1")),
            r"was wrapped after it was created \(NormalizeObservation\)",
        ),
    ],
)
def test_other_things_do_not(given, message):
    with pytest.raises(UsageError, match=message):
        inspect.unwrap(envs.as_environment)(given)
