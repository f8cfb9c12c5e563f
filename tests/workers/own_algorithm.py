"""An algorithm and a distribution policy of one's own, of public pieces; neither knows of the other."""

from functools import partial

import jax
import jax.numpy as jnp

from rollmill.algorithms import environment_functions
from rollmill.dataflow import Batch, Decision, Graph, Group, Loops, Partition
from rollmill.networks import Categorical


def partition(counts):
    """Environments beside gradients; policy and update each on their own."""
    return Partition(
        "crosswise",
        (
            Group("steps", ("environment", "gradients"), counts.workers),
            Group("decides", ("policy",)),
            Group("updates", ("update",)),
        ),
    )


def reinforce(env, *, num_envs=8, num_steps=8, iterations=20, learning_rate=0.1, gamma=0.9):
    """REINFORCE with the mean return as baseline (Williams, 1992), and a linear policy over discrete actions."""
    functions = environment_functions(env, num_envs=num_envs)
    features, choices = env.observation_space.shape[0], int(env.action_space.n)

    def prepare(learner, trajectory, *, reduce, replicas):
        steps = trajectory.steps
        ends = steps.terminated | steps.truncated
        gained = jax.vmap(partial(_returns, gamma), in_axes=1, out_axes=1)(steps.reward, ends)
        samples = {"observation": steps.observation, "action": steps.action, "gained": gained}
        return learner, Batch(samples)

    def update(learner, slopes, *, share=1.0):
        step = lambda weight, slope: weight - learning_rate * slope
        weights = jax.tree.map(step, learner["weights"], slopes)
        return {"weights": weights, "updates": learner["updates"] + 1}

    def start_learner(key):
        bias = 0.01 * jax.random.normal(key, (choices,))
        return {"weights": {"slope": jnp.zeros((features, choices)), "bias": bias}, "updates": jnp.int32(0)}

    return Graph(
        settings={"algorithm": "reinforce", "environment": env.name, "config": {}, "custom": ["algorithm"]},
        observation_space=env.observation_space,
        action_space=env.action_space,
        loops=Loops(
            iterations, num_envs, num_steps, epochs=1, num_minibatches=2, num_shards=4, minibatch_items="samples"
        ),
        environment=functions.step,
        policy=_decide,
        gradients=_gradients,
        update=update,
        start_environment=functions.start,
        start_memory=lambda: (),
        start_learner=start_learner,
        action_mask=functions.action_mask,
        weights=lambda learner: learner["weights"],
        prepare=prepare,
        condition=_less_the_mean,
        greedy=_decide_greedily,
    )


def _distribution(weights, observation):
    return Categorical(observation @ weights["slope"] + weights["bias"])


def _decide(weights, key, memory, observation, action_mask):
    return Decision(_distribution(weights, observation).sample(key), (), ())


def _decide_greedily(weights, key, memory, observation, action_mask):
    return Decision(_distribution(weights, observation).mode(), (), ())


def _gradients(learner, minibatch):
    def loss(weights):
        distribution = jax.vmap(partial(_distribution, weights))(minibatch.samples["observation"])
        log_prob = jax.vmap(Categorical.log_prob)(distribution, minibatch.samples["action"])
        return -jnp.mean(log_prob * minibatch.samples["gained"])

    total, slopes = jax.value_and_grad(loss)(learner["weights"])
    return slopes, {"losses/total": total, "losses/none": jnp.float32(0)}


def _returns(gamma, reward, ends):
    def step(after, now):
        gained = now[0] + gamma * jnp.where(now[1], 0.0, after)
        return gained, gained

    return jax.lax.scan(step, jnp.float32(0), (reward, ends), reverse=True)[1]


def _less_the_mean(minibatch, reduce):
    gained = minibatch.samples["gained"]
    return minibatch._replace(samples={**minibatch.samples, "gained": gained - reduce(jnp.mean(gained))})
