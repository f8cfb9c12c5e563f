"""TagContinuous-v0: taggers hunt runners on a continuous square.

Positions, speeds, observations, rewards and ends of episodes equal, step by step, the NumPy environment
`TagContinuous` of rl-warp-drive 2.7.1 (Lan, Srinivasa, Wang and Zheng, "WarpDrive: extremely fast end-to-end deep
multi-agent reinforcement learning on a GPU", JMLR 2022). Its peculiarities are kept:

- Observations are made before tags are applied: a runner that is tagged in a step is still visible in it,
  still gets an observation, and leaves the game only then.
- An action adds to the acceleration, and the acceleration to the speed in every step, until the speed reaches a
  bound, where the acceleration becomes 0.
- Only the nearest tagger is rewarded for a tag; it may tag several runners at once.
- An agent that has left the game keeps its place, its speed and direction become 0, and it gets no rewards.
- Accelerations are observed in units of the maximum speed; agents do not observe their own place, speed or
  direction.
- The clock is part of the observation, and the last step terminates the episode: nothing is bootstrapped.

WarpDrive draws initial places and directions once, for all episodes. Here, each episode draws its own. The CUDA
kernels of WarpDrive differ in one point: a runner that is tagged in the last step still gets the end-of-game
reward.

Shape letters: `A` agents, `G` taggers before `R` runners, and `F` features of an observation.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, Int

from rollmill.core.drawing import Drawing
from rollmill.core.errors import UsageError
from rollmill.core.types import AgentKind, Environment, Key, Timestep
from rollmill.envs.agents import joint_spaces
from rollmill.envs.drawings.tag import draw_square
from rollmill.envs.nearest_neighbours import nearest
from rollmill.envs.physics import Scalar

DIRECTIONS = np.array([0.0, np.pi / 2, np.pi, 3 * np.pi / 2], np.float32)
"""Possible initial directions (rad)."""

NUM_FEATURES = 7
"""Features of each other agent in an observation."""


class TagContinuousState(eqx.Module):
    """State of TagContinuous: places, speeds, directions and accelerations of all agents.

    Speeds are per step, and directions are within [0, 2 pi) (rad). The state also contains the number of steps,
    and flags of the agents that are still in the game, as taggers always are.
    """

    x: Float[Array, " A"]
    y: Float[Array, " A"]
    speed: Float[Array, " A"]
    direction: Float[Array, " A"]
    acceleration: Float[Array, " A"]
    in_game: Bool[Array, " A"]
    time: Int[Array, ""]


class TagContinuousParams(eqx.Module):
    """Parameters of TagContinuous: the square, the abilities of the agents, and the rewards.

    Each field may hold one value for each environment. Penalties are added to rewards, so they are negative.
    """

    accelerations: Float[Array, "..."] | Float[np.ndarray, "..."]
    """Change of the acceleration by each choice, `[num_acceleration_levels + 1]`. See `action_levels`."""
    turns: Float[Array, "..."] | Float[np.ndarray, "..."]
    """Change of the direction (rad) by each choice, `[num_turn_levels + 1]`."""
    grid_length: Scalar = 20.0
    """Side of the square."""
    max_speed: Scalar = 1.0
    """Maximum speed (per step) of an agent with a skill level of 1."""
    skill_level_tagger: Scalar = 1.0
    """Maximum speed of taggers as a multiple of `max_speed`."""
    skill_level_runner: Scalar = 1.0
    """Maximum speed of runners as a multiple of `max_speed`."""
    tagging_distance: Scalar = 0.02
    """Distance to a tagger below which a runner is tagged, in units of the side."""
    tag_reward_for_tagger: Scalar = 10.0
    step_penalty_for_tagger: Scalar = 0.0
    tag_penalty_for_runner: Scalar = -10.0
    step_reward_for_runner: Scalar = 0.0
    end_of_game_reward_for_runner: Scalar = 1.0
    """Reward of the last step for runners still in the game after it."""
    edge_hit_penalty: Scalar = 0.0
    """Added in a step that would have left the square."""


class TagContinuousRules(NamedTuple):
    """Settings of TagContinuous that determine shapes and the traced program."""

    num_taggers: int
    num_runners: int
    max_steps: int
    use_full_observation: bool
    num_other_agents_observed: int
    runner_exits_game_after_tagged: bool

    @property
    def num_agents(self) -> int:
        """Total number of taggers and runners."""
        return self.num_taggers + self.num_runners


def tag_continuous(
    *,
    num_taggers: int = 10,
    num_runners: int = 100,
    max_steps: int = 500,
    num_acceleration_levels: int = 20,
    num_turn_levels: int = 20,
    use_full_observation: bool = False,
    num_other_agents_observed: int = 10,
    runner_exits_game_after_tagged: bool = True,
) -> Environment:
    """Taggers hunt runners on a square, each choosing acceleration and turn (TagContinuous of WarpDrive).

    The kinds are `tagger` and `runner`. An agent observes its nearest neighbours that are in the game, nearest
    first, or with `use_full_observation` all other agents, taggers first. Each of them has 7 features: the
    differences in `x`, `y`, speed, acceleration and direction, a flag for taggers, and a flag for agents that are
    still in the game. An observation has one row per feature, over all observed agents, and then the time, so
    `F = 7 K + 1`. Differences are in units of the square's diagonal, of the maximum speed (speed and
    acceleration), and of a full turn, and the time in units of `max_steps`. Missing neighbours are 0. The
    observations of agents that have left the game are also 0, except for the last two rows with
    `use_full_observation`.

    With `use_full_observation`, all observations together have `7 A^2` elements, which take 28 MB for 1,000
    agents.

    Args:
        num_taggers: number of taggers, at least 1.
        num_runners: number of runners, at least 1.
        max_steps: length of an episode in which not all runners are tagged, in steps, at least 1.
        num_acceleration_levels: number of choices between -0.1 and 0.1, besides 0, at least 1.
        num_turn_levels: number of choices between -2.356 and 2.356 rad, besides 0, at least 1.
        use_full_observation: agents observe all others.
        num_other_agents_observed: otherwise, the number of neighbours observed: `K`, from 1 to all others.
        runner_exits_game_after_tagged: tagged runners leave the game, instead of running on.

    Raises:
        UsageError: a number is out of its range.
    """
    rules = TagContinuousRules(
        num_taggers,
        num_runners,
        max_steps,
        use_full_observation,
        num_other_agents_observed,
        runner_exits_game_after_tagged,
    )
    _check_rules(rules, num_acceleration_levels, num_turn_levels)
    features = spaces.Box(-np.inf, np.inf, (NUM_FEATURES * _num_others(rules) + 1,), np.float32)
    choices = spaces.MultiDiscrete([num_acceleration_levels + 1, num_turn_levels + 1])
    agents = (
        AgentKind("tagger", num_taggers, features, choices),
        AgentKind("runner", num_runners, features, choices),
    )
    observation_space, action_space = joint_spaces(agents)
    return Environment(
        name="TagContinuous-v0",
        reset=partial(reset, rules),
        step=partial(step, rules),
        observation_space=observation_space,
        action_space=action_space,
        params=TagContinuousParams(
            action_levels(-0.1, 0.1, num_acceleration_levels), action_levels(-2.356, 2.356, num_turn_levels)
        ),
        agents=agents,
        active=lambda state, params: {"runner": state.in_game[num_taggers:]},
        central=partial(central, rules),
        draw=partial(_draw, rules),
    )


def action_levels(low: float, high: float, count: int) -> Float[np.ndarray, " choices"]:
    """Returns the change that each choice causes: 0, or one of `count` equally spaced values from `low` to
    `high`.
    """
    return np.concatenate([[0.0], np.linspace(np.float32(low), np.float32(high), count)]).astype(np.float32)


def _draw(rules: TagContinuousRules, state: TagContinuousState, params: TagContinuousParams) -> Drawing:
    return draw_square(
        *(np.asarray(part) for part in (state.x, state.y, state.in_game)),
        num_taggers=rules.num_taggers,
        length=float(params.grid_length),
        directions=np.asarray(state.direction),
        reach=float(params.tagging_distance) * float(params.grid_length),
    )


def _check_rules(rules: TagContinuousRules, num_acceleration_levels: int, num_turn_levels: int) -> None:
    levels = {"num_acceleration_levels": num_acceleration_levels, "num_turn_levels": num_turn_levels}
    for name in ("num_taggers", "num_runners", "max_steps", *levels):
        value = {**rules._asdict(), **levels}[name]
        if value < 1:
            raise UsageError(f"TagContinuous-v0: {name}={value} must be at least 1.")
    if not 1 <= rules.num_other_agents_observed < rules.num_agents:
        raise UsageError(
            f"TagContinuous-v0: num_other_agents_observed={rules.num_other_agents_observed} must lie between 1 "
            f"and {rules.num_agents - 1}, the number of other agents."
        )


def _num_others(rules: TagContinuousRules) -> int:
    return rules.num_agents - 1 if rules.use_full_observation else rules.num_other_agents_observed


def reset(
    rules: TagContinuousRules, key: Key, params: TagContinuousParams
) -> tuple[dict[str, Float[Array, "_ F"]], TagContinuousState]:
    """Starts an episode of TagContinuous with all agents at rest.

    Their places are random, and each faces one of the four sides of the square.
    """
    place_key, direction_key = jax.random.split(key)
    x, y = params.grid_length * jax.random.uniform(place_key, (2, rules.num_agents))
    zeros = jnp.zeros(rules.num_agents, jnp.float32)
    facing = jax.random.randint(direction_key, (rules.num_agents,), 0, len(DIRECTIONS))
    in_game = jnp.ones(rules.num_agents, bool)
    state = TagContinuousState(x, y, zeros, jnp.asarray(DIRECTIONS)[facing], zeros, in_game, jnp.int32(0))
    return observe(rules, state, params), state


def step(
    rules: TagContinuousRules,
    key: Key,
    state: TagContinuousState,
    action: dict[str, Int[Array, "_ 2"]],
    params: TagContinuousParams,
) -> Timestep:
    """Changes each agent's acceleration and direction, moves all agents, and then applies tags."""
    choices = jnp.concatenate([action["tagger"], action["runner"]])
    moved, hit = _move(rules, state, choices, params)
    tagged, nearest_tagger = _tags(rules, moved, params)
    in_game = moved.in_game
    if rules.runner_exits_game_after_tagged:
        in_game = in_game.at[rules.num_taggers :].set(in_game[rules.num_taggers :] & ~tagged)
    next_state = eqx.tree_at(lambda s: s.in_game, moved, in_game)
    ends = moved.time >= rules.max_steps
    return Timestep(
        observation=observe(rules, moved, params),
        state=next_state,
        reward=_rewards(rules, next_state, moved.in_game, hit, tagged, nearest_tagger, params),
        terminated=ends | ~jnp.any(in_game[rules.num_taggers :]),
        truncated=jnp.zeros((), bool),
        info={},
    )


