"""Transforms by value, on one probe that is made twice: of JAX functions, and as a Python object."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill import envs
from rollmill.core.types import Environment, Timestep
from rollmill.dataflow import fingerprint
from rollmill.envs.named_transforms import parse_transforms
from rollmill.fusion import lower_gradients, lower_rollout
from rollmill.runs.specification import describe, rebuild_graph
from wordings import raises

END, CUT = 7, 5
"""Steps after which an episode of the probe terminates, and after which it is truncated if its actions say so."""
IMAGE = np.random.default_rng(0).integers(0, 256, (10, 12, 3), np.uint8)


def vector(xp, count, action):
    return xp.stack([xp.asarray(count, np.float32), xp.asarray(action, np.float32)])


def image(xp, count, action):
    return (xp.asarray(IMAGE) // 2 + xp.asarray(count, np.uint8)).astype(np.uint8)


def parts(xp, count, action):
    return {
        "when": xp.asarray(count % 3 + 1, np.int32),
        "pair": (xp.asarray([count % 2, 1], np.int32), xp.asarray(count, np.float32)),
    }


KINDS = {
    "vector": (vector, spaces.Box(-1.0, 10.0, (2,), np.float32)),
    "image": (image, spaces.Box(0, 255, IMAGE.shape, np.uint8)),
    "float image": (
        lambda xp, count, action: image(xp, count, action).astype(np.float32) / np.float32(255),
        spaces.Box(0.0, 1.0, IMAGE.shape, np.float32),
    ),
    "planes": (
        lambda xp, count, action: xp.moveaxis(image(xp, count, action), 2, 0),
        spaces.Box(0, 255, (3, 10, 12), np.uint8),
    ),
    "category": (lambda xp, count, action: xp.asarray(count % 4 + 2, np.int32), spaces.Discrete(4, start=2)),
    "parts": (
        parts,
        spaces.Dict(
            {
                "when": spaces.Discrete(3, start=1),
                "pair": spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.Box(-1.0, 9.0, (), np.float32))),
            }
        ),
    ),
}
CHOICES = spaces.Discrete(10)
ARMS = spaces.Box(np.float32([-2.0, 1.0]), np.float32([2.0, 4.0]), dtype=np.float32)


def compiled(kind="vector", actions=CHOICES, **fields):
    observe, space = KINDS[kind]

    def reset(key, params):
        return observe(jnp, jnp.int32(0), jnp.int32(-1)), jnp.int32(0)

    def step(key, count, action, params):
        count = count + 1
        shown = action if actions is CHOICES else action[0]
        reward = 1.5 * count.astype(jnp.float32) + jnp.asarray(shown, jnp.float32)
        ends = (count >= END, (count == CUT) & (shown > 8))
        return Timestep(observe(jnp, count, shown), count, reward, *ends, {})

    return Environment("Twice", reset, step, space, actions, **fields)


class Twin(gymnasium.Env):
    """The same probe as a Python object."""

    def __init__(self, kind="vector", actions=CHOICES):
        self.observe, self.observation_space = KINDS[kind]
        self.action_space, self.count = actions, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observe(np, 0, -1), {}

    def step(self, action):
        self.count += 1
        shown = action if self.action_space is CHOICES else action[0]
        reward = 1.5 * self.count + float(shown)
        return self.observe(np, self.count, shown), reward, self.count >= END, self.count == CUT and shown > 8, {}


def on_host(kind="vector", actions=CHOICES):
    return envs.host_environment("Twin", lambda: Twin(kind, actions))


def run_compiled(env, actions):
    env = envs.auto_reset(env)

    def step(state, given):
        key, action = given
        timestep = env.step(key, state, action, env.params)
        return timestep.state, timestep._replace(state=None)

    first, state = env.reset(jax.random.key(0), env.params)
    keys = jax.random.split(jax.random.key(1), len(actions))
    return first, jax.jit(lambda: jax.lax.scan(step, state, (keys, jnp.asarray(actions)))[1])()


def run_on_host(env, actions):
    started = env.start([0], seed=0)
    first = jax.tree.map(lambda leaf: leaf[0].copy(), started.reset().observation)
    steps = [jax.tree.map(lambda leaf: np.array(leaf[0]), started.step(action[None])) for action in actions]
    started.close()
    return first, jax.tree.map(lambda *leaves: np.stack(leaves), *steps)


def both(*names, kind="vector", space=CHOICES, actions=None):
    """The results of both variants, compared with each other; those of JAX are returned."""
    actions = draw_actions() if actions is None else actions
    made = rollmill.transform(compiled(kind, space), *names), rollmill.transform(on_host(kind, space), *names)
    assert made[0].observation_space == made[1].observation_space
    assert made[0].action_space == made[1].action_space
    (first, steps), (first_there, there) = run_compiled(made[0], actions), run_on_host(made[1], actions)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, first, first_there)
    for name in ("observation", "reward", "terminated", "truncated"):
        jax.tree.map(close, getattr(steps, name), getattr(there, name))
    jax.tree.map(close, steps.info["final_observation"], there.info["final_observation"])
    for observation in (first, jax.tree.map(lambda leaf: leaf[-1], steps.observation)):
        assert made[0].observation_space.contains(jax.tree.map(np.asarray, observation))
    return made[0], first, steps


def draw_actions(steps=40):
    return np.random.default_rng(3).integers(0, 10, steps, np.int32)


def test_rewards_are_scaled_and_clipped_in_the_order_given():
    plain = both()[2].reward
    np.testing.assert_allclose(both("reward-scale:0.5", "reward-clip:2")[2].reward, np.clip(plain * 0.5, -2, 2))
    np.testing.assert_allclose(both("reward-clip:2", "reward-scale:0.5")[2].reward, np.clip(plain, -2, 2) * 0.5)
    np.testing.assert_allclose(both("reward-clip:-1,3.5")[2].reward, np.clip(plain, -1, 3.5))


def test_frames_are_stacked_and_begin_anew_with_each_episode():
    env, first, steps = both("frame-stack:3", actions=np.int32([0] * 9))
    assert env.observation_space.shape == (3, 2)
    np.testing.assert_array_equal(first[:, 0], [0, 0, 0])
    np.testing.assert_array_equal(steps.observation[:3, :, 0], [[0, 0, 1], [0, 1, 2], [1, 2, 3]])
    np.testing.assert_array_equal(steps.info["final_observation"][6, :, 0], [5, 6, 7])
    assert steps.terminated[6]
    np.testing.assert_array_equal(steps.observation[6:9, :, 0], [[0, 0, 0], [0, 0, 1], [0, 1, 2]])
    np.testing.assert_array_equal(steps.observation[6, :, 1], [-1, -1, -1])


def test_frames_of_images_are_joined_along_their_channels():
    env, first, _ = both("frame-stack:2", kind="image")
    assert env.observation_space.shape == (10, 12, 6) and env.observation_space.dtype == np.uint8
    np.testing.assert_array_equal(first, np.concatenate([IMAGE // 2] * 2, axis=2))
    assert both("frame-stack:2", kind="planes")[0].observation_space.shape == (6, 10, 12)
    assert both("grey", "frame-stack:4", kind="image")[0].observation_space.shape == (4, 10, 12)


@pytest.mark.parametrize("kind", ["image", "planes", "float image"])
def test_brightness_weighs_the_colours(kind):
    env, first, _ = both("grey", kind=kind)
    scale = 255 if kind == "float image" else 1
    expected = (IMAGE // 2) @ np.array([0.299, 0.587, 0.114]) / scale
    assert env.observation_space.shape == (10, 12) and first.dtype == env.observation_space.dtype
    np.testing.assert_allclose(first, expected, atol=1.2 / scale)


@pytest.mark.parametrize("kind", ["image", "planes", "float image"])
def test_resized_pixels_are_means_of_areas(kind):
    env, first, _ = both("resize:5x3", kind=kind)
    scale = 255 if kind == "float image" else 1
    expected = (IMAGE // 2).reshape(5, 2, 3, 4, 3).mean(axis=(1, 3)) / scale
    expected = np.moveaxis(expected, 2, 0) if kind == "planes" else expected
    assert env.observation_space.shape == expected.shape
    np.testing.assert_allclose(first, expected, atol=0.51 if scale == 1 else 1e-6)
    assert both("grey", "resize:7", kind=kind)[0].observation_space.shape == (7, 7)


def test_a_pixel_over_parts_of_others_takes_its_share_of_each():
    _, first, _ = both("grey", "resize:4x12", kind="float image")
    grey = both("grey", kind="float image")[1]
    np.testing.assert_allclose(first[0], (grey[0] + grey[1] + 0.5 * grey[2]) / 2.5, rtol=1e-5)


def test_an_action_is_repeated_until_the_episode_ends_and_rewards_are_summed():
    env, _, steps = both("action-repeat:3", actions=np.int32([0, 0, 0, 9, 9]))
    np.testing.assert_array_equal(steps.info["final_observation"][:, 0], [3, 6, 7, 3, 5])
    np.testing.assert_array_equal(steps.terminated, [False, False, True, False, False])
    np.testing.assert_array_equal(steps.truncated, [False, False, False, False, True])
    np.testing.assert_allclose(steps.reward, [1.5 * 6, 1.5 * 15, 1.5 * 7, 1.5 * 6 + 27, 1.5 * 9 + 18])
    np.testing.assert_array_equal(steps.observation[:, 0], [3, 6, 0, 3, 0])


def test_repeats_and_stacks_go_in_the_order_given():
    _, _, inner = both("frame-stack:2", "action-repeat:2", actions=np.int32([0, 0]))
    np.testing.assert_array_equal(inner.observation[:, :, 0], [[1, 2], [3, 4]])
    _, _, outer = both("action-repeat:2", "frame-stack:2", actions=np.int32([0, 0]))
    np.testing.assert_array_equal(outer.observation[:, :, 0], [[0, 2], [2, 4]])


@pytest.mark.parametrize("run", [run_compiled, run_on_host])
def test_sticky_actions_repeat_the_one_before_but_not_that_of_another_episode(run):
    env = compiled() if run is run_compiled else on_host()
    actions = draw_actions(3000)
    _, steps = run(rollmill.transform(env, "sticky-actions:0.3"), actions)
    taken = np.asarray(steps.info["final_observation"])[:, 1].astype(int)
    begins = np.asarray(steps.info["final_observation"])[:, 0] == 1
    np.testing.assert_array_equal(taken[begins], actions[begins])
    before = np.roll(taken, 1)
    assert begins.sum() > 100 and np.all((taken == actions) | (taken == before))
    told_apart = ~begins & (actions != before)
    assert np.mean(taken[told_apart] == before[told_apart]) == pytest.approx(0.3, abs=0.04)


def test_two_sticky_transforms_draw_numbers_of_their_own():
    env = rollmill.transform(compiled(), "sticky-actions:0.5", "sticky-actions:0.5")
    _, steps = run_compiled(env, draw_actions(2000))
    kept = np.asarray(steps.info["final_observation"])[:, 1] == draw_actions(2000)
    assert np.mean(kept) == pytest.approx(0.25 + 0.1 + 0.1, abs=0.12) and np.mean(kept) < 0.5


def test_elements_of_a_vector_are_kept_in_the_order_given():
    plain, (env, first, steps) = both()[2].observation, both("keep:1,0")
    np.testing.assert_array_equal(steps.observation, plain[:, ::-1])
    np.testing.assert_array_equal(first, [-1, 0])
    env, _, steps = both("keep:1")
    np.testing.assert_array_equal(steps.observation, plain[:, 1:])
    assert env.observation_space == spaces.Box(-1.0, 10.0, (1,), np.float32)


def test_actions_are_rescaled_to_the_bounds():
    actions = np.float32([[-1, -1], [0, 0], [1, 1], [0.5, 3.0]])
    env, _, steps = both("rescale-actions", space=ARMS, actions=actions)
    assert env.action_space == spaces.Box(-1.0, 1.0, (2,), np.float32)
    np.testing.assert_allclose(steps.observation[:, 1], [-2, 0, 2, 1])


def test_categories_become_vectors():
    env, first, steps = both("one-hot", kind="category")
    assert env.observation_space == spaces.Box(0.0, 1.0, (4,), np.float32)
    np.testing.assert_array_equal(first, [1, 0, 0, 0])
    np.testing.assert_array_equal(steps.observation[0], [0, 1, 0, 0])


def test_parts_become_one_vector():
    env, first, steps = both("flatten", kind="parts")
    np.testing.assert_array_equal(first, [1, 0, 0, 1, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(steps.observation[0], [0, 1, 0, 1, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(env.observation_space.high, [1, 1, 1, 1, 1, 9, 1, 1, 1])
    assert both("flatten", kind="image")[0].observation_space == spaces.Box(0, 255, (360,), np.uint8)


def test_time_is_that_of_the_episode():
    env, first, steps = both("time:4", actions=np.int32([0] * 8))
    assert first[-1] == 0 and env.observation_space.high[-1] == 1
    np.testing.assert_allclose(steps.observation[:, 2], [0.25, 0.5, 0.75, 1, 1, 1, 0, 0.25])


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("vector", ["frame-stack:2", "reward-scale:0.1", "sticky-actions:0.5", "flatten", "time:9"]),
        ("image", ["grey", "resize:6", "frame-stack:3", "reward-clip:1", "action-repeat:2"]),
        ("category", ["one-hot", "time:5", "frame-stack:2"]),
    ],
)
@pytest.mark.slow_beyond(1)
def test_transformed_environments_keep_the_contract(kind, names, capsys):
    for env in (compiled(kind), on_host(kind)):
        rollmill.check_environment(rollmill.transform(env, *names))
    assert capsys.readouterr().out.count("passed all checks") == 2


def test_cartpole_is_the_same_on_both_sides():
    """Physics agree to rounding; what the transforms do with them does too."""
    env = rollmill.make("CartPole-v1", transforms=["action-repeat:2", "frame-stack:2", "reward-scale:0.5"])
    there = rollmill.make(
        "gymnasium:CartPole-v1", transforms=["action-repeat:2", "frame-stack:2", "reward-scale:0.5"]
    )
    observation, state = env.reset(jax.random.key(3), env.params)
    single = there.start.start.make()
    single.reset(seed=0)
    single.unwrapped.state = np.asarray(observation[0], np.float64)
    single.env._memory = np.asarray(observation)
    for action in [0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1]:
        timestep = env.step(jax.random.key(0), state, jnp.int32(action), env.params)
        observed, reward, terminated, _, _ = single.step(action)
        np.testing.assert_allclose(timestep.observation, observed, rtol=1e-4, atol=1e-5)
        assert (timestep.reward, bool(timestep.terminated)) == (reward, terminated)
        state = timestep.state
        if terminated:
            break
    assert terminated


@pytest.mark.parametrize(
    "names", [["frame-stack:4", "reward-scale:0.1", "sticky-actions:0.25"], ["action-repeat:4"]]
)
def test_transformed_environments_fuse(names):
    network = rollmill.NetworkConfig(hidden_sizes=(16,))
    sizes = {"num_envs": 8, "num_steps": 8, "total_timesteps": 128, "num_minibatches": 2}
    graph = rollmill.ppo(rollmill.make("CartPole-v1", transforms=names), **sizes, network=network)
    lower_rollout(graph)
    lower_gradients(graph)


@pytest.mark.parametrize("name", ["CartPole-v1", "gymnasium:CartPole-v1"])
@pytest.mark.slow_beyond(1)
def test_transforms_are_recorded_and_made_again(name):
    made = rollmill.transform(rollmill.make(name, transforms=["frame-stack:2"]), "reward-scale: 0.5")
    assert dict(made.options) == {"transforms": ["frame-stack:2", "reward-scale:0.5"]}
    sizes = {"num_envs": 4, "num_steps": 8, "total_timesteps": 64, "num_minibatches": 2}
    described = describe(rollmill.ppo(made, **sizes))
    assert described["custom"] == []
    again = rebuild_graph(described)
    assert fingerprint(again) == described["fingerprint"] and again.observation_space.shape == (2, 4)
    other = rollmill.make(name, transforms=["frame-stack:2", "reward-scale:0.25"])
    assert fingerprint(rollmill.ppo(other, **sizes)) != described["fingerprint"]


def test_a_transformed_environment_without_a_name_is_of_this_process():
    sizes = {"num_envs": 4, "num_steps": 8, "total_timesteps": 64, "num_minibatches": 2}
    limited = rollmill.transform(rollmill.time_limit(rollmill.make("CartPole-v1"), 5), "reward-scale:0.5")
    assert describe(rollmill.ppo(limited, **sizes))["custom"] == ["environment"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("frame-stak:4", ("unknown-setting", "transform", "'frame-stak'", "Did you mean frame-stack")),
        (
            "frame-stack:none",
            (
                "transform-cannot-be-used-hint",
                "'frame-stack:none'",
                "N must be an integer of at least 1",
                "frame-stack:4",
            ),
        ),
        ("frame-stack", ("transform-cannot-be-used-hint", "'frame-stack'")),
        ("reward-scale:nan", ("transform-cannot-be-used-hint", "FACTOR must be a finite number")),
        ("reward-clip:-1", ("transform-cannot-be-used-hint", "LIMIT above 0")),
        ("reward-clip:3,1", ("transform-cannot-be-used-hint", "LOW below HIGH")),
        ("sticky-actions:1", ("transform-cannot-be-used-hint", "between 0 and 1")),
        ("action-repeat:0", ("transform-cannot-be-used-hint", "integer of at least 1")),
        ("flatten:2", ("transform-cannot-be-used-hint", "takes no argument")),
        ("resize:4x4x4", ("transform-cannot-be-used-hint", "SIZE or HEIGHTxWIDTH")),
        ("keep", ("transform-cannot-be-used-hint", "different indices from 0 to 3", "keep:0,2")),
        ("keep:0,4", ("transform-cannot-be-used-hint", "'keep:0,4'", "different indices from 0 to 3")),
        ("keep:1,1", ("transform-cannot-be-used-hint", "'keep:1,1'", "different indices from 0 to 3")),
        ("keep:-1", ("transform-cannot-be-used-hint", "'keep:-1'", "different indices from 0 to 3")),
        ("time:x", ("transform-cannot-be-used-hint", "STEPS must be an integer")),
        ("grey", ("transform-needs-observations-are-box", "grey", "3")),
        ("resize:4", ("transform-needs-observations-are-box", "2 or 3")),
        ("one-hot", ("transform-one-hot-needs-observations",)),
        ("rescale-actions", ("transform-rescale-actions-needs-actions", "Discrete")),
    ],
)
def test_what_does_not_fit_is_refused(name, message):
    for env in ("CartPole-v1", "gymnasium:CartPole-v1"):
        with raises(*message):
            rollmill.make(env, transforms=[name])


def test_spaces_that_have_no_bounds_no_colours_and_no_vector_are_refused():
    unbounded = spaces.Box(-np.inf, 1.0, (2,), np.float32)
    with raises("transform-rescale-actions-needs-bounds"):
        rollmill.transform(compiled(actions=unbounded), "rescale-actions")
    with raises("transform-grey-needs-images-with"):
        rollmill.transform(compiled("image"), "frame-stack:2", "grey")
    with raises("transform-needs-observations-are-box", "put flatten or one-hot before it"):
        rollmill.transform(compiled("category"), "time:4")
    with raises("transform-needs-observations-are-box", "flatten or one-hot first converts it to a vector"):
        rollmill.transform(compiled("parts"), "frame-stack:4")
    with raises("transforms-has-to-be-list"):
        parse_transforms([4])


def test_masks_agents_and_players_are_kept_or_refused():
    masked = compiled(action_mask=lambda state, params: jnp.arange(10) > state)
    stacked = rollmill.transform(masked, "frame-stack:2", "reward-scale:2")
    _, state = stacked.reset(jax.random.key(0), ())
    np.testing.assert_array_equal(stacked.action_mask(state, ()), np.arange(10) > 0)
    for name in ("action-repeat:2", "sticky-actions:0.5"):
        with raises("transform-does-not-fit-tells"):
            rollmill.transform(masked, name)
    tag = rollmill.make("TagGridWorld-Small-v0", transforms=["reward-scale:0.5"])
    plain = rollmill.make("TagGridWorld-Small-v0")
    (_, state), (_, plain_state) = (env.reset(jax.random.key(0), env.params) for env in (tag, plain))
    actions = jax.tree.map(lambda kind: jnp.zeros(kind.shape, jnp.int32), dict(tag.action_space.spaces))
    rewards = tag.step(jax.random.key(1), state, actions, tag.params).reward
    plain_rewards = plain.step(jax.random.key(1), plain_state, actions, plain.params).reward
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 0.5 * b), rewards, plain_rewards)
    with raises("transform-does-not-fit-has-several", "reward-scale and reward-clip"):
        rollmill.make("TagGridWorld-Small-v0", transforms=["frame-stack:2"])
    with raises("transform-does-not-fit-game"):
        rollmill.make("TicTacToe-v0", transforms=["reward-scale:2"])


def test_hosts_other_than_python_objects_are_refused():
    env = rollmill.make("gymnasium:CartPole-v1")
    with raises("transform-is-for-environments-jax"):
        rollmill.transform(env._replace(start=lambda indices, **how: None), "frame-stack:2")
