"""Prints the steps per second of Rejax's PPO as JSON; runs in a Python that has rejax 0.1.3 and gymnax 0.0.9."""

import json
import sys
import time

import jax
from rejax import PPO

num_envs, num_steps, epochs, num_minibatches, iterations, repeats = map(int, sys.argv[1:7])
total = num_envs * num_steps * iterations
algorithm = PPO.create(
    env="CartPole-v1",
    num_envs=num_envs,
    num_steps=num_steps,
    num_epochs=epochs,
    num_minibatches=num_minibatches,
    total_timesteps=total,
    eval_freq=total,
    skip_initial_evaluation=True,
    learning_rate=2.5e-4,
    agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64)},
).replace(eval_callback=lambda *_: ())
train = jax.jit(algorithm.train).lower(jax.random.key(0)).compile()
jax.block_until_ready(train(jax.random.key(0)))
figures = []
for seed in range(repeats):
    began = time.perf_counter()
    jax.block_until_ready(train(jax.random.key(seed)))
    figures.append(total / (time.perf_counter() - began))
print(json.dumps({"figures": figures, "jax": jax.__version__}))
