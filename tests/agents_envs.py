"""Environments of several agents with known answers, one for each thing that can go wrong with them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array

from rollmill import Environment, Timestep
from rollmill.core.types import AgentKind
from rollmill.envs import joint_spaces

SIGN = spaces.Box(-1.0, 1.0, (1,))
NOTHING = spaces.Box(0.0, 1.0, (1,))
NO, YES = np.zeros((), bool), np.ones((), bool)


def of_kinds(name, reset, step, *kinds, **more):
    return Environment(name, reset, step, *joint_spaces(kinds), agents=kinds, **more)


def lone(env, central=None):
    """An environment of one agent as one of several: a single kind of a single agent."""
    wrap = lambda tree: {"only": jax.tree.map(lambda leaf: leaf[None], tree)}

    def reset(key, params):
        observation, state = env.reset(key, params)
        return wrap(observation), state

    def step(key, state, action, params):
        timestep = env.step(key, state, action["only"][0], params)
        return timestep._replace(observation=wrap(timestep.observation), reward=wrap(timestep.reward))

    kind = AgentKind("only", 1, env.observation_space, env.action_space)
    return of_kinds(f"Lone-{env.name}", reset, step, kind, params=env.params, central=central)


class Shown(eqx.Module):
    """The observation of each kind, and the legal actions of the last."""

    shown: dict[str, Array]
    legal: Array


def crafts():
    """One step; four kinds with action spaces of their own, each of which is paid 1 for the right action.

    Two readers choose the sign that they see, a painter paints the number that it sees, two packers choose a
    pair, three clerks choose one of two legal actions out of four; wrong choices pay less.
    """
    kinds = (
        AgentKind("reader", 2, SIGN, spaces.Discrete(2)),
        AgentKind("painter", 1, spaces.Dict(hue=SIGN), spaces.Box(-1.0, 1.0, (1,))),
        AgentKind("packer", 2, spaces.Box(0.0, 2.0, (2,)), spaces.MultiDiscrete([2, 3])),
        AgentKind("clerk", 3, NOTHING, spaces.Discrete(4)),
    )

    def reset(key, params):
        sign_key, hue_key, pair_key, legal_key = jax.random.split(key, 4)
        pair = jax.random.randint(pair_key, (2, 2), jnp.zeros((2, 2), jnp.int32), jnp.asarray([[2, 3], [2, 3]]))
        order = jax.vmap(lambda k: jax.random.permutation(k, 4))(jax.random.split(legal_key, 3))
        shown = {
            "reader": jax.random.rademacher(sign_key, (2, 1), jnp.float32),
            "painter": {"hue": jax.random.uniform(hue_key, (1, 1), minval=-1.0)},
            "packer": pair.astype(jnp.float32),
            "clerk": jnp.zeros((3, 1), jnp.float32),
        }
        return shown, Shown(shown, order < 2)

    def step(key, state, action, params):
        shown = state.shown
        right = action["packer"].astype(jnp.float32) == shown["packer"]
        reward = {
            "reader": jnp.where((action["reader"] == 1) == (shown["reader"][:, 0] > 0), 1.0, -1.0),
            "painter": 1.0 - jnp.square(action["painter"] - shown["painter"]["hue"])[:, 0],
            "packer": jnp.mean(right.astype(jnp.float32), axis=1),
            "clerk": jnp.where(jnp.take_along_axis(state.legal, action["clerk"][:, None], 1)[:, 0], 1.0, -1.0),
        }
        return Timestep(shown, state, reward, YES, NO, {})

    return of_kinds("Crafts", reset, step, *kinds, action_mask=lambda state, params: {"clerk": state.legal})


def opposed():
    """One step; the left one is paid for action 0, the right one for action 1. They see nothing."""

    def reset(key, params):
        return {"left": jnp.zeros((1, 1), jnp.float32), "right": jnp.zeros((1, 1), jnp.float32)}, jnp.float32(0)

    def step(key, state, action, params):
        reward = {"left": 1 - 2 * action["left"], "right": 2 * action["right"] - 1}
        reward = {name: paid.astype(jnp.float32) for name, paid in reward.items()}
        return Timestep(reset(key, params)[0], state, reward, YES, NO, {})

    kinds = (AgentKind(name, 1, NOTHING, spaces.Discrete(2)) for name in ("left", "right"))
    return of_kinds("Opposed", reset, step, *kinds)


def numbered():
    """One step; of three agents of one kind the first is paid for action 0, the second for 1, the third for 2."""

    def reset(key, params):
        return {"agent": jnp.zeros((3, 1), jnp.float32)}, jnp.float32(0)

    def step(key, state, action, params):
        reward = {"agent": (action["agent"] == jnp.arange(3)).astype(jnp.float32)}
        return Timestep(reset(key, params)[0], state, reward, YES, NO, {})

    return of_kinds("Numbered", reset, step, AgentKind("agent", 3, NOTHING, spaces.Discrete(3)))


class Clock(eqx.Module):
    """How many steps the episode has had."""

    steps: Array


def unseen_clock():
    """Cut every four steps; only `central` tells the first step, which pays -10, from others, which pay 1.

    So the values that only a centralised critic can tell apart are 1 / (1 - gamma), and
    -10 + gamma / (1 - gamma) at the start; the former only if the critic sees the whole of a final state.
    """

    def reset(key, params):
        return {"agent": jnp.zeros((2, 1), jnp.float32)}, Clock(jnp.int32(0))

    def step(key, state, action, params):
        reward = jnp.full(2, jnp.where(state.steps == 0, -10.0, 1.0), jnp.float32)
        cut = state.steps == 3
        observation, _ = reset(key, params)
        return Timestep(observation, Clock(state.steps + 1), {"agent": reward}, NO, cut, {})

    return of_kinds(
        "UnseenClock",
        reset,
        step,
        AgentKind("agent", 2, NOTHING, spaces.Discrete(2)),
        central=lambda state, params: (state.steps > 0).astype(jnp.float32)[None],
    )


class Crowd(eqx.Module):
    """The numbers that all see, and who takes part."""

    numbers: Array
    active: Array


def crowd():
    """Two kinds whose agents go out, and whose episodes terminate, are cut, or both, at random and often.

    `walker`: three agents, of which each goes out with probability 0.3 a step; `keeper`: one that stays.
    """
    kinds = (
        AgentKind("walker", 3, spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(3)),
        AgentKind("keeper", 1, spaces.Box(-np.inf, np.inf, (4,)), spaces.Box(-1.0, 1.0, (2,))),
    )

    def show(numbers):
        return {"walker": numbers[:, :2], "keeper": numbers[None, 0, :]}

    def reset(key, params):
        numbers = 3 + 2 * jax.random.normal(key, (3, 4))
        return show(numbers), Crowd(numbers, jnp.ones(3, bool))

    def step(key, state, action, params):
        move_key, leave_key, terminate_key, cut_key = jax.random.split(key, 4)
        numbers = 3 + 2 * jax.random.normal(move_key, (3, 4))
        stays = jax.random.bernoulli(leave_key, 0.7, (3,))
        walked = state.numbers[:, 0] * action["walker"].astype(jnp.float32) - state.numbers[:, 1]
        kept = action["keeper"].sum(axis=1) + state.numbers[0, 3]
        return Timestep(
            observation=show(numbers),
            state=Crowd(numbers, state.active & stays),
            reward={"walker": walked, "keeper": kept},
            terminated=jax.random.bernoulli(terminate_key, 0.15),
            truncated=jax.random.bernoulli(cut_key, 0.15),
            info={},
        )

    return of_kinds("Crowd", reset, step, *kinds, active=lambda state, params: {"walker": state.active})


class Squad(eqx.Module):
    """The numbers that the agents of `squad` see, their legal actions, and who takes part."""

    numbers: Array
    scouts: Array
    medic: Array
    active: Array


def squad():
    """A team of two kinds, with legal actions at random; its episodes terminate, are cut, or both.

    `scout`: two agents with three actions, of which each goes out with probability 0.3 a step; `medic`: one that
    stays, with two actions that count from 1. The rewards of a kind's agents differ.
    """
    kinds = (
        AgentKind("scout", 2, spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(3)),
        AgentKind("medic", 1, spaces.Box(-np.inf, np.inf, (3,)), spaces.Discrete(2, start=1)),
    )

    def show(numbers):
        return {"scout": numbers[:2, :2], "medic": numbers[2:]}

    def draw(key, active):
        number_key, scout_key, medic_key = jax.random.split(key, 3)
        first = lambda legal: legal.at[..., 0].set(legal[..., 0] | ~legal.any(axis=-1))
        scouts = first(jax.random.bernoulli(scout_key, 0.6, (2, 3)))
        medic = first(jax.random.bernoulli(medic_key, 0.6, (1, 2)))
        return Squad(jax.random.normal(number_key, (3, 3)), scouts, medic, active)

    def reset(key, params):
        state = draw(key, jnp.ones(2, bool))
        return show(state.numbers), state

    def step(key, state, action, params):
        move_key, leave_key, terminate_key, cut_key = jax.random.split(key, 4)
        after = draw(move_key, state.active & jax.random.bernoulli(leave_key, 0.7, (2,)))
        scouted = state.numbers[:2, 0] * action["scout"].astype(jnp.float32)
        healed = state.numbers[2:, 2] * action["medic"].astype(jnp.float32)
        return Timestep(
            observation=show(after.numbers),
            state=after,
            reward={"scout": scouted, "medic": healed},
            terminated=jax.random.bernoulli(terminate_key, 0.15),
            truncated=jax.random.bernoulli(cut_key, 0.15),
            info={},
        )

    return of_kinds(
        "Squad",
        reset,
        step,
        *kinds,
        active=lambda state, params: {"scout": state.active},
        action_mask=lambda state, params: {"scout": state.scouts, "medic": state.medic},
    )
