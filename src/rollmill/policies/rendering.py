"""Renders pictures of a run's policy at play."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os import PathLike
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt8

from rollmill.core.drawing import Drawing
from rollmill.core.errors import ContractError, UsageError
from rollmill.core.schema import coerce
from rollmill.core.types import (
    NO_OPTIONS,
    Environment,
    GymnasiumObject,
    HostEnvironment,
    HostVector,
    Options,
    Params,
    State,
    Timestep,
)
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.dataflow import Collector, Graph, step_one
from rollmill.envs import as_environment, wrap
from rollmill.envs.host import EVALUATION, Film, film_environment
from rollmill.pictures import Legend, Picture, add_caption, collect_frames, rasterise, resize
from rollmill.policies.environments import check_same_spaces, on_environment
from rollmill.policies.loading import load_weights
from rollmill.policies.policy import LoadedRun
from rollmill.programs.evaluation.compiled import most_at_once
from rollmill.programs.evaluation.episodes import CHUNK, check_seed, start_memories
from rollmill.programs.evaluation.host_environments import quotas
from rollmill.runs.specification import import_modules

Draw: TypeAlias = Callable[[State, Params], Drawing | UInt8[np.ndarray, "H W 3"]]
AnyEnvironment: TypeAlias = Environment | HostEnvironment | GymnasiumObject | str

DEFAULT_SIZE, SMALLEST, LARGEST = 480, 16, 4096
"""Default length of a picture's longer side, in pixels."""
DEFAULT_FPS = 30.0
MAX_FRAMES = 100_000
MAX_NUMBERS = 4
"""Maximum number of elements of an action that a caption shows."""
WAY_OUT = "docs/extending.md shows how to add one"


class Frame(NamedTuple):
    """A picture of an environment, with its episode, step, return and action."""

    picture: Picture
    episode: int
    """Number of the episode, from 0."""
    step: int
    """Number of steps in the episode so far, 0 after the reset."""
    episode_return: float
    """Sum of the rewards in the episode so far, as in an evaluation."""
    fps: float
    """Number of frames per second that suits the environment."""
    action: str
    """Description of the action that led to this frame, or an empty string after the reset."""
    legend: Legend
    """Colours in the picture with their meanings."""

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """The strings of the caption: episode, step, return and action."""
        action = f"action {self.action}" if self.action else ""
        return f"episode {self.episode + 1}", f"step {self.step}", f"return {self.episode_return:.5g}", action


class _Watched(eqx.Module):
    """A state, and whether its episode has ended. Nothing resets it, so that the last state can be drawn."""

    inner: State
    ended: Bool[Array, ""]
    params: Params
    """Parameters of this episode, or None if all episodes have the environment's own."""


class _Played(NamedTuple):
    """One environment of a graph between two steps."""

    collector: Collector
    watched: _Watched
    episode_return: Array


