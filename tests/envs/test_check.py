"""`check_environment` passes what keeps the contract and names what breaks it."""

import inspect
import random

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rollmill import envs
from rollmill.core.errors import ContractError
from rollmill.core.types import AgentKind, Environment, Timestep
from rollmill.core.user_frame import user_frame
from rollmill.envs.host import allocate
from wordings import raises

BOX = spaces.Box(0.0, 10.0, (1,), np.float32)


def good_reset(key, params):
    count = jax.random.randint(key, (), 0, 3)
    return observe(count), {"count": count}


def good_step(key, state, action, params):
    count = state["count"] + action
    return Timestep(
        observation=observe(count),
        state={"count": count},
        reward=jnp.float32(1.0) * params["bonus"],
        terminated=count >= 9,
        truncated=jnp.asarray(False),
        info={},
    )


def observe(count):
    return jnp.minimum(count, 10).astype(jnp.float32)[None]


def environment(**changes):
    good = {
        "name": "Good",
        "reset": good_reset,
        "step": good_step,
        "observation_space": BOX,
        "action_space": spaces.Discrete(2),
        "params": {"bonus": 0.5},
    }
    return Environment(**(good | changes))


def changed_step(**changes):
    """A step whose result has some fields replaced by functions of `(timestep, state)`."""

    def step(key, state, action, params):
        timestep = good_step(key, state, action, params)
        return timestep._replace(**{field: new(timestep, state) for field, new in changes.items()})

    return step


def fails(message, num_steps=60, **changes):
    with pytest.raises(ContractError, match=message) as caught:
        envs.check_environment(environment(**changes), num_steps=num_steps)
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name, _ in envs.registered()])
@pytest.mark.slow_beyond(5)
def test_every_own_environment_keeps_the_contract(name):
    envs.check_environment(envs.make(name), num_steps=50)


def test_the_good_environment_keeps_the_contract():
    envs.check_environment(environment())


def test_no_environment():
    with raises("expected-environment-got-hint-give", "a int"):
        inspect.unwrap(envs.check_environment)(3)


def test_python_if_on_a_traced_value_is_shown_with_its_line():
    def step(key, state, action, params):
        if state["count"] > 3:
            return good_step(key, state, action, params)
        return good_step(key, state, action, params)

    message = fails("Good: step raised TracerBoolConversionError", step=step)
    assert "test_check.py:" in message and 'if state["count"] > 3:' in message
    assert "Use jnp.where or jax.lax.cond" in message


def test_params_that_are_made_python_numbers_are_found():
    def step(key, state, action, params):
        return good_step(key, state, action, {"bonus": float(params["bonus"])})

    assert 'float(params["bonus"])' in fails("Good: step raised ConcretizationTypeError", step=step)


def test_an_error_inside_step_is_shown_with_its_own_line():
    def step(key, state, action, params):
        raise KeyError("no such wheel")

    message = fails("Good: step raised KeyError: 'no such wheel'", step=step)
    assert 'raise KeyError("no such wheel")' in message and "test_check.py:" in message


def test_an_error_inside_reset_is_shown():
    def reset(key, params):
        return np.asarray(jax.random.uniform(key)), ()

    assert "Use jax.numpy" in fails("Good: reset raised TracerArrayConversionError", reset=reset)


def test_reset_must_return_two_values():
    fails(
        r"reset returned a tuple of 3 values .*expected the tuple \(observation, state\)",
        reset=lambda k, p: (1.0, 2, 3),
    )


@pytest.mark.parametrize("count", [4, 5, 6])
def test_step_must_return_a_timestep(count):
    def step(key, state, action, params):
        return tuple(good_step(key, state, action, params))[:count]

    fails(rf"step returned a tuple of {count} values .*expected rollmill.Timestep\(", step=step)


def test_state_structure_must_stay():
    step = changed_step(state=lambda t, s: {**t.state, "extra": t.reward})
    fails(r"different structures of the state: reset .*\['count'\]: int32.*step .*\['extra'\]: float32", step=step)


