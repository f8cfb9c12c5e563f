"""Host environments as batches: the same-step convention, counts, seeds, and what is written where."""

import gymnasium
import host_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rollmill import envs
from rollmill.core.spaces import contains, struct
from rollmill.core.types import Environment, Timestep
from rollmill.envs.host import allocate, copy_batch, environment_seed
from wordings import raises

GAMMA = 0.9


def script_in_jax():
    """`host_cases.Script` without its draws."""

    def step(key, state, action, params):
        after = state + 1
        ends = [action == host_cases.TERMINATE, action == host_cases.TRUNCATE]
        return Timestep(after.astype(jnp.float32), after, action.astype(jnp.float32), *ends, {})

    return Environment(
        "Script",
        lambda key, params: (jnp.float32(0), jnp.int32(0)),
        step,
        spaces.Box(-np.inf, np.inf, ()),
        spaces.Discrete(4),
    )


def test_steps_mean_what_they_mean_on_the_device():
    actions = np.random.default_rng(0).choice(4, (40, 3), p=[0.4, 0.4, 0.1, 0.1]).astype(np.int32)
    env = envs.record_discounted_returns(envs.record_episodes(envs.auto_reset(script_in_jax())), GAMMA)
    env = envs.vectorise(env, 3)
    keys = jax.random.split(jax.random.key(0), 3)

    def body(state, action):
        timestep = env.step(keys, state, action, ())
        return timestep.state, timestep

    theirs = jax.lax.scan(body, env.reset(keys, ())[1], actions)[1]
    vector = envs.host_environment("Script", host_cases.Script).start(range(3), seed=1, gamma=GAMMA)
    vector.reset()
    steps = [vector.step(action) for action in actions]
    ours = jax.tree.map(lambda *rows: np.stack(rows), *steps)

    assert theirs.terminated.any() and theirs.truncated.any()
    for name in ("reward", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    np.testing.assert_array_equal(ours.observation[..., 0], theirs.observation)
    np.testing.assert_array_equal(ours.info["final_observation"][..., 0], theirs.info["final_observation"])
    for name in ("episode_return", "episode_length"):
        np.testing.assert_array_equal(ours.info[name], theirs.info[name])
        assert ours.info[name].dtype == theirs.info[name].dtype
    np.testing.assert_allclose(ours.info["discounted_return"], theirs.info["discounted_return"], rtol=1e-6)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_gymnasium_gives_the_same_numbers(name):
    env = envs.make(f"gymnasium:{name}", max_episode_steps=15)
    vector = env.start([4, 9], seed=7)
    make = lambda: gymnasium.make(name, max_episode_steps=15)
    theirs = SyncVectorEnv([make, make], autoreset_mode=AutoresetMode.SAME_STEP)
    first, _ = theirs.reset(seed=list(vector.seeds))
    np.testing.assert_array_equal(vector.reset().observation, first)
    theirs.action_space.seed(0)
    ends = 0
    for _ in range(40):
        action = theirs.action_space.sample()
        observation, reward, terminated, truncated, info = theirs.step(action)
        ours = vector.step(action)
        np.testing.assert_array_equal(ours.observation, observation)
        np.testing.assert_array_equal(ours.reward, reward.astype(np.float32))
        np.testing.assert_array_equal(ours.terminated, terminated)
        np.testing.assert_array_equal(ours.truncated, truncated)
        for i in np.flatnonzero(terminated | truncated):
            np.testing.assert_array_equal(ours.info["final_observation"][i], info["final_obs"][i])
            ends += 1
    assert ends >= 4
    theirs.close()
    vector.close()


def draws(vector, num_steps=3):
    """The generator's numbers; the first step ends an episode."""
    rows = [vector.reset().observation]
    rows += [vector.step(np.full(vector.num_envs, 2 * (t == 0))).observation for t in range(num_steps)]
    return np.stack(rows)[..., 1]


def test_seeds_belong_to_the_number_of_an_environment():
    env = envs.host_environment("Script", host_cases.Script)
    together = env.start(range(4), seed=3)
    expected = draws(together)
    np.testing.assert_array_equal(draws(env.start([2], seed=3))[:, 0], expected[:, 2])
    assert together.seeds == tuple(environment_seed(3, index) for index in range(4))
    assert np.unique(expected).size == expected.size
    again = draws(env.start(range(4), seed=3, generation=1))
    other = draws(env.start(range(4), seed=4))
    assert not (np.isin(again, expected).any() or np.isin(other, expected).any())


def test_later_episodes_go_on_with_the_generator():
    vector = envs.host_environment("Script", host_cases.Script).start([5], seed=0)
    # A draw at the reset, one for the final observation, one at the next reset, two more steps.
    first, _, *rest = np.random.default_rng(vector.seeds[0]).random(5)
    np.testing.assert_array_equal(draws(vector)[:, 0], np.float32([first, *rest]))


def test_seeds_differ_and_fit_into_32_bits():
    seeds = [environment_seed(2**32 - 1, index) for index in range(5000)]
    assert len(set(seeds)) == 5000 and min(seeds) >= 0 and max(seeds) < 2**31


def test_parts_of_spaces_arrive_in_their_dtypes():
    made = []
    vector = envs.host_environment("Parts", host_cases.keeping(made, host_cases.Parts)).start(range(2), seed=0)
    vector.reset()
    actions = {
        "push": np.array([[0.5, 3.0], [-9.0, np.nan]], np.float32),
        "switch": (np.array([3, 1], np.int32), np.array([[0, 1], [1, 0]], np.int32)),
    }
    step = vector.step(actions)
    first, second = made[-2].given[0], made[-1].given[0]
    np.testing.assert_array_equal(first["push"], [0.5, 1.0])
    np.testing.assert_array_equal(second["push"], [-1.0, np.nan])
    assert first["push"].dtype == np.float64
    assert first["switch"][0] == 3 and second["switch"][0] == 1
    np.testing.assert_array_equal(second["switch"][1], [1, 0])
    assert first in host_cases.Parts.action_space

    expected = {"image": np.full((2, 2, 2), 1), "pair": (np.ones(2), np.full(2, 0.125))}
    jax.tree.map(np.testing.assert_array_equal, step.observation, expected)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, step.observation)
    assert dtypes == jax.tree.map(lambda leaf: leaf.dtype, struct(host_cases.Parts.observation_space))
    actions["push"][:] = 7  # the environment's own copy stays
    np.testing.assert_array_equal(first["push"], [0.5, 1.0])


