"""Atari games: frames, lives, rewards, evaluation on whole games."""

import jax
import numpy as np
import pytest

import rollmill
from rollmill import envs
from rollmill.core.errors import UsageError
from rollmill.core.types import HasEvaluationForm
from rollmill.envs import check_environment

ale_py = pytest.importorskip("ale_py", reason="pip install 'rollmill[ale]'")
PLAIN = {"noop_max": 0, "use_fire_reset": False}


def played(env, actions, *, count=2, seed=0, start=None):
    """Steps of environments that all take the same actions; each is copied."""
    vector = (start or env.start)(range(count), seed=seed)
    copied = lambda step: jax.tree.map(np.copy, step)
    steps = [copied(vector.reset()), *(copied(vector.step(np.full(count, action))) for action in actions)]
    vector.close()
    return steps


def firing(count):
    """Actions of Breakout that lose its lives: serving again and again."""
    return [1 if number % 3 == 0 else 0 for number in range(count)]


# --- frames -------------------------------------------------------------------------------------------


def area(size, pixels):
    """Weights `[pixels, size]` of a mean over areas."""
    edges = np.linspace(0, size, pixels + 1)
    low = np.maximum(edges[:-1, None], np.arange(size)[None])
    high = np.minimum(edges[1:, None], np.arange(size)[None] + 1)
    return np.maximum(high - low, 0) * pixels / size


def test_frames_are_those_of_the_emulator():
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", 1)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(ale_py.roms.get_rom_path("pong"))
    rows, columns = area(210, 84), area(160, 84)
    steps = played(envs.make("ale:Pong", **PLAIN), [0, 2, 2, 3, 0, 3, 3, 3, 2, 2])
    actions = ale.getMinimalActionSet()
    for step, action in zip(steps[1:], [0, 2, 2, 3, 0, 3, 3, 3, 2, 2], strict=True):
        screens = []
        for _ in range(4):
            ale.act(actions[action])
            screens.append(ale.getScreenGrayscale().astype(np.float64))
        expected = rows @ np.maximum(screens[-1], screens[-2]) @ columns.T
        newest = step.observation[0, -1]
        assert newest.shape == (84, 84) and np.abs(newest - expected).max() <= 1.5
    assert len(np.unique(newest)) > 3


def test_four_frames_are_stacked_the_newest_last():
    steps = played(envs.make("ale:Pong", **PLAIN), [2, 2, 3, 3, 2, 3])
    for before, after in zip(steps, steps[1:], strict=False):
        np.testing.assert_array_equal(after.observation[:, :-1], before.observation[:, 1:])
    assert not np.array_equal(steps[-1].observation[:, -1], steps[-2].observation[:, -1])


def test_seeds_differ_between_environments_and_repeat():
    env = envs.make("ale:Pong")
    one, again, other = (played(env, [0] * 40, seed=seed) for seed in (0, 0, 1))
    frames = lambda steps: np.stack([step.observation for step in steps])
    np.testing.assert_array_equal(frames(one), frames(again))
    assert not np.array_equal(frames(one), frames(other))


@pytest.mark.parametrize(
    ("options", "shape"),
    [({}, (4, 84, 84)), ({"grayscale": False, "stack_num": 2}, (2, 84, 84, 3)), ({"img_height": 40}, (4, 40, 84))],
)
def test_observations_have_the_shape_of_their_space(options, shape):
    env = envs.make("ale:Breakout", **options)
    assert env.observation_space.shape == shape
    assert played(env, [1])[-1].observation.shape == (2, *shape)


def test_names_and_actions():
    assert envs.make("ale:MsPacman").action_space.n == envs.make("ale:ms_pacman").action_space.n == 9
    assert envs.make("ale:ALE/Pong-v5").action_space.n == 6
    assert envs.make("ale:Pong", full_action_space=True).action_space.n == 18


# --- episodes -----------------------------------------------------------------------------------------


