r"""An algorithm, a network and an environment of your own, registered under names for all commands and processes.

    rollmill train decayed-ppo Reach-v0 --import examples/custom_algorithm.py --network tiny \
        --weight-decay 0.01 --env-option speed=0.3 --distribution single-learner-coarse

`rollmill list --import examples/custom_algorithm.py` shows them.
"""

from dataclasses import dataclass

import custom_environment as line  # in the folder of this file
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

import rollmill


@dataclass(frozen=True)
class DecayedPPOConfig(rollmill.PPOConfig):
    """Hyperparameters of PPO, and weight decay; each is an option of the command."""

    weight_decay: float = 1e-3
    """Fraction of the weights that each update subtracts."""


def decayed_ppo(env, config):
    """PPO with weight decay."""
    graph = rollmill.ppo(env, config)

    def update(learner, gradients, *, share=1.0):
        learner = graph.update(learner, gradients, share=share)
        network = jax.tree.map(lambda w: (1.0 - share * config.weight_decay) * w, learner.weights.network)
        return eqx.tree_at(lambda learner: learner.weights.network, learner, network)

    return graph._replace(update=update)


def tiny(key, observation_space, action_space):
    """A small network with a learned standard deviation."""
    return line.network(key, observation_space, action_space)


def reach(speed: float = 0.2):
    """A point on a line that has to reach a goal."""
    line_of, plane = (spaces.Box(-1.0, 1.0, (n,), np.float32) for n in (1, 2))
    params = {"speed": jnp.float32(speed)}
    return rollmill.time_limit(rollmill.Environment("Reach-v0", line.reset, line.step, plane, line_of, params), 20)


make_graph = rollmill.register_algorithm("decayed-ppo", decayed_ppo, DecayedPPOConfig)
rollmill.register_network("tiny", tiny)
rollmill.register("Reach-v0", reach)

if __name__ == "__main__":
    rollmill.train(make_graph("Reach-v0", network=rollmill.NetworkConfig(name="tiny"), total_timesteps=200_000))