def test_state_dtype_must_stay():
    step = changed_step(state=lambda t, s: {"count": t.state["count"].astype(jnp.float32)})
    fails(r"state\['count'\] is int32\[\] after reset and float32\[\] after step", step=step)


def test_state_shape_must_stay():
    step = changed_step(state=lambda t, s: {"count": t.state["count"][None]})
    fails(r"state\['count'\] is int32\[\] after reset and int32\[1\] after step", step=step)


def test_observation_shape_must_stay():
    step = changed_step(observation=lambda t, s: jnp.tile(t.observation, 2))
    fails(r"observation is float32\[2\] after step, but the observation space declares float32\[1\]", step=step)


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("reward", lambda t, s: t.state["count"], r"reward is int32\[\], expected float32\[\]"),
        ("reward", lambda t, s: t.reward[None], r"reward is float32\[1\], expected float32\[\]"),
        ("terminated", lambda t, s: t.reward, r"terminated is float32\[\], expected bool\[\]"),
        ("truncated", lambda t, s: jnp.zeros(2, bool), r"truncated is bool\[2\], expected bool\[\]"),
        ("info", lambda t, s: None, "info is a NoneType, expected a dict"),
    ],
)
def test_flags_and_reward_have_their_types(field, value, found):
    fails(found, step=changed_step(**{field: value}))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Box(0.0, 10.0, (2,), np.float32), r"observation is float32\[1\], but .* declares float32\[2\]"),
        (spaces.Box(0, 10, (1,), np.int32), r"observation is float32\[1\], but .* declares int32\[1\]"),
        (
            spaces.Dict({"a": BOX}),
            r"the observation is float32\[1\], but .* declares dict\(\['a'\]: float32\[1\]\)",
        ),
        (spaces.Box(0.0, 5.0, (1,), np.float32), r"observation after step number \d+ is \[6.0\], outside of"),
        (
            spaces.Box(1.0, 10.0, (1,), np.float32),
            r"observation after reset number \d+ is \[0.0\], outside of",
        ),
        (spaces.Text(3), "observation_space: the space Text.* has no fixed-shape JAX form"),
    ],
)
def test_the_observation_space_must_fit(space, message):
    fails(message, observation_space=space)


def test_the_action_space_must_have_a_jax_form():
    fails("action_space: the space Text.* has no fixed-shape JAX form", action_space=spaces.Text(3))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), jnp.float32), x), "pure_callback"),
        (
            lambda x: jax.experimental.io_callback(np.sin, jax.ShapeDtypeStruct((), jnp.float32), x),
            "io_callback",
        ),
        (lambda x: (jax.debug.print("{}", x), x)[1], "debug_print"),
    ],
)
def test_host_calls_are_found_also_inside_a_branch(call, name):
    def step(key, state, action, params):
        timestep = good_step(key, state, action, params)
        return timestep._replace(reward=jax.lax.cond(action > 0, call, lambda x: x, timestep.reward))

    message = fails(
        rf"step calls the host \({name}\), expected a function that depends only on its arguments", step=step
    )
    assert "test_check.py:" in message.partition("At ")[2] and name.split("_")[0] in message.partition("At ")[2]


def test_impurity_is_found():
    calls = []

    def step(key, state, action, params):
        calls.append(1)
        return changed_step(reward=lambda t, s: jnp.float32(len(calls)))(key, state, action, params)

    fails("step is not a pure function: two calls with the same arguments returned different results", step=step)


@pytest.mark.parametrize("draw", [np.random.default_rng(0).standard_normal, random.Random(0).random])
def test_random_numbers_of_the_host_are_found(draw):
    def reset(key, params):
        return jnp.zeros(1) + jnp.asarray(np.full(1, draw(), np.float32)), {"count": jnp.int32(0)}

    fails("reset is not a pure function", reset=reset)


