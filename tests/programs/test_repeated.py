"""Several iterations in one call of a program: which programs compute them, and that they change no number."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import rollmill
from rollmill.programs import compiled
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from rollmill.programs.kernels import plain_kernels
from rollmill.programs.repeated import MAX_PER_CALL, iterations_per_call

UNTIL = 11


def graph_of(**hyperparameters):
    sizes = {
        "num_envs": 8,
        "num_steps": 4,
        "total_timesteps": 32 * UNTIL,
        "num_minibatches": 2,
        "update_epochs": 2,
    }
    return rollmill.ppo(rollmill.make("CartPole-v1"), **(sizes | hyperparameters))


GPU, CPU = SimpleNamespace(platform="gpu"), SimpleNamespace(platform="cpu")


def kernels(rollouts=True, gradients=True):
    plain = plain_kernels(1)
    return plain._replace(
        rollouts=plain.rollouts._replace(fused=rollouts), gradients=plain.gradients._replace(fused=gradients)
    )


def raw(tree):
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in jax.tree.leaves(tree)]


def train(graph, seeds, strides, monkeypatch, per_call):
    monkeypatch.setattr(compiled, "iterations_per_call", lambda *arguments: per_call)
    program = lower(graph, seeds=seeds)
    assert program.iterations_per_call == per_call
    windows = list(dispatch_ahead(program, program.start(), first=0, until=UNTIL, strides=strides))
    rows = [row for window in windows for row in window.metrics]
    return raw(windows[-1].after), {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize(("seeds", "strides"), [((3,), ()), ((3,), (5,)), ((0, 1), (2, 3))], ids=str)
def test_iterations_of_one_call_are_those_of_several(seeds, strides, monkeypatch):
    graph = graph_of(learning_rate="linear:1e-3:0")
    state, metrics = train(graph, seeds, strides, monkeypatch, per_call=1)
    joined_state, joined_metrics = train(graph, seeds, strides, monkeypatch, per_call=4)
    for one, other in zip(state, joined_state, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert metrics.keys() == joined_metrics.keys()
    for name, values in metrics.items():
        assert values.shape[0] == UNTIL
        np.testing.assert_allclose(values, joined_metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_windows_divide_a_training_without_changing_a_bit(monkeypatch):
    ends = [train(graph_of(), (0,), strides, monkeypatch, per_call=4)[0] for strides in ((), (3,), (2, 5))]
    for other in ends[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(ends[0], other, strict=True))


def test_short_iterations_of_kernels_on_one_gpu_share_a_call():
    of = lambda graph, num_seeds=1: iterations_per_call(graph, num_seeds, [GPU], kernels())
    large = {"total_timesteps": 10**9, "num_minibatches": 4, "update_epochs": 4}
    short, usual = graph_of(), graph_of(num_envs=4096, num_steps=128, **large)
    assert of(short) == MAX_PER_CALL and of(usual) == 8
    assert of(usual, num_seeds=4) == 2
    assert of(graph_of(num_envs=65_536, num_steps=64, **large)) == 1


@pytest.mark.parametrize(
    ("devices", "parts"),
    [
        ([CPU], kernels()),
        ([GPU, GPU], kernels()),
        ([GPU], kernels(gradients=False)),
        ([GPU], kernels(rollouts=False)),
    ],
    ids=["a CPU", "two GPUs", "gradients by XLA", "rollouts by XLA"],
)
def test_other_programs_run_one_iteration_per_call(devices, parts):
    assert iterations_per_call(graph_of(), 1, devices, parts) == 1


def test_replay_memories_sum_iterations_instead():
    graph = rollmill.dqn(rollmill.make("CartPole-v1"), num_envs=8)
    assert iterations_per_call(graph, 1, [GPU], kernels()) == 1
