"""Prints learning curves of Rejax as JSON; runs in a Python that has rejax 0.1.3 and gymnax 0.0.9.

One argument, a JSON object: `algorithm` is the name of Rejax's class, `settings` are what its `create` takes,
`seeds` the numbers of seeds, `episodes` how many greedy episodes each point of a curve is the mean of (of Rejax's
DQN with 0.5 % of random actions, as it evaluates itself).
"""

import json
import sys
from importlib.metadata import version

import gymnax
import jax
import jax.numpy as jnp
import rejax
from rejax.evaluate import evaluate


def train(name: str, settings: dict, *, seeds: list[int], episodes: int) -> jax.Array:
    """Mean returns `[seed, point]`, before training and after every `eval_freq` steps."""
    env, params = gymnax.make(settings["env"])

    def mean_return(algorithm, state, key):
        play = greedy(algorithm, state) if name == "PPO" else algorithm.make_act(state)
        return evaluate(play, key, env, params, episodes, params.max_steps_in_episode)[1].mean()

    algorithm = getattr(rejax, name).create(**settings).replace(eval_callback=mean_return)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    if name == "PPO":
        return jax.jit(jax.vmap(algorithm.train))(keys)[1]
    # One after the other: a replay buffer that is one of several under vmap may be copied at each step.
    return jax.jit(lambda: jax.lax.map(lambda key: algorithm.train(key)[1], keys))()


def greedy(algorithm, state):
    """`PPO.make_act` with the mode of the distribution in the place of a sample of it."""

    def act(observation, key):
        if algorithm.normalize_observations:
            observation = algorithm.normalize_obs(state.obs_rms_state, observation)
        weights = state.actor_ts.params
        distribution = algorithm.actor.apply(weights, observation[None], method="_action_dist")
        action = jnp.squeeze(distribution.mode())
        if algorithm.discrete:
            return action
        return jnp.clip(action, jnp.squeeze(algorithm.action_space.low), jnp.squeeze(algorithm.action_space.high))

    return act


def main() -> None:
    order = json.loads(sys.argv[1])
    returns = train(order["algorithm"], order["settings"], seeds=order["seeds"], episodes=order["episodes"])
    versions = {name: version(name) for name in ("rejax", "gymnax", "jax")}
    print(json.dumps({"returns": returns.tolist(), "versions": versions}))


if __name__ == "__main__":
    main()
