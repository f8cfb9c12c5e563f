"""Networks and gradients in NumPy, for losses that are written again without the package."""

import jax
import numpy as np


def dense(weights, x):
    """A perceptron with ReLUs between its layers; `weights` are matrix, bias, matrix, bias and so on."""
    for n, (matrix, bias) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
        x = (np.maximum(x, 0) if n else x) @ matrix + bias
    return x


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(weights, x, memory):
    """The output of a GRU and its next memory, which are the same."""
    into, recurrent, bias, candidate_bias = weights
    (x_r, x_z, x_n), (h_r, h_z, h_n) = np.split(x @ into + bias, 3, -1), np.split(memory @ recurrent, 3, -1)
    z = sigmoid(x_z + h_z)
    after = (1 - z) * np.tanh(x_n + sigmoid(x_r + h_r) * (h_n + candidate_bias)) + z * memory
    return after, after


def lstm(weights, x, memory):
    """The output of an LSTM, and its next memory: hidden output and cell, stacked."""
    into, recurrent, bias = weights
    hidden, cell = memory
    i, f, g, o = np.split(x @ into + hidden @ recurrent + bias, 4, -1)
    cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
    hidden = sigmoid(o) * np.tanh(cell)
    return hidden, np.stack([hidden, cell])


CELLS = {"gru": (gru, 4), "lstm": (lstm, 3)}
"""Cells by name, with their number of weights."""


def in_float64(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def slopes_by_differences(loss, weights, step=1e-6):
    """The gradient of `loss(weights)` by central differences, for a list of arrays of float64."""
    slopes = [np.zeros_like(leaf) for leaf in weights]
    for leaf, slope in zip(weights, slopes, strict=True):
        for place in np.ndindex(leaf.shape):
            here, ends = leaf[place], []
            for sign in (1, -1):
                leaf[place] = here + sign * step
                ends.append(loss(weights))
            leaf[place] = here
            slope[place] = (ends[0] - ends[1]) / (2 * step)
    return slopes


def assert_slopes(ours, loss, weights):
    """Asserts that gradients are those of a loss in NumPy, which are not zero."""
    right = slopes_by_differences(loss, weights)
    assert any(np.abs(slope).max() > 1e-3 for slope in right)
    for mine, slope in zip(in_float64(ours), right, strict=True):
        np.testing.assert_allclose(mine, slope, rtol=1e-3, atol=1e-5)
