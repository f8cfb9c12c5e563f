"""Vector environments of Gymnasium, beside the same environments one by one, by value."""

import inspect

import gymnasium
import host_cases
import jax
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

import rollmill
from rollmill import envs
from rollmill.core.errors import ContractError, NonFiniteError, UsageError
from rollmill.envs.host import EVALUATION
from wordings import raises

LIMIT = 4
MODES = list(AutoresetMode)


class Counter(gymnasium.Env):
    """Observes [steps of the episode, episodes so far]; terminates after `LIMIT` steps, action 3 truncates."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(4)

    def __init__(self):
        self.count, self.episodes = 0, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.episodes = (options or {}).get("start", 0), self.episodes + 1
        return self.observe(), self.info()

    def step(self, action):
        self.count += 1
        return self.observe(), self.count + 0.5 * action, self.count >= LIMIT, action == 3, self.info()

    def observe(self):
        return np.array([self.count, self.episodes], np.float64)

    def info(self):
        return {"action_mask": np.arange(4) != self.count % 4}


class Simulator(VectorEnv):
    """`Counter` for a batch, in arrays that it reuses; `flaws` are what it does wrong."""

    single_observation_space, single_action_space = Counter.observation_space, Counter.action_space

    def __init__(self, num_envs, mode=AutoresetMode.DISABLED, flaws=()):
        self.num_envs, self.mode, self.flaws = num_envs, mode, flaws
        self.metadata = {} if "mode" in flaws else {"autoreset_mode": mode}
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.observations, self.done = np.zeros((num_envs, 2)), np.zeros(num_envs, bool)
        self.observations[:, 1] = -1

    def reset(self, *, seed=None, options=None):
        options = dict(options or {})
        rows = options.pop("reset_mask", np.ones(self.num_envs, bool))
        self.begin(np.ones_like(rows) if "mask" in self.flaws else rows, **options)
        return self.observations, self.info()

    def begin(self, rows, start=0):
        self.observations[rows, 0], self.done[rows] = start, False
        self.observations[rows, 1] += 1

    def step(self, actions):
        if "raises" in self.flaws and self.observations[0, 0] == 2:
            raise RuntimeError("the device is gone")
        assert not self.done.any(), "NEXT_STEP and DISABLED: rows have to be reset first"
        self.observations[:, 0] += 1
        count, info = self.observations[:, 0], self.info()
        reward, terminated, truncated = count + 0.5 * actions, count >= LIMIT, actions == 3
        self.done = terminated | truncated
        if self.mode is AutoresetMode.SAME_STEP and self.done.any():
            final = {"final_obs": self.observations.copy(), "final_info": info}
            self.begin(self.done.copy())
            info = self.info() | ({} if "final" in self.flaws else final)
        if "nan" in self.flaws and count[1] == 2:
            self.observations[1, 1] = np.nan
        if "text" in self.flaws:
            truncated = truncated.astype(str)
        return self.observations, reward[:, None] if "shape" in self.flaws else reward, terminated, truncated, info

    def info(self):
        return {"action_mask": np.arange(4) != self.observations[:, :1] % 4}


class Parts(host_cases.Parts):
    """Ends every third step."""

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, len(self.given) % 3 == 0, False, info


def steps_of(env, indices=(4, 5, 6), *, count=30):
    """The first steps of some copies under the same random actions."""
    vector = env.start(indices, seed=3, gamma=0.9)
    actions = batch_space(env.action_space, len(indices))
    actions.seed(0)
    steps = [vector.reset()]
    for _ in range(count):
        steps.append(vector.step(actions.sample()))
    assert vector.seeds == env.start(indices, seed=3).seeds and vector.num_envs == 3
    vector.close()
    return steps


def assert_same(ours, theirs):
    for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for path, leaf in jax.tree.leaves_with_path(one):
            expected = dict(jax.tree.leaves_with_path(other))[path]
            np.testing.assert_array_equal(leaf, expected, err_msg=f"step {n}: {jax.tree_util.keystr(path)}")


def synchronous(kind, mode, vector=SyncVectorEnv):
    return lambda num_envs: vector([kind] * num_envs, autoreset_mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_an_own_simulator_steps_as_its_environment_does_one_by_one(mode):
    single = rollmill.from_gymnasium(Counter)
    ours = steps_of(rollmill.from_gymnasium(lambda num_envs: Simulator(num_envs, mode)))
    assert_same(ours, steps_of(single))
    ends = np.array([step.terminated for step in ours]), np.array([step.truncated for step in ours])
    assert ends[0].sum() > 5 and ends[1].sum() > 5 and "final_action_mask" in ours[0].info


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Counter, host_cases.Masked, host_cases.Script, Parts])
def test_vector_environments_of_gymnasium_step_as_their_environments_do(kind, mode):
    """With the same seeds: `Script` and `Masked` observe draws of their generators."""
    assert_same(
        steps_of(rollmill.from_gymnasium(synchronous(kind, mode))), steps_of(rollmill.from_gymnasium(kind))
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_vector_environments_in_processes_do_too(mode):
    env = rollmill.from_gymnasium(synchronous(Counter, mode, AsyncVectorEnv))
    assert_same(steps_of(env), steps_of(rollmill.from_gymnasium(Counter)))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_ids_are_stepped_as_vector_environments(mode):
    env = rollmill.make("gymnasium:CartPole-v1", vectorization_mode="sync", autoreset_mode=mode)
    assert_same(steps_of(env), steps_of(rollmill.make("gymnasium:CartPole-v1")))


def test_what_make_vec_returns_stands_for_its_id_and_options():
    kwargs = {"autoreset_mode": AutoresetMode.SAME_STEP}
    made = gymnasium.make_vec("CartPole-v1", 2, "sync", kwargs, sutton_barto_reward=True)
    env = inspect.unwrap(envs.as_environment)(made)
    assert env.options == {"vectorization_mode": "sync", "autoreset_mode": "SameStep", "sutton_barto_reward": True}
    assert_same(steps_of(env), steps_of(rollmill.make("gymnasium:CartPole-v1", sutton_barto_reward=True)))


def test_the_class_of_a_simulator_is_enough_and_generations_have_their_own_seeds():
    env = rollmill.from_gymnasium(Simulator)
    assert env.name == "Simulator" and env.has_action_mask
    seeds = [env.start([0, 1], seed=3, generation=generation).seeds for generation in (0, 1, EVALUATION)]
    assert len({*map(tuple, seeds)}) == 3 and all(second == first + 1 for first, second in seeds)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda n: Simulator(n, AutoresetMode.NEXT_STEP, ["mask"]),
            r"of row 1, which.*NEXT_STEP, .*SAME_STEP, with",
        ),
        (
            lambda n: Simulator(n, AutoresetMode.DISABLED, ["mask"]),
            r"of row 1, which.*DISABLED, a row",
        ),
        (
            lambda n: gymnasium.make_vec("CartPole-v1", n),
            r"of row 1.*Gymnasium's own environments support both: gymnasium:ID",
        ),
        (
            lambda n: Simulator(n, flaws=["mode"]),
            r"autoreset_mode=None, expected one of .*NEXT_STEP, AutoresetMode",
        ),
        (lambda n: Simulator(8), r"with num_envs=2, the function returned 8 environments"),
        (lambda n: Counter(), r"returned a Counter, expected a gymnasium VectorEnv.*takes no arguments"),
        (lambda: Simulator(8), r"returned a gymnasium VectorEnv \(pass a function of num_envs"),
        (Simulator(2), r"Simulator cannot be created again.*function of num_envs"),
        (
            lambda n: gymnasium.wrappers.vector.NormalizeReward(Simulator(n)),
            r"contains Gymnasium's NormalizeReward",
        ),
        (
            synchronous(lambda: gymnasium.wrappers.NormalizeReward(Counter()), MODES[0]),
            "Gymnasium's NormalizeReward",
        ),
    ],
    ids=["next step", "disabled", "cartpole", "mode", "eight", "single", "no size", "object", "wrapper", "inside"],
)
def test_what_cannot_be_learned_from_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        inspect.unwrap(rollmill.from_gymnasium)(make)


@pytest.mark.parametrize(
    ("flaw", "mode", "error", "message"),
    [
        ("final", "SAME_STEP", ContractError, ("episode-environment-ended-and-infos", "4")),
        ("shape", "DISABLED", ContractError, ("step-returned-shape-expected", "rewards", "(3, 1)", "3")),
        ("text", "DISABLED", ContractError, ("step-returned-expected", "truncations ['False'", "booleans")),
        (
            "raises",
            "DISABLED",
            ContractError,
            ("raised-at", "step of 3 environments", "RuntimeError: the device is gone"),
        ),
        (
            "nan",
            "DISABLED",
            NonFiniteError,
            ("environment-gave-seed-is-hint", "5", "observation[1]", "nan", "at step 2 of"),
        ),
    ],
)
def test_what_goes_wrong_in_a_step_is_named(flaw, mode, error, message):
    vector = rollmill.from_gymnasium(lambda n: Simulator(n, AutoresetMode[mode], [flaw])).start([4, 5, 6], seed=0)
    vector.reset()
    with raises(*message):
        for _ in range(LIMIT):
            vector.step(np.zeros(3, np.int64))


@pytest.mark.parametrize("mode", MODES)
def test_masks_that_do_not_fit_are_refused(mode):
    masks = lambda info: type("Masks", (Simulator,), {"info": info})
    short = masks(lambda self: {"action_mask": np.ones((self.num_envs, 3), bool)})
    with raises("has-one-number-for-each", "(2, 3)", "(2, 4)"):
        rollmill.from_gymnasium(lambda n: short(n, mode))
    late = masks(lambda self: Simulator.info(self) if self.observations[0, 0] else {})
    vector = rollmill.from_gymnasium(lambda n: late(n, mode)).start([0], seed=0)
    vector.reset()
    with pytest.raises(ContractError, match="which was missing from the first reset"):
        vector.step(np.zeros(1, np.int64))


def test_transforms_of_a_simulator_are_refused():
    with raises("transform-is-for-environments-jax", "reward-scale:2"):
        rollmill.from_gymnasium(Simulator, transforms=["reward-scale:2"])


# --- options of resets --------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [Counter, Simulator, lambda n: Simulator(n, AutoresetMode.NEXT_STEP)])
def test_options_are_those_of_every_reset(source):
    """An episode that begins at 2 ends after two steps."""
    vector = rollmill.from_gymnasium(source, reset_options={"start": 2}).start([0, 1], seed=0)
    seen = [vector.reset(), *(vector.step(np.zeros(2, np.int64)) for _ in range(4))]
    assert [step.observation[0].tolist() for step in seen] == [[2, 0], [3, 0], [2, 1], [3, 1], [2, 2]]
    assert [bool(step.terminated[0]) for step in seen] == [False, False, True, False, True]


def test_options_of_an_id_are_kept_with_the_run():
    env = rollmill.make("gymnasium:CartPole-v1", reset_options={"low": 0.01, "high": 0.01})
    assert env.options == {"reset_options": {"low": 0.01, "high": 0.01}}
    np.testing.assert_array_equal(env.start([0], seed=0).reset().observation, np.full((1, 4), 0.01, np.float32))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (3, UsageError, ("reset-options-has-to-be", "3")),
        ({1: 2}, UsageError, ("reset-options-has-to-be", "{1: 2}")),
        ({"reset_mask": [1]}, UsageError, ("reset-options-cannot-hold-reset",)),
        ({"low": "x"}, ContractError, ("raised-at", "reset with the options {'low': 'x'}", "ValueError")),
    ],
)
def test_options_that_cannot_be_given_are_refused(options, error, message):
    with raises(*message):
        rollmill.make("gymnasium:CartPole-v1", reset_options=options)


# --- statistics of each copy --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        (gymnasium.wrappers.NormalizeObservation, "NormalizeObservation: .*hint: .*--normalize-observations"),
        (gymnasium.wrappers.NormalizeReward, "NormalizeReward: .*sums of scaled rewards.*--normalize-rewards"),
    ],
)
def test_wrappers_with_statistics_of_each_copy_are_refused(wrapper, message):
    def wrapped():
        return gymnasium.wrappers.TimeLimit(wrapper(gymnasium.make("CartPole-v1")), 10)

    with pytest.raises(UsageError, match=f"wrapped contains Gymnasium's {message}"):
        rollmill.from_gymnasium(wrapped)


def test_wrappers_with_fixed_statistics_are_not():
    def wrapped():
        env = gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1"))
        env.update_running_mean = False
        return env

    assert rollmill.from_gymnasium(wrapped).name == "wrapped"
