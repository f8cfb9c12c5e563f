"""`ale:GAME`: Atari 2600 games of the Arcade Learning Environment (Bellemare et al. 2013), stepped in C++ threads.

The vector environment of ale-py prepares frames as in Mnih et al., "Human-level control through deep reinforcement
learning" (2015): maximum over two frames, grayscale, 84 x 84 pixels, four frames stacked. In training, a lost life
ends an episode, and rewards are clipped to [-1, 1]. Evaluations play whole games and count all points. The package
ale-py includes the games.

Shape letter: `n` environments.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from gymnasium import spaces
from jaxtyping import Bool, Int, PyTree

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import HostEnvironment, HostStep, HostVector
from rollmill.envs.adapters import import_extra
from rollmill.envs.host import RowVector, allocate, check_indices, copy_batch, fit_to_space, write_reset
from rollmill.envs.options import unknown_option

OPTIONS: dict[str, Any] = {
    "frameskip": 4,
    "full_action_space": False,
    "grayscale": True,
    "img_height": 84,
    "img_width": 84,
    "max_num_frames_per_episode": 108_000,
    "maxpool": True,
    "noop_max": 30,
    "repeat_action_probability": 0.0,
    "stack_num": 4,
    "use_fire_reset": True,
}
"""Options that are passed on to `AtariVectorEnv` of ale-py, with Rollmill's defaults."""

LEAST = {"frameskip": 1, "img_height": 1, "img_width": 1, "max_num_frames_per_episode": 1, "stack_num": 1}
"""Minimum values of the options, if they are not 0."""


def make(
    name: str, *, episodic_life: bool = True, reward_clipping: bool = True, num_threads: int = 0, **options: Any
) -> HostEnvironment:
    """Makes the Atari environment of the game `name`.

    Args:
        name: name of a game as in Gymnasium or ale-py, such as `Pong`, `MsPacman` or `ms_pacman`.
        episodic_life: whether a lost life ends an episode during training. The game continues in the next episode.
        reward_clipping: whether rewards are clipped to [-1, 1] during training.
        num_threads: number of threads in each process that steps environments. 0 means one per core.
        **options: `frameskip`, `stack_num`, `img_height`, `img_width`, `grayscale`, `maxpool`, `noop_max`,
            `use_fire_reset`, `full_action_space`, `max_num_frames_per_episode`, and `repeat_action_probability`,
            for which Machado et al., "Revisiting the Arcade Learning Environment" (2018), recommend 0.25.

    Returns:
        The environment, with observations `[stack_num, img_height, img_width]` in uint8 (`[..., 3]` in colour).

    Raises:
        UsageError: ale-py is not installed, or has no such game or option.
    """
    vector_env = import_extra("ale_py.vector_env", "ale")
    game = _game(name)
    chosen = {**OPTIONS, **_check_options(name, options, {"episodic_life", "reward_clipping", "num_threads"})}
    build = functools.partial(
        vector_env.AtariVectorEnv,
        game,
        num_threads=num_threads,
        autoreset_mode="SameStep",
        reward_clipping=False,  # ale-py must not clip, because the unclipped rewards are needed for the returns
        **chosen,
    )
    single = build(1)
    observation_space, action_space = single.single_observation_space, single.single_action_space
    start = StartGames(
        f"ale:{name}", episodic_life, reward_clipping, build, observation_space, spaces.Discrete(action_space.n)
    )
    return HostEnvironment(start.name, start, start.observation_space, start.action_space)


@dataclass(frozen=True)
class StartGames:
    """A `StartHost` that starts Atari games. Evaluations play whole games."""

    name: str
    episodic_life: bool
    reward_clipping: bool
    build: Callable[..., Any] = field(repr=False)
    observation_space: spaces.Space = field(repr=False)
    action_space: spaces.Space = field(repr=False)

    @property
    def for_evaluation(self) -> "StartGames":
        """Returns a `StartHost` of whole games, which continue after a lost life and count all points."""
        return replace(self, episodic_life=False, reward_clipping=False)

    def __call__(
        self, indices: Sequence[int], /, *, seed: int, generation: int = 0, gamma: float | None = None
    ) -> HostVector:
        """Starts the environments. See `StartHost`."""
        check_indices(self.name, indices)
        return GamesVector(self, indices, seed=seed, generation=generation, gamma=gamma)


