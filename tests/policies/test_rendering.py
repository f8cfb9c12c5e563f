"""Pictures of policies at play: `rollmill.render` and `rollmill render`."""

import os

import gymnasium
import numpy as np
import pytest
from untrained import SMALL, TINY, untrained

import rollmill
from rollmill.cli.main import main
from rollmill.envs.host.filming import Film, film_environment
from rollmill.policies.evaluation import evaluate_run
from rollmill.policies.loading import load_weights
from rollmill.policies.rendering import action_text, render_run
from small_ppo import small_ppo
from wordings import raises


class Ramp(gymnasium.Env):
    """Ends after three steps; its picture is as bright as the steps so far."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode, self.time = render_mode, 0

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(4, np.float32), 1.0, self.time == 3, False, {}

    def render(self):
        return np.full((20, 30, 3), 10 * self.time, np.uint8)


class Walk(Ramp):
    """A walk with random steps and a random length, which depends on the actions."""

    def reset(self, *, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        self.time = 0
        return self.np_random.normal(size=4).astype(np.float32), {}

    def step(self, action):
        self.time += 1
        reward, ends = self.np_random.normal() + float(action), bool(self.np_random.random() < 0.2)
        return self.np_random.normal(size=4).astype(np.float32), reward, ends, False, {}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return rollmill.train(small_ppo(4), run_dir=tmp_path_factory.mktemp("runs") / "cart", quiet=True).directory


@pytest.mark.slow
def test_the_episodes_are_those_of_an_evaluation_and_end_with_their_last_state(run):
    loaded = load_weights(run)
    frames = list(render_run(loaded, episodes=3, seed=5, size=64))
    played = evaluate_run(loaded, episodes=3, seed=5)
    last = {frame.episode: frame for frame in frames}
    assert [frame.episode_return for frame in last.values()] == played.returns.tolist()
    assert [frame.step for frame in last.values()] == played.lengths.tolist()
    assert len(frames) == played.lengths.sum() + 3


def last_returns(frames):
    last = {frame.episode: frame for frame in frames}
    return [last[episode].episode_return for episode in sorted(last)]


def test_random_numbers_are_those_of_an_evaluation():
    env = rollmill.make("CartPole-v1", transforms=["sticky-actions:0.5"])
    loaded = untrained(rollmill.ppo(env, network=TINY, **SMALL)).loaded
    play = {"episodes": 3, "seed": 5, "stochastic": True}
    frames = render_run(loaded, env=env, draw=lambda state, params: np.zeros((8, 8, 3), np.uint8), **play)
    assert last_returns(frames) == evaluate_run(loaded, **play).returns.tolist()


@pytest.mark.parametrize("stochastic", [False, True])
def test_episodes_on_the_host_are_those_of_an_evaluation(stochastic):
    env = rollmill.from_gymnasium(lambda: Walk(render_mode="rgb_array"))
    loaded = untrained(rollmill.ppo(env, network=TINY, **SMALL)).loaded
    play = {"env": env, "episodes": 10, "seed": 5, "stochastic": stochastic}  # two copies play two episodes
    rendered, played = last_returns(render_run(loaded, **play)), evaluate_run(loaded, **play)
    np.testing.assert_array_equal(np.sort(rendered), np.sort(played.returns))


def test_an_episode_is_drawn_with_its_own_parameters():
    env = rollmill.make("CartPole-v1", pole_half_length="uniform:0.3:2", gravity="linear:1:20")
    loaded = untrained(rollmill.ppo(env, network=TINY, **SMALL)).loaded
    seen = []

    def draw(state, params):
        seen.append((float(params.pole_half_length), float(params.gravity)))
        return np.zeros((8, 8, 3), np.uint8)

    episodes = [frame.episode for frame in render_run(loaded, env=env, draw=draw, episodes=3, max_steps=3)]
    lengths = {
        episode: {pair[0] for pair, of in zip(seen, episodes, strict=True) if of == episode}
        for episode in range(3)
    }
    assert all(len(each) == 1 for each in lengths.values()) and len(set.union(*lengths.values())) == 3
    assert all(0.3 <= length <= 2 and gravity == 20 for length, gravity in seen)


@pytest.mark.slow
def test_frames_are_an_array_and_stop_at_the_most_steps(run):
    frames = rollmill.render(run, max_steps=4, size=60)
    assert frames.shape == (5, 22, 60, 3) and frames.dtype == np.uint8
    assert (frames[0] != frames[-1]).any()


@pytest.mark.slow
def test_a_draw_function_takes_the_place_of_the_environments_own(run):
    pixels = lambda state, params: np.full((6, 8, 3), 7, np.uint8)
    assert (rollmill.render(run, draw=pixels, max_steps=2) == 7).all()
    assert rollmill.render(run, draw=pixels, max_steps=2, size=16).shape == (3, 12, 16, 3)
    with raises("draw-returned-has-to-return"):
        rollmill.render(run, draw=lambda state, params: np.zeros((6, 8)))


def test_an_environment_that_cannot_be_drawn_is_refused_with_the_way_out(run):
    env = rollmill.make("CartPole-v1")._replace(draw=None)
    with raises("cannot-be-drawn-has-no", "docs/extending.md"):
        rollmill.render(run, env=env)


def test_gymnasiums_environments_draw_themselves(run):
    env = rollmill.from_gymnasium(lambda: Ramp("rgb_array"), name="Ramp")
    frames = list(render_run(load_weights(run), env=env, episodes=2))
    assert [frame.picture[0, 0, 0] for frame in frames] == [0, 10, 20, 30] * 2
    assert [(frame.episode, frame.step) for frame in frames] == [(e, s) for e in (0, 1) for s in range(4)]
    assert frames[3].episode_return == 3.0 and frames[0].fps == 7.0
    assert frames[0].texts == ("episode 1", "step 0", "return 0", "")
    assert frames[7].texts[:3] == ("episode 2", "step 3", "return 3")
    assert frames[7].texts[3] in ("action 0", "action 1")
    cut = list(render_run(load_weights(run), env=env, episodes=2, max_steps=1))
    assert [frame.picture[0, 0, 0] for frame in cut] == [0, 10] * 2


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (np.int32(3), "3"),
        (np.array([0.123, -1.0], np.float32), "0.12 -1"),
        ({"a": np.int32(1), "b": np.array([0, 2])}, "1 0 2"),
        (np.zeros(17), "of 17 numbers"),
    ],
)
def test_actions_as_captions_show_them(action, text):
    assert action_text(action) == text


def test_one_that_was_made_without_pictures_is_refused(run):
    env = rollmill.from_gymnasium(Ramp, name="Ramp")
    with raises("cannot-be-drawn-hint-gymnasiums", "render_mode=None"):
        rollmill.render(run, env=env)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episodes": 0}, ("episodes-and-max-steps-must",)),
        ({"max_steps": 10**6}, ("episodes-up-to-max-steps",)),
        ({"size": 3}, ("size-has-to-be-in", "16", "4096")),
        ({"seed": -1}, ("seed-must-lie-between-0", "-1")),
    ],
)
def test_numbers_out_of_range_are_refused(run, options, message):
    with raises(*message):
        rollmill.render(run, **options)


def test_the_command_prints_frames_and_refuses_to_overwrite(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["render", str(run), "--output", "terminal", "--max-steps", "2"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "episode 1, step 2, return 2" in shown and "\x1b" not in shown
    (tmp_path / "cart.gif").touch()
    with pytest.raises(SystemExit) as ended:
        main(["render", str(run)])
    assert ended.value.code == 2 and "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "used"), [(None, "dummy"), ("alsa", "alsa")])
def test_pygame_opens_no_audio_device_unless_one_is_chosen(given, used, monkeypatch):
    monkeypatch.setenv("SDL_AUDIODRIVER", given or "")
    if given is None:
        monkeypatch.delenv("SDL_AUDIODRIVER")
    film_environment(rollmill.from_gymnasium(Ramp), Film([], []))
    assert os.environ["SDL_AUDIODRIVER"] == used