def test_all_is_written_into_the_arrays_that_are_handed_in():
    env = envs.host_environment("Masked", host_cases.Masked)
    vector = env.start(range(2), seed=0, gamma=GAMMA)
    out = allocate(envs.step_struct(env, 2, discounted=True))
    poison = lambda: jax.tree.map(lambda leaf: leaf.fill(77), out)
    poison()
    assert vector.reset(out=out) is out
    assert [leaf.sum() for leaf in (out.reward, out.terminated, out.truncated)] == [0, 0, 0]
    assert [out.info[name].sum() for name in ("episode_return", "episode_length", "discounted_return")] == [
        0,
        0,
        0,
    ]
    np.testing.assert_array_equal(out.info["final_observation"], out.observation)
    for t in range(1, 4):
        poison()
        assert vector.step(np.zeros(2, np.int32), out=out) is out
        assert not any((leaf == 77).any() for leaf in jax.tree.leaves(out) if leaf.dtype != bool)
        np.testing.assert_array_equal(out.info["episode_length"], [t, t])
    alone = vector.step(np.zeros(2, np.int32))
    assert not any(map(np.shares_memory, jax.tree.leaves(alone), jax.tree.leaves(out)))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), alone) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), out
    )


def test_masks_are_those_of_the_observation_beside_them():
    env = envs.host_environment("Masked", host_cases.Masked)
    assert env.has_action_mask and not envs.host_environment("Script", host_cases.Script).has_action_mask
    vector = env.start(range(2), seed=0)
    mask = lambda step: step.info["action_mask"].tolist()
    assert mask(vector.reset()) == [[False, True, True, True]] * 2
    step = vector.step(np.array([1, host_cases.TERMINATE]))
    assert mask(step) == [[True, False, True, True], [False, True, True, True]]
    envs.check_environment(env, num_steps=20)


@pytest.mark.parametrize("flags", [[False, True, True, True], (0, 1, 1, 1), np.array([0.0, 1.0, 1.0, 1.0])])
def test_masks_may_be_lists_and_numbers(flags):
    masked = type("Listed", (host_cases.Masked,), {"mask": lambda self: flags})
    step = envs.host_environment("Listed", masked).start([0], seed=0).reset()
    assert step.info["action_mask"].tolist() == [[False, True, True, True]]