def test_a_lost_life_ends_an_episode_of_training_and_the_game_goes_on():
    env = envs.make("ale:Breakout")
    steps = played(env, firing(140), count=1)
    ends = [number for number, step in enumerate(steps) if step.terminated[0]]
    assert len(ends) >= 5
    same = [np.array_equal(steps[n].observation, steps[n].info["final_observation"]) for n in ends[:5]]
    assert same == [True] * 4 + [False]  # the fifth life was the last: a new game
    for before, end in ((steps[n - 1], steps[n]) for n in ends[:5]):
        np.testing.assert_array_equal(end.info["final_observation"][:, :-1], before.observation[:, 1:])
    lengths = np.diff([0, *ends])
    assert [int(steps[n].info["episode_length"][0]) for n in ends] == lengths.tolist()


def test_evaluations_play_whole_games_and_count_all_points():
    env = envs.make("ale:Breakout")
    assert isinstance(env.start, HasEvaluationForm)
    steps = played(env, firing(140), count=1, start=env.start.for_evaluation)
    ends = [number for number, step in enumerate(steps) if step.terminated[0]]
    assert len(ends) == 1 and ends[0] > 90
    lives = played(env, firing(140), count=1)
    clipped = sum(float(step.reward[0]) for step in lives[1 : ends[0] + 1])
    assert steps[ends[0]].info["episode_return"][0] >= clipped


@pytest.mark.slow
def test_rewards_are_clipped_in_training_alone():
    env = envs.make("ale:Seaquest", episodic_life=False)
    rng = np.random.default_rng(0)
    actions = rng.integers(0, env.action_space.n, 400).tolist()
    training = played(env, actions, count=1)
    whole = played(env, actions, count=1, start=env.start.for_evaluation)
    unclipped = played(envs.make("ale:Seaquest", reward_clipping=False, episodic_life=False), actions, count=1)
    rewards = lambda steps: np.array([step.reward[0] for step in steps])
    np.testing.assert_array_equal(rewards(whole), rewards(unclipped))
    np.testing.assert_array_equal(rewards(training), np.clip(rewards(whole), -1, 1))
    assert rewards(whole).max() >= 20


def test_the_limit_of_frames_truncates():
    steps = played(envs.make("ale:Pong", max_num_frames_per_episode=80, **PLAIN), [0] * 20, count=1)
    assert [bool(step.truncated[0]) for step in steps].index(True) == 20
    assert not any(step.terminated[0] for step in steps)


def test_games_keep_the_contract():
    check_environment("ale:Breakout")


# --- trainings ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_evaluations_of_a_training_are_those_of_whole_games(tmp_path):
    network = rollmill.NetworkConfig(torso="cnn", hidden_sizes=(8,), convolutions=((4, 8, 8),), shared_torso=True)
    env = envs.make("ale:Breakout", max_num_frames_per_episode=1200)  # a policy may never serve
    algorithm = rollmill.ppo(env, num_envs=2, num_steps=16, num_minibatches=1, total_timesteps=64, network=network)
    run = rollmill.train(algorithm, run_dir=tmp_path / "run", quiet=True, tensorboard=False)
    found = rollmill.evaluate(run.directory, episodes=2)
    assert found.lengths.min() > 60  # five lives; one takes about 25 steps


# --- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Pongg", {}, "unknown Atari game 'Pongg'. Did you mean Pong"),
        ("Pong", {"frame_skip": 2}, "ale:Pong has no option 'frame_skip'. Did you mean frameskip"),
        (
            "Pong",
            {"frameskip": 0},
            "ale:Pong: frameskip=0 must be an integer of at least 1",
        ),
        ("Pong", {"noop_max": -1}, "noop_max=-1 must be an integer of at least 0"),
        ("Pong", {"grayscale": 3}, "grayscale=3 must be true or false"),
        (
            "Pong",
            {"repeat_action_probability": 1.5},
            "=1.5 must be a number between 0 and 1",
        ),
    ],
)
def test_mistakes_name_the_value_and_the_way_out(name, options, message):
    with pytest.raises(UsageError) as raised:
        envs.make(f"ale:{name}", **options)
    assert message in str(raised.value)