def test_a_value_kept_outside_the_state_is_found():
    kept = []

    def step(key, state, action, params):
        kept.append(state["count"])
        return changed_step(state=lambda t, s: {"count": kept[0] + action})(key, state, action, params)

    fails("step is not a pure function.*keep such values in the state", step=step)


def test_nan_is_found():
    step = changed_step(observation=lambda t, s: jnp.where(t.observation > 4, jnp.nan, t.observation))
    fails(r"observation is NaN after step number \d+, expected a finite number", step=step)
    step = changed_step(reward=lambda t, s: t.reward / jnp.where(s["count"] > 4, 0.0, 1.0))
    fails(r"the reward is inf in step \d+, expected a number", step=step)


def counted_step(**changes):
    """A step that never ends an episode and counts up by one, with fields replaced as by `changed_step`."""
    return changed_step(
        **{
            "state": lambda t, s: {"count": s["count"] + 1},
            "terminated": lambda t, s: jnp.asarray(False),
            **changes,
        }
    )


def counted(**changes):
    return environment(reset=lambda key, params: (observe(0), {"count": jnp.int32(0)}), **changes)


@pytest.mark.parametrize(("at", "value"), [(19, "nan"), (20, "-inf"), (1234, "nan")])
def test_a_reward_that_is_no_number_is_found_in_every_step_that_is_played(at, value):
    # Twenty steps are recorded, and further ones look for the end of the episode.
    step = counted_step(reward=lambda t, s: jnp.where(s["count"] == at, float(value), t.reward))
    with raises("reward-is-in-step-expected", value, at):
        envs.check_environment(counted(step=step), num_steps=20)


@pytest.mark.parametrize(
    ("value", "message", "at"),
    [
        (jnp.nan, ("is-expected-number-look-for", "observation", "NaN", "after", "step number 150"), 150),
        (jnp.inf, ("is-expected-number-look-for", "observation", "infinite", "after", "step number 5"), 5),
        (12.0, ("observation-is-outside-observation-space", "after", "step number 150", "[12.0]"), 150),
    ],
)
def test_observations_are_checked_in_every_step_that_is_played(value, message, at):
    space = spaces.Box(0.0, np.inf if value == jnp.inf else 10.0, (1,), np.float32)
    step = counted_step(observation=lambda t, s: jnp.where(s["count"] == at, value, t.observation))
    with raises(*message):
        envs.check_environment(counted(step=step, observation_space=space), num_steps=20)


def test_a_reset_between_episodes_is_checked():
    # Few resets go wrong, and those that the rollout itself plays are among the ones that are looked at.
    def reset(key, params):
        observation, state = good_reset(key, params)
        return jnp.where(jax.random.uniform(key) < 0.01, jnp.nan, observation), state

    fails(r"observation is NaN after reset number \d+, expected a finite number", reset=reset, num_steps=600)


def test_masks_and_turns_are_checked_in_every_step_that_is_played():
    mask = counted(step=counted_step(), action_mask=lambda state, params: jnp.full(2, state["count"] != 70))
    with raises("action-mask-allows-no-action", "70"):
        envs.check_environment(mask, num_steps=20)
    turns = counted(
        step=counted_step(), num_players=2, to_move=lambda state, params: jnp.where(state["count"] == 70, 2, 0)
    )
    with raises("to-move-is-before-step", "2", "70"):
        envs.check_environment(turns, num_steps=20)


