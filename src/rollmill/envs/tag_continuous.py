"""TagContinuous-v0: taggers hunt runners on a continuous square.

Lan, Srinivasa, Wang and Zheng, "WarpDrive: extremely fast end-to-end deep multi-agent reinforcement
learning on a GPU" (JMLR 2022); step by step the positions, speeds, observations, rewards and ends of the NumPy
environment `TagContinuous` of rl-warp-drive 2.7.1. Its peculiarities are rules here too:

- Observations are made before tags are dealt with: a runner that is tagged in a step is still seen in it, and
  still sees, and goes out only then.
- An action adds to the acceleration, and the acceleration to the speed in every step, until the speed meets a
  bound; there the acceleration becomes 0.
- Only the nearest tagger is paid for a tag; it may tag several runners at once.
- An agent that is out keeps its place, its speed and its direction become 0, and it is paid nothing.
- Accelerations are observed in units of the greatest speed; nobody sees its own place, speed or direction.
- The clock is part of the observation, and the last step terminates the episode: no value follows it.

That environment draws first places and directions once and begins every episode with them; here each episode
draws its own. Its CUDA kernels differ from it in one point: there a runner that is tagged in the last step is
paid for the end of the game all the same.

Shape letters: `A` agents, `G` taggers before `R` runners; `F` numbers of an observation.
"""

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, Int

from rollmill.core.errors import UsageError
from rollmill.core.types import AgentKind, Environment, Key, Timestep
from rollmill.envs.agents import joint_spaces
from rollmill.envs.nearest import nearest
from rollmill.envs.physics import Scalar

DIRECTIONS = np.array([0.0, np.pi / 2, np.pi, 3 * np.pi / 2], np.float32)
"""Where agents may face at first (rad)."""

NUM_FEATURES = 7
"""Numbers that are seen of each other agent."""


class TagContinuousState(eqx.Module):
    """Places, speeds (per step), directions (rad, within [0, 2 pi)) and accelerations of all agents.

    Besides, who is still in the game (taggers always are), and the number of steps so far.
    """

    x: Float[Array, " A"]
    y: Float[Array, " A"]
    speed: Float[Array, " A"]
    direction: Float[Array, " A"]
    acceleration: Float[Array, " A"]
    in_game: Bool[Array, " A"]
    time: Int[Array, ""]


class TagContinuousParams(eqx.Module):
    """The square, what agents can do, and what they are paid; every leaf may be one value per replica.

    Rewards and penalties are added as they are: a penalty is a negative number.
    """

    accelerations: Float[Array, "..."] | Float[np.ndarray, "..."]
    """What each choice adds to the acceleration, `[num_acceleration_levels + 1]`, as `action_levels` gives it."""
    turns: Float[Array, "..."] | Float[np.ndarray, "..."]
    """What each choice adds to the direction (rad), `[num_turn_levels + 1]`."""
    grid_length: Scalar = 20.0
    """The side of the square."""
    max_speed: Scalar = 1.0
    skill_level_tagger: Scalar = 1.0
    skill_level_runner: Scalar = 1.0
    """Multiples of `max_speed` that each kind reaches."""
    tagging_distance: Scalar = 0.02
    """A runner that is nearer to a tagger is tagged; in units of the side."""
    tag_reward_for_tagger: Scalar = 10.0
    step_penalty_for_tagger: Scalar = 0.0
    tag_penalty_for_runner: Scalar = -10.0
    step_reward_for_runner: Scalar = 0.0
    end_of_game_reward_for_runner: Scalar = 1.0
    """In the last step, for runners that are in the game after it."""
    edge_hit_penalty: Scalar = 0.0
    """In a step that would have led out of the square."""


