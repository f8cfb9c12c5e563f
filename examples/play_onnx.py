"""Plays CartPole with a policy that Rollmill exported: python examples/play_onnx.py policy.onnx [EPISODES].

It needs onnxruntime, gymnasium and NumPy; neither Rollmill nor JAX.
"""

import json
import sys

import gymnasium
import numpy as np
import onnxruntime

if __name__ == "__main__":
    episodes = int(sys.argv[2]) if sys.argv[2:] else 10
    policy = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    metadata = json.loads(policy.get_modelmeta().custom_metadata_map["rollmill"])
    print(f"{metadata['algorithm']} on {metadata['environment']}, iteration {metadata['iteration']}")
    env, returns = gymnasium.make("CartPole-v1"), []
    for seed in range(episodes):
        observation, _ = env.reset(seed=seed)
        done, total = False, 0.0
        while not done:
            (action,) = policy.run(["action"], {"observation": observation[None].astype(np.float32)})
            observation, reward, terminated, truncated, _ = env.step(int(action[0]))
            done, total = terminated or truncated, total + float(reward)
        returns.append(total)
    print(f"mean return of {episodes} episodes: {np.mean(returns):.1f}")
