"""Trains with Rejax and prints the outcome as JSON. Runs in a Python that has rejax 0.1.3 and gymnax 0.0.9.

One argument, a JSON object: `algorithm` names a class of Rejax and `settings` are the arguments of its `create`.
With `repeats`, prints the steps per second of that many trainings after a first one of `seed`, without compilation
and evaluations. With `seeds` and `episodes`, prints learning curves, whose points are means over so many greedy
episodes (of Rejax's DQN with 0.5 % of random actions, as it evaluates itself).
"""

import json
import sys
import time
from importlib.metadata import version

import gymnax
import jax
import jax.numpy as jnp
import rejax
from rejax.evaluate import evaluate


def speeds(algorithm, total: int, repeats: int, first: int) -> list[float]:
    algorithm = algorithm.replace(eval_callback=lambda *_: (), eval_freq=total, skip_initial_evaluation=True)
    train = jax.jit(algorithm.train).lower(jax.random.key(0)).compile()
    jax.block_until_ready(train(jax.random.key(first)))
    figures = []
    for seed in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(train(jax.random.key(seed)))
        figures.append(total / (time.perf_counter() - began))
    return figures


def curves(algorithm, name: str, environment: str, seeds: list[int], episodes: int) -> list[list[float]]:
    """Returns mean returns `[seed, point]`, before training and after every `eval_freq` steps."""
    env, params = gymnax.make(environment)

    def mean_return(algorithm, state, key):
        play = greedy(algorithm, state) if name == "PPO" else algorithm.make_act(state)
        return evaluate(play, key, env, params, episodes, params.max_steps_in_episode)[1].mean()

    algorithm = algorithm.replace(eval_callback=mean_return)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    if name == "PPO":
        return jax.jit(jax.vmap(algorithm.train))(keys)[1].tolist()
    # One after the other: under vmap a replay buffer may be copied at each step.
    return jax.jit(lambda: jax.lax.map(lambda key: algorithm.train(key)[1], keys))().tolist()


def greedy(algorithm, state):
    """Returns `PPO.make_act` with the mode of the distribution instead of a sample."""

    def act(observation, key):
        if algorithm.normalize_observations:
            observation = algorithm.normalize_obs(state.obs_rms_state, observation)
        distribution = algorithm.actor.apply(state.actor_ts.params, observation[None], method="_action_dist")
        action, space = jnp.squeeze(distribution.mode()), algorithm.action_space
        return action if algorithm.discrete else jnp.clip(action, jnp.squeeze(space.low), jnp.squeeze(space.high))

    return act


def main() -> None:
    order = json.loads(sys.argv[1])
    settings, name = order["settings"], order["algorithm"]
    algorithm = getattr(rejax, name).create(**settings)
    found = {"versions": {each: version(each) for each in ("rejax", "gymnax", "jax")}}
    if "repeats" in order:
        found["figures"] = speeds(algorithm, settings["total_timesteps"], order["repeats"], order.get("seed", 0))
    else:
        found["returns"] = curves(algorithm, name, settings["env"], order["seeds"], order["episodes"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