class TagContinuousRules(NamedTuple):
    """What fixes shapes and the program."""

    num_taggers: int
    num_runners: int
    max_steps: int
    use_full_observation: bool
    num_other_agents_observed: int
    runner_exits_game_after_tagged: bool

    @property
    def num_agents(self) -> int:
        """Taggers and runners."""
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
    """Taggers hunt runners on a square, a choice of acceleration and of turn each (WarpDrive's TagContinuous).

    The kinds are `tagger` and `runner`. An agent sees of each of its nearest neighbours that are in the game,
    nearest first, or with `use_full_observation` of all other agents, taggers first: the differences in `x`,
    `y`, speed, acceleration and direction, whether it is a tagger, and whether it is in the game. An
    observation is the row of each of these 7 over the others, then the time: `F = 7 K + 1`. Differences are in
    units of the square's diagonal, of the greatest speed (twice), and of a turn; the time in units of
    `max_steps`. What is missing, and all that an agent sees that is out, is 0; with `use_full_observation`, such
    an agent still sees the last two rows.

    With `use_full_observation`, observations take `7 A^2` numbers: 28 MB for 1,000 agents.

    Args:
        num_taggers: at least 1.
        num_runners: at least 1.
        max_steps: the length of an episode in which not all runners are tagged, in steps; at least 1.
        num_acceleration_levels: choices between -0.1 and 0.1, besides 0; at least 1.
        num_turn_levels: choices between -2.356 and 2.356 rad, besides 0; at least 1.
        use_full_observation: each agent sees all others.
        num_other_agents_observed: otherwise, how many neighbours it sees: `K`, from 1 to all others.
        runner_exits_game_after_tagged: runners go out where they are tagged, instead of running on.

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
    seen = spaces.Box(-np.inf, np.inf, (NUM_FEATURES * _num_others(rules) + 1,), np.float32)
    choices = spaces.MultiDiscrete([num_acceleration_levels + 1, num_turn_levels + 1])
    agents = (
        AgentKind("tagger", num_taggers, seen, choices),
        AgentKind("runner", num_runners, seen, choices),
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
    )


def action_levels(low: float, high: float, count: int) -> Float[np.ndarray, " choices"]:
    """What each choice adds: nothing, or one of `count` equally spaced amounts from `low` to `high`."""
    return np.concatenate([[0.0], np.linspace(np.float32(low), np.float32(high), count)]).astype(np.float32)


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
    """Everybody starts at rest, anywhere on the square, facing one of its four sides."""
    place_key, direction_key = jax.random.split(key)
    x, y = params.grid_length * jax.random.uniform(place_key, (2, rules.num_agents))
    still = jnp.zeros(rules.num_agents, jnp.float32)
    facing = jax.random.randint(direction_key, (rules.num_agents,), 0, len(DIRECTIONS))
    everybody = jnp.ones(rules.num_agents, bool)
    state = TagContinuousState(x, y, still, jnp.asarray(DIRECTIONS)[facing], still, everybody, jnp.int32(0))
    return observe(rules, state, params), state


def step(
    rules: TagContinuousRules,
    key: Key,
    state: TagContinuousState,
    action: dict[str, Int[Array, "_ 2"]],
    params: TagContinuousParams,
) -> Timestep:
    """Every agent's acceleration and direction change by its two choices; all move, then tags are dealt with."""
    choices = jnp.concatenate([action["tagger"], action["runner"]])
    moved, hit = _move(rules, state, choices, params)
    tagged, nearest_tagger = _tags(rules, moved, params)
    in_game = moved.in_game
    if rules.runner_exits_game_after_tagged:
        in_game = in_game.at[rules.num_taggers :].set(in_game[rules.num_taggers :] & ~tagged)
    after = eqx.tree_at(lambda s: s.in_game, moved, in_game)
    ends = moved.time >= rules.max_steps
    return Timestep(
        observation=observe(rules, moved, params),
        state=after,
        reward=_rewards(rules, after, moved.in_game, hit, tagged, nearest_tagger, params),
        terminated=ends | ~jnp.any(in_game[rules.num_taggers :]),
        truncated=jnp.zeros((), bool),
        info={},
    )


def _move(
    rules: TagContinuousRules, state: TagContinuousState, choices: Int[Array, "A 2"], params: TagContinuousParams
) -> tuple[TagContinuousState, Bool[Array, " A"]]:
    """Everybody after one step, in the game as before, and who would have left the square."""
    turned = state.direction + jnp.asarray(params.turns)[choices[:, 1]]
    direction = jnp.where(state.in_game, jnp.mod(turned, 2 * np.pi), 0)
    acceleration = state.acceleration + jnp.asarray(params.accelerations)[choices[:, 0]]
    limit = _max_speeds(rules, params)
    speed = jnp.where(state.in_game, jnp.clip(state.speed + acceleration, 0, limit), 0)
    acceleration = jnp.where((speed > 0) & (speed < limit), acceleration, 0)
    x, y = state.x + speed * jnp.cos(direction), state.y + speed * jnp.sin(direction)
    held_x, held_y = (jnp.clip(place, 0, params.grid_length) for place in (x, y))
    moved = TagContinuousState(held_x, held_y, speed, direction, acceleration, state.in_game, state.time + 1)
    return moved, (held_x != x) | (held_y != y)


def _max_speeds(rules: TagContinuousRules, params: TagContinuousParams) -> Float[Array, " A"]:
    skill = jnp.where(_is_tagger(rules), params.skill_level_tagger, params.skill_level_runner)
    return params.max_speed * skill


