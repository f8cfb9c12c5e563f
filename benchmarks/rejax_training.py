"""Prints the steps per second of Rejax as JSON; runs in a Python that has rejax 0.1.3 and gymnax 0.0.9.

One argument, a JSON object: `algorithm` is the name of Rejax's class, `settings` are what its `create` takes,
`repeats` the number of whole trainings that are timed; evaluations are left out, and compilation is not timed.
"""

import json
import sys
import time

import jax
import rejax


def main() -> None:
    order = json.loads(sys.argv[1])
    total = order["settings"]["total_timesteps"]
    settings = order["settings"] | {"eval_freq": total, "skip_initial_evaluation": True}
    algorithm = getattr(rejax, order["algorithm"]).create(**settings).replace(eval_callback=lambda *_: ())
    train = jax.jit(algorithm.train).lower(jax.random.key(0)).compile()
    jax.block_until_ready(train(jax.random.key(0)))
    figures = []
    for seed in range(order["repeats"]):
        began = time.perf_counter()
        jax.block_until_ready(train(jax.random.key(seed)))
        figures.append(total / (time.perf_counter() - began))
    print(json.dumps({"figures": figures, "jax": jax.__version__}))


if __name__ == "__main__":
    main()
