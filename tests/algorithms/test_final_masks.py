"""Targets of replay trainings bootstrap from legal actions of an episode's last state alone.

In the state `t`, which is also observed, the action `t` is illegal; episodes are truncated in state 3 of 0 to 3.
"""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill.core.types import Timestep
from rollmill.dataflow import collect, init_state
from rollmill.envs.registry import from_gymnasium
from rollmill.networks import NetworkConfig

LAST, ACTIONS = 3, 5
OBSERVATIONS = spaces.Box(0, LAST, (1,), np.float32)


def environment():
    def reset(key, params):
        return jnp.zeros(1), jnp.int32(0)

    def step(key, t, action, params):
        seen = (t + 1)[None].astype(jnp.float32)
        return Timestep(seen, t + 1, jnp.float32(0), jnp.asarray(False), jnp.asarray(False), {})

    legal = lambda t, params: jnp.arange(ACTIONS) != t
    env = rollmill.Environment("Legal-v0", reset, step, OBSERVATIONS, spaces.Discrete(ACTIONS), action_mask=legal)
    return rollmill.time_limit(env, LAST)


class OnHost(gymnasium.Env):
    """The same as a Python object."""

    observation_space, action_space = OBSERVATIONS, spaces.Discrete(ACTIONS)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._seen()

    def step(self, action):
        self.t += 1
        observation, info = self._seen()
        return observation, 0.0, False, self.t == LAST, info

    def _seen(self):
        return np.float32([self.t]), {"action_mask": np.arange(ACTIONS) != self.t}


@pytest.mark.parametrize("algorithm", ["dqn", pytest.param("sac", marks=pytest.mark.slow)])
def test_masks_of_final_states_are_stored(algorithm):
    graph = getattr(rollmill, algorithm)(
        environment(),
        **{"total_timesteps": 640, "num_envs": 2, "num_steps": 7, "learning_starts": 200, "batch_size": 64},
        **{"buffer_size": 400, "gradient_steps": 1, "network": NetworkConfig(hidden_sizes=(4,))},
        **({"n_step": 2} if algorithm == "dqn" else {}),
    )
    index = jnp.arange(2)
    state = jax.jit(lambda key: init_state(graph, key, index))(jax.random.key(0))

    @jax.jit
    def add(collector, rings, key):
        collector, trajectory = collect(graph, graph.weights(state.learner), collector, key)
        return collector, graph.replay.add(graph, rings, trajectory)

    collector, rings = state.collector, state.rings
    for key in jax.random.split(state.key, 6):
        collector, rings = add(collector, rings, key)
    draw = jax.jit(lambda rings: graph.replay.sample(graph, rings, state.learner, jax.random.key(1), index))
    drawn = draw(rings).minibatch.samples
    for mask, seen in (
        (drawn.action_mask, drawn.observation),
        (drawn.next_action_mask, drawn.next_observation),
    ):
        np.testing.assert_array_equal(mask, np.arange(ACTIONS) != np.asarray(seen))
    assert {0.0, 1.0, 2.0} == set(np.asarray(drawn.observation).ravel().tolist())
    assert {2.0, 3.0} <= set(np.asarray(drawn.next_observation).ravel().tolist())


def test_host_environments_tell_the_masks_of_final_states():
    vector = from_gymnasium(OnHost).start(range(2), seed=0)
    first = vector.reset()
    np.testing.assert_array_equal(first.info["final_action_mask"], first.info["action_mask"])
    for t in (1, 2, 3, 1):
        step = vector.step(np.full(2, 4))
        assert (step.info["final_observation"] == t).all()
        assert step.info["final_action_mask"].tolist() == [[n != t for n in range(ACTIONS)]] * 2
        assert step.info["action_mask"].tolist() == [[n != t % LAST for n in range(ACTIONS)]] * 2
    vector.close()


def test_trajectories_of_other_algorithms_do_not_hold_them():
    graph = rollmill.ppo(environment(), num_envs=2, num_steps=4, num_minibatches=1)
    shapes = jax.eval_shape(lambda: graph.start_environment(jax.random.key(0), jnp.int32(0)))
    timestep = jax.eval_shape(graph.environment, jax.random.key(0), shapes[0], jnp.int32(0))
    assert "final_action_mask" not in timestep.info