class GamesVector(RowVector):
    """A `core.types.HostVector` of Atari games. If a game fails, all games of the process fail."""

    def __init__(
        self, start: StartGames, indices: Sequence[int], *, seed: int, generation: int, gamma: float | None
    ) -> None:
        env = HostEnvironment(start.name, start, start.observation_space, start.action_space)
        super().__init__(env, indices, seed=seed, generation=generation, gamma=gamma)
        self._clips, self._by_lives = start.reward_clipping, start.episodic_life
        self._frames = np.zeros(self.num_envs, np.int32)
        self._games = start.build(self.num_envs, life_loss_info=start.episodic_life)

    def reset(self, *, out: HostStep | None = None) -> HostStep:
        """Starts an episode in each of the games."""
        out = allocate(self._struct) if out is None else out
        first, info = self._games.reset(seed=np.asarray(self._seeds))
        self._frames = info["episode_frame_number"]
        write_reset(self._observation_space, first, out)
        self._sums.restart()
        return out

    def step(self, actions: PyTree[np.ndarray], *, out: HostStep | None = None) -> HostStep:
        """Applies one action to each game, and resets the games whose episode ended."""
        out = allocate(self._struct) if out is None else out
        fitted = fit_to_space(self._action_space, actions, self.num_envs)
        observation, rewards, out.terminated[:], out.truncated[:], info = self._games.step(fitted)
        out.reward[:] = np.clip(rewards, -1, 1) if self._clips else rewards
        copy_batch(self._observation_space, observation, out.observation)
        copy_batch(self._observation_space, observation, out.info["final_observation"])
        done = out.terminated | out.truncated
        begun = done & self._find_begun(info["episode_frame_number"])
        if begun.any():
            last = info["final_obs"][begun]
            copy_batch(self._observation_space, last, out.info["final_observation"], rows=begun)
        self._sums.add(out, done)
        return out

    def _find_begun(self, frames: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Returns True for each environment in which a new game has begun, if an episode ended.

        After a lost life, the game continues. Its last observation is then also the first observation of the next
        episode, because ale-py returns only one.
        """
        before, self._frames = self._frames, frames
        return frames < before if self._by_lives else np.ones(self.num_envs, np.bool_)

    def close(self) -> None:
        """Ends the threads that step the games."""
        self._games.close()
        del self._games


def _game(name: str) -> str:
    """Returns the name of a game's file. Raises a `UsageError` if there is no such game."""
    roms = import_extra("ale_py.roms", "ale")
    known = {"".join(word.capitalize() for word in rom.split("_")): rom for rom in roms.get_all_rom_ids()}
    plain = re.sub(r"^ALE/|-v5$", "", name)
    if plain in known.values():
        return plain
    if plain not in known:
        raise unknown_name("Atari game", name, known)
    return known[plain]


def _check_options(name: str, options: dict[str, Any], more: set[str]) -> dict[str, Any]:
    """Returns the options, cast to the types of their defaults."""
    for option, value in options.items():
        if option not in OPTIONS:
            raise unknown_option(f"ale:{name}", option, {*OPTIONS, *more})
        default = OPTIONS[option]
        if isinstance(default, bool):
            fits, wanted = isinstance(value, bool), "true or false"
        elif isinstance(default, float):
            fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
            wanted = "a number between 0 and 1"
        else:
            least = LEAST.get(option, 0)
            fits, wanted = type(value) is int and value >= least, f"an integer of at least {least}"
        if not fits:
            raise UsageError(f"ale:{name}: {option}={value} must be {wanted}. The default is {default}.")
    return options
