"""A training lowers the step of each of its kernels once, however many launches are tried."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import rollmill
from rollmill.dataflow import init_state
from rollmill.fusion.backends.triton import (
    gradients as triton_gradients,
    rollout as triton_rollout,
)
from rollmill.fusion.backends.triton.launches import triton_backend
from rollmill.fusion.kernels import gradients, rollout
from rollmill.fusion.tune.timing import TunedLaunch
from rollmill.programs import fused_kernels as choosing, tuning
from rollmill.programs.compiled import lower
from rollmill.programs.kernels import KernelPlace, plain_kernels


@pytest.fixture
def lowered(monkeypatch):
    """The functions that have been traced for kernels, by the module that asked."""
    calls = []

    def counted(name, function):
        return lambda *arguments, **settings: calls.append(name) or function(*arguments, **settings)

    monkeypatch.setattr(rollout, "trace_function", counted("rollout", rollout.trace_function))
    monkeypatch.setattr(gradients, "lower_function", counted("gradients", gradients.lower_function))
    return calls


def training():
    return rollmill.ppo(rollmill.make("CartPole-v1"), num_envs=64, num_steps=16, total_timesteps=64 * 16 * 4)


@pytest.mark.slow
def test_machine_code_is_made_from_one_lowering(lowered, tmp_path, monkeypatch):
    pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install 'rollmill[fusion]'")
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    lower(training(), fusion="full")
    assert sorted(lowered) == ["gradients", "rollout"]


def test_triton_kernels_of_all_launches_are_made_from_one_lowering(lowered, tmp_path, monkeypatch):
    """Up to the source of each kernel: what calls it is replaced, for there is no GPU."""
    sources = set()

    def call(kernel, arrays):
        sources.add(kernel.source)
        return [jnp.zeros(struct.shape, struct.dtype) for struct in kernel.outputs]

    def trace_candidates(search, wait_for_kernel):
        for launch in search.launches:
            jax.eval_shape(search.kernel_only(launch), *jax.eval_shape(search.inputs, *search.shapes))
        return ()

    monkeypatch.setattr(triton_rollout, "call", call)
    monkeypatch.setattr(triton_gradients, "call", call)
    monkeypatch.setattr(tuning, "compile_candidates", trace_candidates)
    first = lambda search, *_: TunedLaunch(tuple(search.launches[0]), 1.0, 2.0)
    monkeypatch.setattr(tuning, "find_fastest_launch", first)
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    graph, backend = training(), triton_backend("tf32")._replace(device_name=lambda device: "a GPU")
    nothing_ahead = lambda *_: contextlib.nullcontext(lambda number: None)
    sizes = lambda size, device, **_: [(4, 64, 4), (4, 32, 2)]
    backend = backend._replace(
        rollouts=backend.rollouts._replace(compile_ahead=nothing_ahead),
        gradients=backend.gradients._replace(launches=sizes, compile_ahead=nothing_ahead),
    )
    with tuning.Tuner(jax.devices()[0]) as tuner:
        chooser = choosing._Chooser(graph, "full", backend, 1, KernelPlace(jax.devices()[0], 1), None, tuner, 1)
        plain = plain_kernels(1)
        ways = [
            chooser.implementation("rollouts", plain.rollouts),
            chooser.implementation("gradients", plain.gradients),
        ]
    assert all(way.fused for way in ways) and len(sources) > 2
    state = jax.eval_shape(partial(init_state, graph), jax.random.key(0), jnp.arange(64, dtype=jnp.int32))
    jax.eval_shape(
        lambda state: ways[0].function(graph, graph.weights(state.learner), state.collector, state.key), state
    )
    assert sorted(lowered) == ["gradients", "rollout"]
