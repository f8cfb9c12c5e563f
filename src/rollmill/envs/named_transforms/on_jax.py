"""Applies named transforms to environments written in JAX."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from rollmill.core.types import Action, Environment, Key, Observation, Params, State, Timestep
from rollmill.envs.field_checks import as_timestep
from rollmill.envs.named_transforms.definition import Transform
from rollmill.envs.strong_types import strongly_typed
from rollmill.envs.transforms import wrap

DRAW_FOLD = 0x4452_4157
"""Constant that is folded into a step's key, plus the transform's number, for the random draw of a transform."""


class TransformedState(eqx.Module):
    """The state of a transformed environment: the inner state, and the memory of the transform."""

    inner: State
    memory: PyTree[Array]


def on_environment(env: Environment, transform: Transform, number: int) -> Environment:
    """Applies a named transform to an unbatched environment without auto-reset.

    `number` is the index of the transform. It makes two transforms of one environment use different random keys.
    """
    env = strongly_typed(env)
    inner_step = env.step if transform.repeats == 1 else _repeat_action(env, transform.repeats)

    def reset(key: Key, params: Params) -> tuple[Observation, TransformedState]:
        first, inner = env.reset(key, params)
        observation, memory = transform.begin(jnp, first)
        return observation, TransformedState(inner, memory)

    def step(key: Key, state: TransformedState, action: Action, params: Params) -> Timestep:
        draw = jax.random.uniform(jax.random.fold_in(key, DRAW_FOLD + number)) if transform.draws else None
        taken, memory = transform.act(jnp, state.memory, action, draw)
        timestep = as_timestep(env.name, inner_step(key, state.inner, taken, params))
        observation, memory = transform.observe(jnp, memory, timestep.observation)
        return timestep._replace(
            observation=observation,
            state=TransformedState(timestep.state, memory),
            reward=jax.tree.map(lambda reward: transform.reward(jnp, reward), timestep.reward),
        )

    spaces = {"observation_space": transform.observation_space, "action_space": transform.action_space}
    wrapped = wrap(env, reset, step)._replace(**spaces)
    return wrapped._replace(planning_state=None, planning_params=None, planning_env=None)


def _repeat_action(env: Environment, count: int):
    """Returns a step function that repeats the action `count` times, or until the episode ends.

    The rewards are summed.
    """

    def step(key: Key, state: State, action: Action, params: Params) -> Timestep:
        def again(so_far: Timestep, number: Array) -> tuple[Timestep, None]:
            following = as_timestep(
                env.name, env.step(jax.random.fold_in(key, number), so_far.state, action, params)
            )
            following = following._replace(reward=jax.tree.map(jnp.add, so_far.reward, following.reward))
            done = so_far.terminated | so_far.truncated
            return jax.tree.map(lambda old, new: jnp.where(done, old, new), so_far, following), None

        first = as_timestep(env.name, env.step(key, state, action, params))
        return jax.lax.scan(again, first, jnp.arange(1, count, dtype=jnp.uint32))[0]

    return step
