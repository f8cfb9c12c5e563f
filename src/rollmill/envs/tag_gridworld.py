"""TagGridWorld-v0: taggers hunt runners on a square grid.

With one runner, positions, observations, rewards and ends of episodes equal, step by step, the NumPy environment
`TagGridWorld` of rl-warp-drive 2.7.1 (Lan, Srinivasa, Wang and Zheng, "WarpDrive: extremely fast end-to-end deep
multi-agent reinforcement learning on a GPU", JMLR 2022). Its peculiarities are kept:

- Coordinates run from 0 to `grid_length` inclusive.
- All taggers are rewarded for a tag, not only the one on the runner's cell.
- In every step, a free runner is rewarded with the step cost of a tagger.
- The clock is part of the observation, and the last step terminates the episode: nothing is bootstrapped.

WarpDrive has a single runner, and the episode ends when it is tagged. With several runners, each leaves the game
when it is tagged, the taggers are rewarded for every tag of a step, and the episode ends when the last runner is
tagged.

Shape letters: `A` agents, `num_taggers` taggers before `num_runners` runners, and `F` features of an observation.
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
from rollmill.envs.drawings.tag import draw_grid
from rollmill.envs.physics import Scalar

MOVES = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]], np.int32)
"""Change of `x` and `y` by each action."""


class TagGridWorldState(eqx.Module):
    """State of TagGridWorld: cells of all agents, flags of those still in the game, and the steps so far."""

    x: Int[Array, " A"]
    y: Int[Array, " A"]
    in_game: Bool[Array, " A"]
    time: Int[Array, ""]


class TagGridWorldParams(eqx.Module):
    """Size of the grid and rewards of TagGridWorld. Each field may hold one value per environment."""

    grid_length: Int[Array, "..."] | int = 100
    """The largest coordinate."""
    wall_hit_penalty: Scalar = 0.1
    """Cost of walking into a wall."""
    tag_reward_for_tagger: Scalar = 10.0
    """Reward of every tagger for each runner tagged in a step."""
    tag_penalty_for_runner: Scalar = 5.0
    """Cost of being tagged."""
    step_cost_for_tagger: Scalar = 0.01
    """Cost of a step without a tag for taggers, and reward of a step for free runners."""


class TagGridWorldRules(NamedTuple):
    """Settings of TagGridWorld that determine shapes and the traced program."""

    num_taggers: int
    num_runners: int
    max_steps: int
    use_full_observation: bool
    random_start: bool

    @property
    def num_agents(self) -> int:
        """Total number of taggers and runners."""
        return self.num_taggers + self.num_runners


def tag_gridworld(
    *,
    num_taggers: int = 4,
    num_runners: int = 1,
    max_steps: int = 100,
    use_full_observation: bool = True,
    random_start: bool = False,
) -> Environment:
    """Taggers hunt runners on a grid, 5 actions each (TagGridWorld of WarpDrive).

    The kinds are `tagger` and `runner`. With `use_full_observation`, an agent's observation has four rows over all
    taggers and then all runners: `x`, `y`, the type (1 for runners), and a flag of the agent itself. If there are
    several runners, a fifth row flags the agents that are still in the game. The last element is the time, so `F`
    is `4 A + 1` or `5 A + 1`. Otherwise it is `[x, y, x and y of the nearest opponent, type, time]`. For taggers,
    only free runners are opponents. Coordinates are divided by `grid_length`, the time by `max_steps`.

    Args:
        num_taggers: number of taggers, at least 1.
        num_runners: number of runners, at least 1.
        max_steps: length of an episode in which not all runners are tagged, in steps, at least 1.
        use_full_observation: agents observe all others, instead of the nearest opponent.
        random_start: taggers start anywhere except at the walls, instead of all in the centre.

    Raises:
        UsageError: a number is below 1.
    """
    rules = TagGridWorldRules(num_taggers, num_runners, max_steps, use_full_observation, random_start)
    for name in ("num_taggers", "num_runners", "max_steps"):
        if getattr(rules, name) < 1:
            raise UsageError(f"TagGridWorld-v0: {name}={getattr(rules, name)} must be at least 1.")
    features = spaces.Box(0.0, 1.0, (_num_features(rules),), np.float32)
    agents = (
        AgentKind("tagger", num_taggers, features, spaces.Discrete(len(MOVES))),
        AgentKind("runner", num_runners, features, spaces.Discrete(len(MOVES))),
    )
    observation_space, action_space = joint_spaces(agents)
    return Environment(
        name="TagGridWorld-v0",
        reset=partial(reset, rules),
        step=partial(step, rules),
        observation_space=observation_space,
        action_space=action_space,
        params=TagGridWorldParams(),
        agents=agents,
        active=lambda state, params: {"runner": state.in_game[num_taggers:]},
        central=partial(central, rules),
        draw=partial(_draw, rules),
    )


def _draw(rules: TagGridWorldRules, state: TagGridWorldState, params: TagGridWorldParams) -> Drawing:
    places = (np.asarray(part) for part in (state.x, state.y, state.in_game))
    return draw_grid(*places, num_taggers=rules.num_taggers, cells=int(params.grid_length) + 1)


def _num_features(rules: TagGridWorldRules) -> int:
    if not rules.use_full_observation:
        return 6
    return (4 if rules.num_runners == 1 else 5) * rules.num_agents + 1


def reset(
    rules: TagGridWorldRules, key: Key, params: TagGridWorldParams
) -> tuple[dict[str, Float[Array, "_ F"]], TagGridWorldState]:
    """Starts an episode of TagGridWorld.

    Taggers start in the centre, or anywhere except at the walls. Runners start in the corner `(0, 0)`.
    """
    length = jnp.asarray(params.grid_length, jnp.int32)
    cells = jnp.broadcast_to(length // 2, (2, rules.num_taggers))
    if rules.random_start:
        cells = jax.random.randint(key, (2, rules.num_taggers), 1, jnp.maximum(length, 2))
    x, y = jnp.concatenate([cells, jnp.zeros((2, rules.num_runners), jnp.int32)], axis=1)
    state = TagGridWorldState(x, y, jnp.ones(rules.num_agents, bool), jnp.int32(0))
    return observe(rules, state, params), state


def step(
    rules: TagGridWorldRules,
    key: Key,
    state: TagGridWorldState,
    action: dict[str, Int[Array, " _"]],
    params: TagGridWorldParams,
) -> Timestep:
    """Moves all agents at once by one cell: right (1), left (2), up (3), down (4), or none (0)."""
    x, y, hit = _walk(state, jnp.concatenate([action["tagger"], action["runner"]]), params)
    free = state.in_game[rules.num_taggers :]
    tagged = free & _share_a_cell(rules, x, y)
    in_game = state.in_game.at[rules.num_taggers :].set(free & ~tagged)
    moved = TagGridWorldState(x, y, in_game, state.time + 1)
    ends = ~jnp.any(in_game[rules.num_taggers :]) | (moved.time >= rules.max_steps)
    return Timestep(
        observation=observe(rules, moved, params),
        state=moved,
        reward=_rewards(rules, hit, free, tagged, params),
        terminated=ends,
        truncated=jnp.zeros((), bool),
        info={},
    )


def _walk(
    state: TagGridWorldState, action: Int[Array, " A"], params: TagGridWorldParams
) -> tuple[Int[Array, " A"], Int[Array, " A"], Bool[Array, " A"]]:
    """Returns the next cells, and flags of agents that hit a wall. Tagged agents do not move."""
    length = jnp.asarray(params.grid_length, jnp.int32)
    cells = jnp.stack([state.x, state.y])
    target = cells + jnp.where(state.in_game[None], jnp.asarray(MOVES.T)[:, action], 0)
    x, y = clipped = jnp.clip(target, 0, length)
    return x, y, jnp.any(clipped != target, axis=0)


def _share_a_cell(rules: TagGridWorldRules, x: Int[Array, " A"], y: Int[Array, " A"]) -> Bool[Array, " R"]:
    """Returns, for each runner, whether a tagger is in its cell."""
    same = [p[: rules.num_taggers, None] == p[None, rules.num_taggers :] for p in (x, y)]
    return jnp.any(same[0] & same[1], axis=0)


def _rewards(
    rules: TagGridWorldRules,
    hit: Bool[Array, " A"],
    free: Bool[Array, " R"],
    tagged: Bool[Array, " R"],
    params: TagGridWorldParams,
) -> dict[str, Float[Array, " _"]]:
    """Returns the reward of each agent. `free` marks the runners that were free before the step."""
    penalty = jnp.where(hit, jnp.float32(params.wall_hit_penalty), 0)
    cost = jnp.float32(params.step_cost_for_tagger)
    tags = jnp.sum(tagged).astype(jnp.float32)
    tagger = jnp.where(tags > 0, tags * params.tag_reward_for_tagger, -cost)
    runner = jnp.where(tagged, -jnp.float32(params.tag_penalty_for_runner), jnp.where(free, cost, 0))
    return {"tagger": tagger - penalty[: rules.num_taggers], "runner": runner - penalty[rules.num_taggers :]}


def observe(
    rules: TagGridWorldRules, state: TagGridWorldState, params: TagGridWorldParams
) -> dict[str, Float[Array, "_ F"]]:
    """Returns the observation of each agent, in the form that `tag_gridworld` describes."""
    observe_others = _see_all if rules.use_full_observation else _see_nearest
    features = observe_others(rules, state, params)
    return {"tagger": features[: rules.num_taggers], "runner": features[rules.num_taggers :]}


def _see_all(
    rules: TagGridWorldRules, state: TagGridWorldState, params: TagGridWorldParams
) -> Float[Array, "A F"]:
    for_all = lambda row: jnp.broadcast_to(row, (rules.num_agents, row.size))
    x, y = _scale(state, params)
    columns = [for_all(x), for_all(y), for_all(_types(rules)), jnp.eye(rules.num_agents, dtype=jnp.float32)]
    if rules.num_runners > 1:
        columns.append(for_all(state.in_game.astype(jnp.float32)))
    return jnp.concatenate([*columns, for_all(_clock(rules, state))], axis=1)


def _see_nearest(
    rules: TagGridWorldRules, state: TagGridWorldState, params: TagGridWorldParams
) -> Float[Array, "A 6"]:
    count = rules.num_taggers
    steps = [p[:count, None] - p[None, count:] for p in (state.x, state.y)]
    distance = jnp.square(steps[0]) + jnp.square(steps[1])
    free = jnp.where(state.in_game[None, count:], distance, jnp.iinfo(jnp.int32).max)
    nearest = jnp.concatenate([count + jnp.argmin(free, axis=1), jnp.argmin(distance, axis=0)])
    x, y = _scale(state, params)
    clock = jnp.broadcast_to(_clock(rules, state), (rules.num_agents,))
    return jnp.stack([x, y, x[nearest], y[nearest], _types(rules), clock], axis=1)


def central(
    rules: TagGridWorldRules, state: TagGridWorldState, params: TagGridWorldParams
) -> Float[Array, " features"]:
    """Returns the central features of TagGridWorld, for a centralised critic.

    They are `x` and `y` of all agents, flags of free runners if there are several, and the time.
    """
    free = state.in_game[rules.num_taggers :].astype(jnp.float32)
    return jnp.concatenate(
        [*_scale(state, params), *([free] if rules.num_runners > 1 else []), _clock(rules, state)]
    )


def _scale(state: TagGridWorldState, params: TagGridWorldParams) -> Float[Array, "2 A"]:
    """Returns both coordinates divided by `grid_length`."""
    length = jnp.asarray(params.grid_length, jnp.float32)
    return jnp.stack([state.x, state.y]).astype(jnp.float32) / length


def _types(rules: TagGridWorldRules) -> Float[Array, " A"]:
    return (jnp.arange(rules.num_agents) >= rules.num_taggers).astype(jnp.float32)


def _clock(rules: TagGridWorldRules, state: TagGridWorldState) -> Float[Array, "1"]:
    return state.time.astype(jnp.float32)[None] / rules.max_steps


def tag_gridworld_small() -> Environment:
    """Four taggers hunt a runner on 21 x 21 cells: TagGridWorld-v0 with `grid_length` 20.

    On the 101 x 101 cells of TagGridWorld-v0, a runner that stays in its corner cannot be reached in fewer than
    the 100 steps of an episode.
    """
    env = tag_gridworld()
    params = dataclasses.replace(env.params, grid_length=20)
    return env._replace(name="TagGridWorld-Small-v0", params=params)