@pytest.mark.parametrize(("what", "at"), [("reward", 70), ("observation", 70), ("central", 70), ("central", 3)])
def test_several_agents_are_checked_in_every_step_that_is_played(what, at):
    pair = AgentKind("pair", 2, spaces.Box(-1.0, 1.0, (1,), np.float32), spaces.Discrete(2))
    observation_space, action_space = envs.joint_spaces([pair])

    def numbers(kind, count):
        bad = jnp.where(count == at, jnp.nan, 0.0) if kind == what else jnp.float32(0)
        return jnp.stack([jnp.float32(0), bad])

    def reset(key, params):
        return {"pair": jnp.zeros((2, 1))}, jnp.int32(0)

    def step(key, state, action, params):
        observation = {"pair": numbers("observation", state)[:, None]}
        reward = {"pair": numbers("reward", state)}
        return Timestep(observation, state + 1, reward, jnp.asarray(False), jnp.asarray(False), {})

    env = Environment(
        name="Pair",
        reset=reset,
        step=step,
        observation_space=observation_space,
        action_space=action_space,
        params={},
        agents=(pair,),
        central=lambda state, params: numbers("central", state),
    )
    expected = {
        "reward": rf"the reward\['pair'\] is \[ ?0\. +nan\] in step {at}, expected a number",
        "observation": rf"observation\['pair'\] is NaN after step number {at}, expected a finite number",
        "central": rf"the result of central is NaN before step number {at}, expected a finite number",
    }
    with pytest.raises(ContractError, match=expected[what]):
        envs.check_environment(env, num_steps=20)


def test_actions_far_from_a_gaussian_are_warned_of():
    far = spaces.Box(290.0, 300.0, (1,), np.float32)
    step = changed_step(state=lambda t, s: {"count": s["count"] + 1})
    env = environment(action_space=far, step=lambda key, state, action, params: step(key, state, 1, params))
    with pytest.warns(UserWarning, match="Good: the actions lie between 290 and 300.*rescale-actions"):
        envs.check_environment(env, num_steps=40)
    with pytest.warns(UserWarning, match="Far: the actions lie between 290 and 300.*rescale-actions"):
        envs.check_environment(envs.host_environment("Far", lambda: FarCounter()), num_steps=5)


def test_params_must_be_numbers():
    fails(r"params\['skin'\] is a str, expected an array or a number", params={"bonus": 0.5, "skin": "wood"})


def test_action_mask_must_fit_the_action_space():
    fails(
        r"action_mask returned bool\[3\], expected bool\[2\]",
        action_mask=lambda state, params: jnp.ones(3, bool),
    )
    fails(
        r"action_mask returned float32\[2\], expected bool\[2\]",
        action_mask=lambda state, params: jnp.ones(2),
    )
    fails(
        r"has an action_mask, but its action space is Box.*, expected a Discrete or MultiDiscrete",
        action_mask=lambda state, params: jnp.ones(1, bool),
        action_space=spaces.Box(0.0, 1.0, (), np.float32),
        step=lambda k, s, a, p: good_step(k, s, jnp.int32(1), p),
    )


def test_action_mask_must_leave_an_action():
    fails(
        "action_mask allows no action before step",
        action_mask=lambda state, params: jnp.full(2, state["count"] < 4),
    )


@pytest.mark.parametrize(
    ("space", "legal", "allowed"),
    [
        (spaces.MultiDiscrete([2, 3]), [[False, True, True], [True, False, True]], {(1, 0), (1, 2)}),
        (spaces.Discrete(3, start=2), [True, False, True], {2, 4}),
    ],
)
def test_masked_rollouts_draw_legal_actions_only(space, legal, allowed):
    def step(key, state, action, params):
        wanted = jnp.asarray(sorted(allowed), jnp.int32)
        hits = jax.vmap(lambda choice: (choice == action).all())(wanted)
        reward = jnp.where(hits.any(), jnp.float32(1.0), jnp.nan)  # an illegal action would fail the check
        return good_step(key, state, jnp.int32(1), params)._replace(reward=reward)

    mask = jnp.array(legal)
    env = environment(step=step, action_space=space, action_mask=lambda state, params: mask)
    envs.check_environment(env)
    with raises("reward-is-in-step-expected", "nan"):
        envs.check_environment(env._replace(action_mask=None))