def _move(
    rules: TagContinuousRules, state: TagContinuousState, choices: Int[Array, "A 2"], params: TagContinuousParams
) -> tuple[TagContinuousState, Bool[Array, " A"]]:
    """Returns all agents after one move, with unchanged `in_game`, and flags of agents that hit an edge."""
    turned = state.direction + jnp.asarray(params.turns)[choices[:, 1]]
    direction = jnp.where(state.in_game, jnp.mod(turned, 2 * np.pi), 0)
    acceleration = state.acceleration + jnp.asarray(params.accelerations)[choices[:, 0]]
    skill = jnp.where(_is_tagger(rules), params.skill_level_tagger, params.skill_level_runner)
    limit = params.max_speed * skill
    speed = jnp.where(state.in_game, jnp.clip(state.speed + acceleration, 0, limit), 0)
    acceleration = jnp.where((speed > 0) & (speed < limit), acceleration, 0)
    x, y = state.x + speed * jnp.cos(direction), state.y + speed * jnp.sin(direction)
    clipped_x, clipped_y = (jnp.clip(place, 0, params.grid_length) for place in (x, y))
    moved = TagContinuousState(clipped_x, clipped_y, speed, direction, acceleration, state.in_game, state.time + 1)
    return moved, (clipped_x != x) | (clipped_y != y)


