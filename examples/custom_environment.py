"""An environment and a network of your own, trained with PPO: python examples/custom_environment.py [RUN]."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

import rollmill
from rollmill.networks import DiagonalGaussian


def reset(key, params):  # the state: the position of a point on a line, and its goal
    state = jax.random.uniform(key, (2,), minval=-1.0, maxval=1.0)
    return state, state  # the observation, and the state


def step(key, state, action, params):
    position, goal = state
    position = jnp.clip(position + params["speed"] * action[0], -1.0, 1.0)
    distance = jnp.abs(position - goal)
    state = jnp.stack([position, goal])
    return rollmill.Timestep(state, state, -distance, distance < 0.05, jnp.asarray(False), {})


class Network(eqx.Module):
    actor: eqx.nn.MLP
    critic: eqx.nn.MLP
    log_std: jax.Array

    def initial_memory(self):
        return ()  # no memory

    def __call__(self, observation, memory, action_mask=None):
        policy = DiagonalGaussian(self.actor(observation), self.log_std)
        return rollmill.Output(policy, self.critic(observation), memory)

    def value(self, observation, memory):
        return self.critic(observation)


def network(key, observation_space, action_space):
    actor_key, critic_key = jax.random.split(key)
    actor = eqx.nn.MLP(2, 1, 32, 1, activation=jnp.tanh, key=actor_key)
    return Network(actor, eqx.nn.MLP(2, "scalar", 32, 1, activation=jnp.tanh, key=critic_key), jnp.zeros(1))


if __name__ == "__main__":
    line, plane = (spaces.Box(-1.0, 1.0, (n,), np.float32) for n in (1, 2))
    env = rollmill.Environment("Reach-v0", reset, step, plane, line, params={"speed": jnp.float32(0.2)})
    env = rollmill.time_limit(env, 20)
    rollmill.check_environment(env)
    algorithm = rollmill.ppo(env, network=network, total_timesteps=200_000, num_envs=64, num_steps=32)
    run = rollmill.train(algorithm, run_dir=sys.argv[1] if sys.argv[1:] else None)
    policy = rollmill.load(run.directory, algorithm=algorithm)
    print("return", run.summary["final_return"], "action at (-0.5, 0.5):", policy(np.array([-0.5, 0.5])))