def player_of(state, params):
    return (state["count"] % 2).astype(jnp.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_players": 3, "to_move": player_of}, "num_players is 3, expected 1 or 2"),
        ({"num_players": 2}, "has num_players=2 and no to_move. A two-player environment needs"),
        ({"to_move": player_of}, "has num_players=1 and to_move"),
        (
            {"num_players": 2, "to_move": lambda state, params: state["count"] > 1},
            r"to_move returned bool\[\], expected int32\[\]",
        ),
        (
            {"num_players": 2, "to_move": lambda state, params: jnp.zeros(2, jnp.int32)},
            r"to_move returned int32\[2\], expected int32\[\]",
        ),
        (
            {"num_players": 2, "to_move": lambda state, params: state["count"] // 4},
            r"to_move is 2 before step \d+, expected 0 or 1",
        ),
    ],
)
def test_games_of_two_say_whose_turn_it_is(changes, message):
    envs.check_environment(environment(num_players=2, to_move=player_of))
    fails(f"Good:? {message}", **changes)


def test_agents_are_not_players():
    env = envs.make("TagGridWorld-Small-v0")._replace(num_players=2, to_move=lambda state, params: jnp.int32(0))
    with raises("agents-and-num-players-2"):
        envs.check_environment(env)


def test_a_planner_must_find_the_environments_own_steps():
    env = environment()
    envs.check_environment(envs.plannable(env))
    envs.check_environment(envs.time_limit(envs.plannable(env), 5))  # its planning state has no clock
    fails(
        r"Timestep.observation differs between a step and the same step from planning_state",
        planning_state=lambda state, params: {"count": state["count"] + 1},
    )
    fails(
        "planning_state raised KeyError: 'board'",
        planning_state=lambda state, params: state["board"],
    )


def test_random_steps_cannot_be_planned():
    def step(key, state, action, params):
        return good_step(key, state, jax.random.randint(key, (), 0, 2), params)

    envs.check_environment(environment(step=step))
    with raises("timestep-differs-between-step-and"):
        envs.check_environment(envs.plannable(environment(step=step)))


def test_an_environment_that_resets_itself_is_found():
    env = envs.auto_reset(environment())
    with raises("every-step-ended-episode-returned"):
        envs.check_environment(env)


def moving_reset(key, params):
    state = {"place": jax.random.uniform(key, (), minval=4.0, maxval=6.0)}
    return state["place"][None], state


def resets_itself(key, state, action, params):
    place = state["place"] + 0.3 * action.astype(jnp.float32)
    first, anew = moving_reset(key, params)
    ends = place > 8.0
    observation, state = jnp.where(ends, first, place[None]), {"place": jnp.where(ends, anew["place"], place)}
    return Timestep(observation, state, jnp.float32(1), ends, jnp.asarray(False), {})


@pytest.mark.parametrize("limit", [100, 1000])
def test_an_environment_that_resets_itself_is_found_under_a_time_limit(limit):
    env = environment(reset=moving_reset, step=resets_itself)
    with raises("every-step-ended-episode-returned"):
        envs.check_environment(envs.time_limit(env, limit))


def test_an_environment_that_resets_itself_after_long_episodes_is_found():
    env = environment(reset=moving_reset, step=resets_itself, observation_space=BOX)
    with raises("every-step-ended-episode-returned"):
        envs.check_environment(env, num_steps=3)


@pytest.mark.parametrize("wrap", [lambda env: envs.time_limit(env, 10), envs.auto_reset], ids=["limit", "reset"])
def test_step_must_return_a_timestep_under_transforms(wrap):
    env = environment(step=lambda *arguments: tuple(good_step(*arguments)))
    with raises("step-returned-expected-rollmill-timestep", "Good", "a tuple of 6 values"):
        envs.check_environment(wrap(env))


def test_an_environment_that_never_ends_is_warned_of(capsys):
    env = environment(step=changed_step(terminated=lambda t, s: jnp.asarray(False)))
    with pytest.warns(UserWarning, match=r"Good: no episode ended in 10020 random steps\. .*rollmill.time_limit"):
        envs.check_environment(env, num_steps=20)
    printed = capsys.readouterr().out
    assert "passed the checks with a warning: 10020 random steps, 0 episodes ended" in printed