def _is_tagger(rules: TagContinuousRules) -> Bool[Array, " A"]:
    return jnp.arange(rules.num_agents) < rules.num_taggers


def _tags(
    rules: TagContinuousRules, state: TagContinuousState, params: TagContinuousParams
) -> tuple[Bool[Array, " R"], Int[Array, " R"]]:
    """Returns whether each runner is tagged, and the index of its nearest tagger."""
    count = rules.num_taggers
    taggers, runners = ((state.x[part], state.y[part]) for part in (slice(count), slice(count, None)))
    nearest_tagger = nearest(runners, taggers, where=state.in_game[:count])
    distance = jnp.sqrt(nearest_tagger.squared_distance[:, 0])
    is_near = distance < params.tagging_distance * params.grid_length
    return is_near & state.in_game[count:], nearest_tagger.index[:, 0]


def _rewards(
    rules: TagContinuousRules,
    next_state: TagContinuousState,
    were_in_game: Bool[Array, " A"],
    hit: Bool[Array, " A"],
    tagged: Bool[Array, " R"],
    nearest_tagger: Int[Array, " R"],
    params: TagContinuousParams,
) -> dict[str, Float[Array, " _"]]:
    count = rules.num_taggers
    reward = jnp.where(_is_tagger(rules), params.step_penalty_for_tagger, params.step_reward_for_runner)
    reward = jnp.where(were_in_game, reward + jnp.where(hit, params.edge_hit_penalty, 0), 0)
    is_tag_of = tagged[None] & (nearest_tagger[None] == jnp.arange(count)[:, None])
    tag_reward = jnp.sum(is_tag_of.astype(jnp.float32), axis=1) * params.tag_reward_for_tagger
    survived = (next_state.time == rules.max_steps) & next_state.in_game[count:]
    outcome = jnp.where(tagged, params.tag_penalty_for_runner, 0)
    outcome = outcome + jnp.where(survived, params.end_of_game_reward_for_runner, 0)
    return {"tagger": reward[:count] + tag_reward, "runner": (reward[count:] + outcome).astype(jnp.float32)}


