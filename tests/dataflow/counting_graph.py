"""A graph whose every number can be said in advance.

The environment counts its steps. Episodes of environments with an even index terminate after 3 steps,
of those with an odd index they are truncated after 2. The policy's memory counts from 100, and is its
action. Environment and policy each report one random number a step.
"""

import jax
import jax.numpy as jnp
from gymnasium import spaces

from rollmill.core.types import Timestep
from rollmill.dataflow import Batch, Decision, Graph, Loops

FIRST_MEMORY = 100


def episode_length(index):
    """Steps of an episode of the environment with this index."""
    return 3 - index % 2


def _start_environment(key, index):
    state = {"count": jnp.int32(0), "return": jnp.float32(0), "index": index, "start": jax.random.uniform(key)}
    return state, _observe(state)


def _observe(state):
    return jnp.stack([state["index"], state["count"]]).astype(jnp.float32)


def _step(key, state, action):
    count = state["count"] + 1
    over, odd = count >= episode_length(state["index"]), state["index"] % 2 == 1
    reward = (10 * state["count"] + action).astype(jnp.float32)
    moved = {**state, "count": count, "return": state["return"] + reward}
    fresh = {**moved, "count": jnp.int32(0), "return": jnp.float32(0)}
    after = jax.tree.map(lambda new, old: jnp.where(over, new, old), fresh, moved)
    info = {
        "final_observation": _observe(moved),
        "episode_return": moved["return"],
        "episode_length": count,
        "noise": jax.random.uniform(key),
    }
    return Timestep(_observe(after), after, reward, over & ~odd, over & odd, info)


def _decide(weights, key, memory, observation, action_mask):
    return Decision(memory, memory + 1, {"noise": jax.random.uniform(key), "weight": weights["weight"]})


def _prepare(learner, trajectory, *, reduce, replicas):
    samples = {"observation": trajectory.steps.observation, "action": trajectory.steps.action}
    return {**learner, "prepared": learner["prepared"] + 1}, Batch(samples, trajectory.start_memory)


def _gradients(learner, minibatch):
    mean = jnp.mean(minibatch.samples["observation"], axis=0)
    metrics = {"updates_before": learner["updates"].astype(jnp.float32), "mean_index": mean[0]}
    return {"weight": mean[0] * learner["updates"].astype(jnp.float32)}, metrics


def _update(learner, gradients):
    weight = learner["weight"] + gradients["weight"]
    return {**learner, "weight": weight, "updates": learner["updates"] + 1}


def counting_graph(*, keep_learning=None, **sizes):
    """The graph; `sizes` are fields of `Loops` to replace."""
    small = Loops(
        iterations=10,
        num_envs=8,
        num_steps=5,
        epochs=3,
        num_minibatches=2,
        num_shards=4,
        minibatch_items="samples",
    )
    return Graph(
        settings={},
        observation_space=spaces.Box(0, 100, (2,)),
        action_space=spaces.Discrete(1000),
        loops=small._replace(**sizes),
        environment=_step,
        policy=_decide,
        gradients=_gradients,
        update=_update,
        start_environment=_start_environment,
        start_memory=lambda: jnp.int32(FIRST_MEMORY),
        start_learner=lambda key: {
            "weight": jax.random.uniform(key),
            "updates": jnp.int32(0),
            "prepared": jnp.int32(0),
        },
        action_mask=lambda state: jnp.stack([state["count"] == 0, state["count"] > 0]),
        weights=lambda learner: {"weight": learner["weight"]},
        prepare=_prepare,
        condition=lambda minibatch, reduce: minibatch,
        greedy=_decide,
        keep_learning=keep_learning,
    )