def test_long_episodes_are_played_to_their_end(capsys):
    env = environment(step=changed_step(terminated=lambda t, s: jnp.asarray(False)))
    envs.check_environment(envs.time_limit(env, 1500), num_steps=20)
    assert "1500 random steps, 1 episode ended." in capsys.readouterr().out


def test_vmap_must_change_nothing():
    @jax.custom_batching.custom_vmap
    def doubled(x):
        return 2 * x

    @doubled.def_vmap
    def _wrong(axis_size, in_batched, x):
        return 3 * x, True

    step = changed_step(reward=lambda t, s: doubled(t.reward * s["count"].astype(jnp.float32)))
    fails(r"Timestep.reward differs between a single step and a step under jax.vmap", step=step)


def test_silent_promotion_is_warned_of():
    step = changed_step(reward=lambda t, s: t.reward * s["count"])
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.warns(UserWarning, match="step mixes dtypes") as caught,
    ):
        envs.check_environment(environment(step=step), num_steps=10)
    assert "t.reward * s" in str(caught[0].message)


class HostCounter(gymnasium.Env):
    observation_space = BOX
    action_space = spaces.Discrete(2)

    def __init__(self, value=1.0, error=None):
        self.value, self.error = value, error

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        if self.error:
            raise self.error
        return np.full(1, self.value), min(self.value, 11.0), False, False, {}

    def close(self):
        CLOSED.append(self)


class FarCounter(HostCounter):
    action_space = spaces.Box(290.0, 300.0, (1,), np.float32)


CLOSED = []


def host(**attributes):
    return envs.host_environment("Host", lambda: HostCounter(**attributes))


def test_host_environments_are_checked_and_closed(capsys):
    CLOSED.clear()
    envs.check_environment(host(), num_steps=5)
    assert len(CLOSED) == 3  # one for the spaces, two for the check
    assert "2 copies, 0 episodes ended. If no episode ever ends, limit the time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"value": 11.0}, r"(?s)Host: step returned the observation .*which is not in the space"),
        ({"value": np.nan}, r"Host: environment 0 returned .* = nan at step 1 of its episode"),
        ({"value": np.ones(2)}, r"(?s)Host: step raised ValueError: .*"),
        ({"error": KeyError("wheel")}, r"(?s)Host: step raised KeyError: 'wheel'\n  at .*raise self.error"),
    ],
)
def test_broken_host_environments(attributes, message):
    CLOSED.clear()
    with pytest.raises(ContractError, match=message):
        envs.check_environment(host(**attributes), num_steps=5)
    assert len(CLOSED) >= 3


def test_host_rewards_must_be_finite():
    class Boundless(HostCounter):
        def step(self, action):
            return np.ones(1), -np.inf, False, False, {}

    with raises(
        "environment-gave-seed-is-hint", "Boundless", "0", "reward", "-inf", "at step 1", kind=ContractError
    ):
        envs.check_environment(envs.host_environment("Boundless", Boundless), num_steps=5)


def test_vectors_of_others_must_return_what_their_spaces_say():
    class Wide:
        num_envs, seeds = 2, (0, 1)

        def reset(self, *, out=None):
            return allocate(envs.step_struct(good, 2))._replace(observation=np.zeros((2, 3), np.float32))

        def step(self, actions, *, out=None):
            return self.reset()

        def drain_failures(self):
            return []

        def close(self):
            pass

    good = host()
    wide = good._replace(start=lambda indices, *, seed, generation=0, gamma=None: Wide())
    with raises("copies-returned-expected", "Host", "reset", "2", "float32[2, 3]", "[2, 1]"):
        envs.check_environment(wide)


def test_own_line_prefers_the_callers_code():
    def wrong(x):
        return jnp.reshape(x, (3, 7))

    try:
        eqx.filter_jit(wrong)(jnp.zeros(4))
    except TypeError as error:
        line = user_frame(error)
    assert line.endswith("return jnp.reshape(x, (3, 7))") and "test_check.py:" in line