# --- observations -------------------------------------------------------------------------------------


def observe(
    rules: TagContinuousRules, state: TagContinuousState, params: TagContinuousParams
) -> dict[str, Float[Array, "_ F"]]:
    """Returns the observation of each agent, in the form that `tag_continuous` describes."""
    scaled = _scale(state, params)
    observe_others = _see_all if rules.use_full_observation else _see_nearest
    rows = observe_others(rules, state, scaled).reshape(rules.num_agents, -1)
    clock = jnp.where(state.in_game, _clock(rules, state), 0)
    features = jnp.concatenate([rows, clock[:, None]], axis=1)
    return {"tagger": features[: rules.num_taggers], "runner": features[rules.num_taggers :]}


def _see_nearest(
    rules: TagContinuousRules, state: TagContinuousState, scaled: Float[Array, "5 A"]
) -> Float[Array, "A 7 K"]:
    count = rules.num_other_agents_observed
    places, own_index = (state.x, state.y), jnp.arange(rules.num_agents)
    others, exists, _ = nearest(places, places, where=state.in_game, exclude=own_index, count=count)
    differences = scaled[:, others] - scaled[:, :, None]
    taggers = (others < rules.num_taggers).astype(jnp.float32)
    rows = jnp.concatenate([differences, taggers[None], jnp.ones_like(taggers)[None]])
    visible = jnp.where((exists & state.in_game[:, None])[None], rows, 0)
    return jnp.moveaxis(visible, 0, 1)


def _see_all(
    rules: TagContinuousRules, state: TagContinuousState, scaled: Float[Array, "5 A"]
) -> Float[Array, "A 7 K"]:
    size = rules.num_agents
    differences = scaled[:, None, :] - scaled[:, :, None]
    differences = jnp.where(state.in_game[None, :, None], differences, 0)
    flags = jnp.stack([_is_tagger(rules), state.in_game]).astype(jnp.float32)
    flags = jnp.broadcast_to(flags[:, None, :], (2, size, size))
    return jnp.moveaxis(_off_diagonal(jnp.concatenate([differences, flags])), 0, 1)


def _off_diagonal(square: Float[Array, "7 A A"]) -> Float[Array, "7 A A-1"]:
    """Removes the diagonal of each square, without a gather.

    In the flattened square without its first entry, the rest of the diagonal is every `A + 1`-th entry: the last
    column of rows of that length.
    """
    rows, size = square.shape[0], square.shape[1]
    flat = square.reshape(rows, -1)[:, 1:].reshape(rows, size - 1, size + 1)
    return flat[:, :, :-1].reshape(rows, size, size - 1)


def central(
    rules: TagContinuousRules, state: TagContinuousState, params: TagContinuousParams
) -> Float[Array, " features"]:
    """Returns features of the whole game, for a centralised critic.

    The features are `x`, `y`, speed, acceleration and direction of all agents, a flag for each runner that says
    whether it is still in the game, and the time. All are scaled as in observations.
    """
    free = state.in_game[rules.num_taggers :].astype(jnp.float32)
    return jnp.concatenate([_scale(state, params).reshape(-1), free, _clock(rules, state)[None]])


def _scale(state: TagContinuousState, params: TagContinuousParams) -> Float[Array, "5 A"]:
    """Returns place, speed, acceleration and direction in the units of observations."""
    diagonal = params.grid_length * np.sqrt(2).item()
    max_speed = params.max_speed + 1e-10
    rows = (
        state.x / diagonal,
        state.y / diagonal,
        state.speed / max_speed,
        state.acceleration / max_speed,
        state.direction / (2 * np.pi),
    )
    return jnp.stack(rows)


def _clock(rules: TagContinuousRules, state: TagContinuousState) -> Float[Array, ""]:
    return state.time.astype(jnp.float32) / rules.max_steps


def tag_continuous_small() -> Environment:
    """Three taggers hunt nine slower runners for 100 steps: TagContinuous-v0 on a square of side 10.

    Runners are half as fast, there are 5 choices of acceleration and of turn, and each agent sees its 4
    nearest neighbours.
    """
    env = tag_continuous(
        num_taggers=3,
        num_runners=9,
        max_steps=100,
        num_acceleration_levels=4,
        num_turn_levels=4,
        num_other_agents_observed=4,
    )
    params = dataclasses.replace(env.params, grid_length=10.0, skill_level_runner=0.5)
    return env._replace(name="TagContinuous-Small-v0", params=params)