def _is_tagger(rules: TagContinuousRules) -> Bool[Array, " A"]:
    return jnp.arange(rules.num_agents) < rules.num_taggers


def _tags(
    rules: TagContinuousRules, state: TagContinuousState, params: TagContinuousParams
) -> tuple[Bool[Array, " R"], Int[Array, " R"]]:
    """Of each runner whether it is tagged, and which tagger is nearest to it."""
    count = rules.num_taggers
    taggers, runners = ((state.x[part], state.y[part]) for part in (slice(count), slice(count, None)))
    found = nearest(runners, taggers, where=state.in_game[:count])
    near = jnp.sqrt(found.squared_distance[:, 0]) < params.tagging_distance * params.grid_length
    return near & state.in_game[count:], found.index[:, 0]


def _rewards(
    rules: TagContinuousRules,
    after: TagContinuousState,
    were_in_game: Bool[Array, " A"],
    hit: Bool[Array, " A"],
    tagged: Bool[Array, " R"],
    nearest_tagger: Int[Array, " R"],
    params: TagContinuousParams,
) -> dict[str, Float[Array, " _"]]:
    """What each agent is paid."""
    count = rules.num_taggers
    each = jnp.where(_is_tagger(rules), params.step_penalty_for_tagger, params.step_reward_for_runner)
    each = jnp.where(were_in_game, each + jnp.where(hit, params.edge_hit_penalty, 0), 0)
    own = tagged[None] & (nearest_tagger[None] == jnp.arange(count)[:, None])
    catch = jnp.sum(own.astype(jnp.float32), axis=1) * params.tag_reward_for_tagger
    stays = (after.time == rules.max_steps) & after.in_game[count:]
    fate = jnp.where(tagged, params.tag_penalty_for_runner, 0)
    fate = fate + jnp.where(stays, params.end_of_game_reward_for_runner, 0)
    return {"tagger": each[:count] + catch, "runner": (each[count:] + fate).astype(jnp.float32)}


# --- what is seen -------------------------------------------------------------------------------------


def observe(
    rules: TagContinuousRules, state: TagContinuousState, params: TagContinuousParams
) -> dict[str, Float[Array, "_ F"]]:
    """What each agent sees, as `tag_continuous` describes it."""
    scaled = _scaled(state, params)
    see = _see_all if rules.use_full_observation else _see_nearest
    rows = see(rules, state, scaled).reshape(rules.num_agents, -1)
    clock = jnp.where(state.in_game, _clock(rules, state), 0)
    seen = jnp.concatenate([rows, clock[:, None]], axis=1)
    return {"tagger": seen[: rules.num_taggers], "runner": seen[rules.num_taggers :]}


def _see_nearest(
    rules: TagContinuousRules, state: TagContinuousState, scaled: Float[Array, "5 A"]
) -> Float[Array, "A 7 K"]:
    count = rules.num_other_agents_observed
    at, itself = (state.x, state.y), jnp.arange(rules.num_agents)
    others, exists, _ = nearest(at, at, where=state.in_game, exclude=itself, count=count)
    differences = scaled[:, others] - scaled[:, :, None]
    taggers = (others < rules.num_taggers).astype(jnp.float32)
    rows = jnp.concatenate([differences, taggers[None], jnp.ones_like(taggers)[None]])
    seen = jnp.where((exists & state.in_game[:, None])[None], rows, 0)
    return jnp.moveaxis(seen, 0, 1)


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
    """Rows without the entry on the diagonal, without a gather.

    After the first entry, the diagonal is every `A + 1`-th: the last column of rows of that length.
    """
    rows, size = square.shape[0], square.shape[1]
    flat = square.reshape(rows, -1)[:, 1:].reshape(rows, size - 1, size + 1)
    return flat[:, :, :-1].reshape(rows, size, size - 1)


def central(
    rules: TagContinuousRules, state: TagContinuousState, params: TagContinuousParams
) -> Float[Array, " features"]:
    """The whole in one vector: `x`, `y`, speed, acceleration and direction of all, which runners are in the
    game, and the time; in the units of observations.
    """
    free = state.in_game[rules.num_taggers :].astype(jnp.float32)
    return jnp.concatenate([_scaled(state, params).reshape(-1), free, _clock(rules, state)[None]])


def _scaled(state: TagContinuousState, params: TagContinuousParams) -> Float[Array, "5 A"]:
    """Place, speed, acceleration and direction in the units in which they are seen."""
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