@pytest.mark.parametrize(
    ("mask", "texts"),
    [
        (np.ones(3, bool), ["has-one-number-for-each", "Masked", "(3,)", "(4,)", "Discrete(4)"]),
        (np.ones((1, 4), bool), ["has-one-number-for-each", "Masked", "(1, 4)", "(4,)", "Discrete(4)"]),
        ([[1, 1], [1, 1, 1]], ["has-one-number-for-each", "Masked", "(4,)"]),
        (np.array([0, -np.inf, 0, 0]), ["action-mask-contains-expected-1", "Masked", "-inf"]),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask, texts):
    with raises(*texts):
        envs.host_environment("Masked", type("Masked", (host_cases.Masked,), {"mask": lambda self: mask}))


def test_masks_of_continuous_actions_are_refused():
    with raises("infos-contain-action-mask-but", "Masked", "Box"):
        envs.host_environment("Masked", type("Masked", (host_cases.Masked,), {"action_space": spaces.Box(-1, 1)}))


@pytest.mark.parametrize("told", [np.ones(1, bool), True])
def test_masks_of_steps_are_not_broadcast(told):
    class Short(host_cases.Masked):
        def mask(self):
            return super().mask() if self.count == 0 else told

    vector = envs.host_environment("Short", Short).start([0], seed=0)
    vector.reset()
    vector.step(np.ones(1, np.int32))
    assert "an action_mask has the shape" in vector.drain_failures()[0].error


def test_a_mask_that_only_steps_return_is_refused():
    class Late(host_cases.Masked):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed)[0], {}

    vector = envs.host_environment("Late", Late).start([0], seed=0)
    vector.reset()
    vector.step(np.ones(1, np.int32))
    assert "which was missing from the first reset" in vector.drain_failures()[0].error


def test_a_mask_without_a_legal_action_is_found():
    class Empty(host_cases.Masked):
        def mask(self):
            return super().mask() * (self.count < 3)

    with raises("action-mask-allows-no-action", "Empty"):
        envs.check_environment(envs.host_environment("Empty", Empty), num_steps=20)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (
            (0, 1.0, False, {}),
            "step returned 4 values, expected (observation, reward, terminated, truncated, info).",
        ),
        (None, "step returned a NoneType, expected (observation, reward, terminated, truncated, info)."),
        (
            (np.zeros(2), [1], False, False, {}),
            "step returned reward=[1], terminated=False and truncated=False, expected a number and two booleans.",
        ),
        (
            (np.zeros(2), 1, "False", False, {}),
            "step returned reward=1, terminated='False' and truncated=False, expected a number and two booleans.",
        ),
        (
            (np.zeros(2), "1.5", False, None, {}),
            "step returned reward='1.5', terminated=False and truncated=None, expected a number and two booleans.",
        ),
    ],
)
def test_results_that_are_no_step_are_named(returned, text):
    script = type("Wrong", (host_cases.Script,), {"step": lambda self, action: returned})
    vector = envs.host_environment("Wrong", script).start([0], seed=0)
    vector.reset()
    vector.step(np.zeros(1, np.int32))
    assert vector.drain_failures()[0].error == f"ValueError: {text}"


@pytest.mark.parametrize("one", [True, 1, 1.0, np.bool_(True), np.uint8(1), np.array(1.0), jnp.array(1)])
def test_flags_and_rewards_may_be_scalars_of_any_kind(one):
    script = type("Right", (host_cases.Script,), {"step": lambda self, action: (np.zeros(2), one, one, one, {})})
    vector = envs.host_environment("Right", script).start([0], seed=0)
    vector.reset()
    step = vector.step(np.zeros(1, np.int32))
    assert (step.reward[0], step.terminated[0], step.truncated[0]) == (1.0, True, True)
    assert not vector.drain_failures()


def test_nan_and_infinity_are_named():
    class Astray(host_cases.Script):
        def step(self, action):
            return np.array([np.nan, 1e300]), np.inf, False, False, {}

    vector = envs.host_environment("Astray", Astray).start([0], seed=0)
    vector.reset()
    with (
        pytest.warns(RuntimeWarning, match="overflow"),  # NumPy's, where float64 is too large for float32
        raises("environment-gave-seed-is-hint", "Astray", "0", "reward", "inf", "at step 1 of its episode"),
    ):
        vector.step(np.zeros(1, np.int32))


