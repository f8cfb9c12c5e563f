"""Computes a step of Adam as a GPU's kernel by Triton's interpreter: the differences from the step by Optax."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from interpreted import interpreted

from rollmill.algorithms.optimisers import clipped_descent, descend
from rollmill.core.flat_descent import descending_by
from rollmill.fusion.backends.triton import descents

SIZE = 700
STEPS = 3


def main():
    optimiser = clipped_descent(optax.scale_by_adam(), learning_rate=0.01, max_grad_norm=0.5, anneal_over=100)
    draws = np.random.default_rng(0)
    drawn = lambda: jnp.asarray(draws.standard_normal(SIZE), jnp.float32)
    weights, folder = drawn(), Path(sys.argv[1])
    state, squares = optimiser.init(weights), []
    descents.call = lambda kernel, arrays: interpreted(kernel, arrays, folder)

    def by_kernel(operands, program, count):
        longer = jnp.concatenate([operands[1], jnp.ones(5)])  # the kernel reads what precedes the metrics
        found = descents.descend_by_kernel(operands, program, count, longer)
        squares.append(float(found.squares))
        return found.results

    expected = weights, state
    for _ in range(STEPS):
        gradients = drawn()
        with descending_by(by_kernel):
            weights, state = descend(optimiser, weights, state, gradients)
        expected = jax.jit(lambda *given: descend(optimiser, *given))(*expected, gradients)
        print(squares[-1] / float(jnp.sum(gradients**2)) - 1)
    assert len(squares) == STEPS
    pairs = zip(jax.tree.leaves((weights, state)), jax.tree.leaves(expected), strict=True)
    print(max(float(np.abs(a - np.asarray(b)).max() / max(np.abs(b).max(), 1e-6)) for a, b in pairs))


if __name__ == "__main__":
    main()