def render(
    run_dir: str | PathLike[str],
    *,
    env: AnyEnvironment | None = None,
    env_options: Options = NO_OPTIONS,
    draw: Draw | None = None,
    episodes: int = 1,
    max_steps: int = 1000,
    size: int | None = None,
    checkpoint: str | int = "last",
    seed: int = 0,
    train_seed: int | None = None,
    stochastic: bool = False,
    captions: bool = False,
    algorithm: Graph | None = None,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> UInt8[np.ndarray, "T H W 3"]:
    """Plays episodes with the policy of a run, and returns the pictures as a uint8 array
    `[frames, height, width, 3]`.

    Args:
        run_dir: directory of the run.
        env: another environment with the same spaces, or its id. Required if the run's environment was created in
            Python without a name.
        env_options: options of an environment given by id.
        draw: function that maps the state and parameters of the environment to a `Drawing` or to uint8 pixels
            `[height, width, 3]`, instead of the environment's own `draw`.
        episodes: number of episodes. The first frame of each shows the state after the reset.
        max_steps: maximum number of steps in an episode.
        size: length of the longer side in pixels. Default: 480 for drawings, and the original size for pixels.
        checkpoint: `last`, `best` or the number of an iteration, as for `load`.
        seed: seed of the environments and of a stochastic policy.
        train_seed: seed whose policy plays, if the run trained several. Default: the first.
        stochastic: sample actions as in training, instead of taking the most likely ones.
        captions: add a strip with episode, step, return, action and a legend of colours below each picture
            (requires Pillow).
        algorithm: the graph, which must be passed again if the run was created with custom Python objects.
        imports: modules to import first, because they register the environment, network or algorithm.
        trust: allow the run directory to import the modules that it names, now and later.

    Raises:
        UsageError: the environment cannot be rendered, or a number is out of its range.
        ContractError: the environment or its `draw` raised an exception.
        CheckpointError: the directory is not a run, or lacks the checkpoint.

    Examples:
        >>> frames = rollmill.render("runs/cartpole", max_steps=200, captions=True)
    """
    loaded = load_weights(
        run_dir, checkpoint=checkpoint, seed=train_seed, algorithm=algorithm, imports=imports, trust=trust
    )
    frames = render_run(
        loaded,
        env=env,
        env_options=env_options,
        draw=draw,
        episodes=episodes,
        max_steps=max_steps,
        size=size,
        seed=seed,
        stochastic=stochastic,
        imports=imports,
    )
    shown = map(with_caption, frames) if captions else (frame.picture for frame in frames)
    return np.stack(collect_frames(shown))


def with_caption(frame: Frame) -> Picture:
    """Returns the picture of a frame above its caption."""
    return add_caption(frame.picture, frame.texts, frame.legend)


def render_run(
    loaded: LoadedRun,
    *,
    env: AnyEnvironment | None = None,
    env_options: Options = NO_OPTIONS,
    draw: Draw | None = None,
    episodes: int = 1,
    max_steps: int = 1000,
    size: int | None = None,
    seed: int = 0,
    stochastic: bool = False,
    imports: Sequence[str] = (),
) -> Iterator[Frame]:
    """Yields frames of a loaded policy at play, all of the same size. Arguments are as for `render`.

    The call fails at once, before the first frame, if the environment cannot be rendered.
    """
    episodes, max_steps, size = _check_numbers(episodes, max_steps, size, seed)
    import_modules(imports)
    found = _environment(loaded.graph, env, env_options)
    check_same_spaces(loaded.graph, found)
    graph = loaded.graph._replace(policy=loaded.graph.deployed_policy(stochastic=stochastic))
    many = {"episodes": episodes, "max_steps": max_steps, "seed": seed}
    if isinstance(found, HostEnvironment):
        if draw is not None:
            raise UsageError(f"{found.name} has no state to pass to a draw function, because it renders itself.")
        return _same_size(_frames_on_host(graph, loaded.weights, found, **many), size)
    draw = draw or found.draw
    if draw is None:
        raise UsageError(
            f"{found.name} cannot be rendered: it has no function `draw`. hint: {WAY_OUT}; --env gymnasium:ID "
            "plays in the Gymnasium environment with the same spaces, if there is one."
        )
    return _same_size(_frames(graph, loaded.weights, found, draw, size or DEFAULT_SIZE, **many), size)


def _check_numbers(episodes: int, max_steps: int, size: int | None, seed: int) -> tuple[int, int, int | None]:
    episodes, max_steps = coerce("episodes", int, episodes), coerce("max_steps", int, max_steps)
    check_seed(coerce("seed", int, seed))
    if episodes < 1 or max_steps < 1:
        raise UsageError(f"episodes={episodes} and max_steps={max_steps} must be at least 1.")
    if episodes * (max_steps + 1) > MAX_FRAMES:
        raise UsageError(
            f"episodes={episodes} of up to max_steps={max_steps} steps may exceed the limit of {MAX_FRAMES:,} "
            "frames. hint: lower max_steps."
        )
    if size is not None and not SMALLEST <= coerce("size", int, size) <= LARGEST:
        raise UsageError(f"size={size} must lie between {SMALLEST} and {LARGEST} pixels.")
    return episodes, max_steps, size


def _environment(graph: Graph, env: AnyEnvironment | None, options: Options) -> Environment | HostEnvironment:
    """Returns the environment to play in: `env`, or the run's own, recreated by name."""
    if env is None:
        if options:
            raise UsageError(
                f"the options {', '.join(options)} need the name of another environment, because the run's own "
                "environment keeps the options of the training. hint: use --env ID on the command line, or env= "
                "in Python."
            )
        env, options = graph.settings["environment"], graph.settings.get("environment_options", NO_OPTIONS)
        try:
            return as_environment(env, _drawing_itself(env, options))
        except UsageError as error:
            raise UsageError(
                f"the run's environment cannot be created from its name: {error} In Python, you can pass it as "
                "env=."
            ) from error
    if isinstance(env, str):
        return as_environment(env, _drawing_itself(env, options))
    return as_environment(env, options)


def _drawing_itself(name: Any, options: Options) -> Options:
    """Returns the options with which an environment of Gymnasium or PettingZoo draws itself."""
    draws = isinstance(name, str) and name.startswith(("gymnasium:", "pettingzoo:"))
    return {**options, "render_mode": "rgb_array"} if draws else options


def _same_size(frames: Iterator[Frame], size: int | None) -> Iterator[Frame]:
    """Yields the frames in the first frame's size, or with `size` pixels on the longer side."""
    shape = None
    for frame in frames:
        height, width = frame.picture.shape[:2]
        if shape is None:
            scale = 1.0 if size is None else size / max(height, width)
            shape = (max(1, round(height * scale)), max(1, round(width * scale)))
        yield frame if (height, width) == shape else frame._replace(picture=resize(frame.picture, *shape))


# --- environments of JAX functions ---------------------------------------------------------------------


def _frames(
    graph: Graph,
    weights: Any,
    env: Environment,
    draw: Draw,
    size: int,
    *,
    episodes: int,
    max_steps: int,
    seed: int,
) -> Iterator[Frame]:
    """Yields the frames of the same episodes as an evaluation with this seed."""
    batch = 1 if episodes == 1 else min(episodes, most_at_once(on_environment(graph, env)))
    graph = on_environment(graph, _never_reset(env))
    begin, step = jax.jit(partial(_begin, graph)), jax.jit(partial(_step, graph))
    show = partial(_picture, env, draw, size)
    for episode in range(episodes):
        # All keys are derived as in `programs.evaluation.compiled`, which plays batches in chunks of steps.
        row, first = episode % batch, episode - episode % batch
        key = jax.random.key(seed)
        start_key, run_key = jax.random.split(jax.random.fold_in(key, first) if first else key)
        now = begin(jax.random.split(start_key, batch)[row], jnp.int32(first % graph.loops.num_envs + row))
        picture, fps, legend = show(now)
        yield Frame(picture, episode, 0, 0.0, fps, "", legend)
        for t in range(max_steps):
            now, action = step(weights, run_key, now, jnp.int32(t))
            picture, fps, legend = show(now)
            yield Frame(picture, episode, t + 1, float(now.episode_return), fps, action_text(action), legend)
            if bool(now.watched.ended):
                break


def _never_reset(env: Environment) -> Environment:
    """Returns an environment that never ends, so that an auto-reset around it does nothing.

    The end of an episode is only in its state.
    """
    kept = lambda params: params if env.inputs else None

    def reset(key: Any, params: Params) -> tuple[Any, _Watched]:
        observation, inner = env.reset(key, params)
        return observation, _Watched(inner, jnp.zeros((), bool), kept(params))

    def step(key: Any, state: _Watched, action: Any, params: Params) -> Timestep:
        timestep = env.step(key, state.inner, action, params)
        ended, never = jnp.asarray(timestep.terminated | timestep.truncated), jnp.zeros((), bool)
        watched = _Watched(timestep.state, ended, kept(params))
        return timestep._replace(state=watched, terminated=never, truncated=never)

    return wrap(env, reset, step)


def _begin(graph: Graph, key: Any, index: Array) -> _Played:
    state, observation = graph.start_environment(key, index % graph.loops.num_envs)
    collector = Collector(index, state, observation, graph.action_mask(state), graph.start_memory())
    return _Played(collector, _author_state(state), jnp.float32(0))


def _step(graph: Graph, weights: Any, run_key: Any, now: _Played, t: Array) -> tuple[_Played, Any]:
    key = jax.random.fold_in(jax.random.fold_in(run_key, t // CHUNK), now.collector.index)
    collector, step = step_one(graph, weights, now.collector, key, t % CHUNK)
    return _Played(collector, _author_state(collector.environment), step.info["episode_return"]), step.action


def _author_state(state: Any) -> _Watched:
    """Returns the author's state inside of those that transforms have put around it."""
    is_watched = lambda node: isinstance(node, _Watched)
    return next(node for node in jax.tree.leaves(state, is_leaf=is_watched) if is_watched(node))


def action_text(action: Any) -> str:
    """Returns a short description of an action: an index, rounded values, or the number of elements if there are
    many.
    """
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(action)]
    numbers = np.concatenate([leaf.ravel() for leaf in leaves]) if leaves else np.zeros(0)
    if numbers.size > MAX_NUMBERS:
        return f"of {numbers.size} numbers"
    return " ".join(f"{value:.2g}" if leaves[0].dtype.kind == "f" else str(value) for value in numbers.tolist())


def _picture(env: Environment, draw: Draw, size: int, now: _Played) -> tuple[Picture, float, Legend]:
    """Returns the pixels of a state, the frames a second that suit them, and their legend."""
    with attribute_to_user_code(f"{env.name}: draw"):
        drawn = draw(now.watched.inner, now.watched.params if env.inputs else env.params)
    if isinstance(drawn, Drawing):
        return rasterise(drawn, size), float(drawn.fps), tuple(drawn.legend)
    pixels = np.asarray(drawn)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or 0 in pixels.shape:
        raise ContractError(
            f"{env.name}: draw returned {pixels.dtype} {list(pixels.shape)}, expected a Drawing, or pixels as "
            "uint8 [height, width, 3]."
        )
    return pixels, DEFAULT_FPS, ()


# --- host environments ---------------------------------------------------------------------------------


def _frames_on_host(
    graph: Graph, weights: Any, env: HostEnvironment, *, episodes: int, max_steps: int, seed: int
) -> Iterator[Frame]:
    """Yields the frames of the same episodes as `evaluate_on_host` with this seed, copy after copy."""
    film, quota = Film([], []), quotas(episodes)
    decide = partial(jax.jit(jax.vmap(graph.policy, in_axes=(None, 0, 0, 0, 0))), weights)
    start_memory = partial(start_memories, graph.start_memory, 1)
    filmed = film_environment(env, film)
    for copy, last in enumerate(np.cumsum(quota).tolist()):
        vector = filmed.start([copy], seed=seed, generation=EVALUATION)
        numbers = range(last - int(quota[copy]), last)
        playing = _Copy(env, film, vector, decide, start_memory, _step_keys(seed, copy, quota.size))
        try:
            yield from _frames_of_copy(playing, numbers, max_steps)
        finally:
            vector.close()
        film.frames.clear()


class _Copy(NamedTuple):
    """A copy of a host environment that a policy plays in front of a camera."""

    env: HostEnvironment
    film: Film
    vector: HostVector
    decide: Callable[..., Any]
    """Chooses actions, given keys, memories, observations and action masks."""
    start_memory: Callable[[], Any]
    step_keys: Iterator[Any]


def _step_keys(seed: int, copy: int, num_copies: int) -> Iterator[Any]:
    """Yields the policy's random key for each step of one copy, as in an evaluation, with an axis of length 1."""
    key = jax.random.key(seed)
    while True:
        key, step_key = jax.random.split(key)
        yield jax.random.split(step_key, num_copies)[copy, None]


def _frames_of_copy(playing: _Copy, numbers: range, max_steps: int) -> Iterator[Frame]:
    """Yields the frames of consecutive episodes in one copy, which have these numbers."""
    env, film, vector = playing.env, playing.film, playing.vector
    now = vector.reset()
    for episode in numbers:
        memory, total = playing.start_memory(), 0.0
        yield _oldest_frame(env, film, episode, 0, total, "")
        film.frames.clear()
        for t in range(max_steps):
            mask = now.info.get("action_mask", ())
            decision = playing.decide(next(playing.step_keys), memory, now.observation, mask)
            action = jax.device_get(decision.action)
            now, memory = vector.step(action), decision.memory
            for failure in vector.drain_failures():
                raise ContractError(f"{env.name}: {failure.doing} raised {failure.error}\n  at {failure.line}")
            total = float(now.info["episode_return"][0])
            yield _oldest_frame(env, film, episode, t + 1, total, action_text(action))
            if bool((now.terminated | now.truncated)[0]):
                del film.frames[:1]  # the remaining frame is the first picture of the next episode
                break
            film.frames.clear()
        else:
            film.frames.clear()
            now = vector.reset() if episode != numbers[-1] else now


def _oldest_frame(env: HostEnvironment, film: Film, episode: int, step: int, total: float, action: str) -> Frame:
    """Returns the oldest picture of a film as a frame."""
    if film.problems:
        raise UsageError(
            f"{env.name} cannot be rendered: {film.problems[0]}. hint: Gymnasium's classic control needs pygame, "
            "MuJoCo without a screen needs MUJOCO_GL=egl, and your own environments need a `render` that returns "
            'pixels, and render_mode="rgb_array".'
        )
    picture, fps = film.frames[0]
    return Frame(picture, episode, step, total, fps or DEFAULT_FPS, action, ())