def test_wrong_uses_are_refused():
    env = envs.host_environment("Script", host_cases.Script)
    with raises("start-needs-at-least-one", "Script"):
        env.start([], seed=0)
    vector = env.start(range(2), seed=0)
    with raises("step-was-called-before-reset", "Script"):
        vector.step(np.zeros(2, np.int32))
    vector.reset()
    with raises("actions-have-shape-actions-have", "(3,)", "2", "Discrete(4)", "(2,)"):
        vector.step(np.zeros(3, np.int32))

    class Talking(host_cases.Script):
        observation_space = spaces.Text(3)

    with raises("space-has-no-fixed-shape"):
        envs.host_environment("Talking", Talking)

    class Stillborn(host_cases.Script):
        def reset(self, *, seed=None, options=None):
            raise OSError("no licence")

    with raises("raised-at", "Stillborn", "reset", "OSError: no licence", "raise OSError"):
        envs.host_environment("Stillborn", Stillborn)


class Counting(gymnasium.Env):
    """Gives the numbers of a list, one after the other."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, numbers):
        self.observation_space, self.numbers = space, list(numbers)

    def reset(self, *, seed=None, options=None):
        return self.numbers.pop(0), {}

    def step(self, action):
        return self.numbers.pop(0), 0.0, False, False, {}


LONG = spaces.Box(0, 2**40, (1,), np.int64)


@pytest.mark.parametrize(
    ("space", "numbers", "message"),
    [
        (
            LONG,
            [np.array([5]), np.array([2**32 + 6])],
            ("observation-cannot-be-kept-as", "in its step:", "4294967302"),
        ),
        (
            LONG,
            [np.array([2**32 + 5])],
            ("observation-cannot-be-kept-as", "environment 3, whose seed is", ", in its reset:", "4294967301"),
        ),
        (LONG, [[2**70]], ("observation-cannot-be-kept-as", "1180591620717411303424", "int32")),
        (
            spaces.Box(0, 2**32 - 1, (1,), np.uint64),
            [np.array([2**33], np.uint64)],
            ("observation-cannot-be-kept-as", "8589934592", "uint32"),
        ),
        (
            spaces.Box(0, 255, (2,), np.uint8),
            [np.array([0, 256])],
            ("observation-cannot-be-kept-as", "256", "uint8", "0", "255"),
        ),
        (spaces.Box(-9, 9, (1,), np.int32), [np.array([0.5])], ("observation-cannot-be-kept-as", "0.5", "int32")),
        (spaces.Discrete(2**40), [np.int64(2**33)], ("observation-cannot-be-kept-as", "8589934592")),
        (spaces.Discrete(2**40), [2**33], ("observation-cannot-be-kept-as", "8589934592")),
        (
            spaces.Dict({"a": LONG}),
            [{"a": np.array([-(2**31) - 1])}],
            ("observation-cannot-be-kept-as", "-2147483649"),
        ),
    ],
)
def test_whole_numbers_never_become_others(space, numbers, message):
    env = envs.host_environment("Counting", lambda: Counting(space, numbers))
    vector = env.start([3], seed=0)
    with raises(*message):
        vector.reset()
        vector.step(np.zeros(1, np.int32))
    vector.close()


def test_whole_numbers_that_fit_are_kept():
    given = [np.array([2**31 - 1]), np.array([0.0]), [7]]
    vector = envs.host_environment("Counting", lambda: Counting(LONG, given)).start([0], seed=0)
    seen = [vector.reset().observation, *(vector.step(np.zeros(1, np.int32)).observation for _ in range(2))]
    assert [int(observation[0, 0]) for observation in seen] == [2**31 - 1, 0, 7]
    vector.close()


def test_batches_of_other_environments_are_checked_too():
    target = np.zeros((2, 1), np.int32)
    copy_batch(LONG, np.array([[7], [2**31 - 1]]), target)
    assert target.ravel().tolist() == [7, 2**31 - 1]
    with raises("observation-cannot-be-kept-as", "2147483648"):
        copy_batch(LONG, np.array([[7], [2**31]]), target)


def test_bounds_beyond_32_bits_contain_what_lies_within():
    """A bound of 2^40 is no bound of what is kept; wrapped around it would be 0."""
    assert bool(contains(LONG, jnp.array([7]))) and not bool(contains(LONG, jnp.array([-1])))
    envs.check_environment(
        envs.host_environment("Counting", lambda: Counting(LONG, np.arange(1000).reshape(-1, 1))), num_steps=20
    )
