"""Compiler options by mesh, and that this version of XLA accepts them."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.programs import compiled, compiler_options
from rollmill.programs.compiler_options import (
    CONCURRENT_GRAPHS,
    EXACT_PRECISION,
    LARGE_START_BYTES,
    QUICK_COMPILATION,
    UNOPTIMISED,
    WITHOUT_TUNING,
    options_for,
    program_options,
    start_options,
)
from rollmill.programs.kernels import plain_kernels
from rollmill.programs.states import start_state


def mesh(platform: str, *, gpus: int, instances: int = 1) -> Any:
    size = gpus * instances
    devices = SimpleNamespace(flat=[SimpleNamespace(platform=platform)] * size)
    return SimpleNamespace(shape={"instance": instances, "gpu": gpus}, devices=devices, size=size)


@pytest.mark.parametrize("shared", [mesh("gpu", gpus=2, instances=2), mesh("gpu", gpus=1, instances=4)])
def test_programs_on_shared_gpus_have_no_more_options(shared: Any) -> None:
    assert options_for(shared) == EXACT_PRECISION


def test_kernels_of_one_gpu_run_at_the_same_time() -> None:
    options = options_for(mesh("gpu", gpus=1))
    assert options == {**EXACT_PRECISION, **CONCURRENT_GRAPHS}
    jax.jit(lambda x: x + 1).lower(1.0).compile(options)


def test_programs_of_several_gpus_have_options_that_this_version_accepts() -> None:
    options = options_for(mesh("gpu", gpus=2))
    assert options.items() >= EXACT_PRECISION.items()
    jax.jit(lambda x: x + 1).lower(1.0).compile(options)


def test_what_a_version_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_options, "ALL_REDUCES_IN_CUDA_GRAPHS", {"xla_no_such_option": True})
    monkeypatch.setattr(compiler_options, "SYMMETRIC_BUFFERS", {"xla_cpu_enable_fast_math": False})
    assert options_for(mesh("gpu", gpus=2)) == {**EXACT_PRECISION, "xla_cpu_enable_fast_math": False}


def test_barriers_last_until_operations_are_fused_in_draws_for_several_seeds() -> None:
    options = options_for(mesh("cpu", gpus=1), draws_for_seeds=True)
    assert options.items() >= program_options("cpu").items()
    apart = lambda x: jax.lax.optimization_barrier(jnp.sin(x) + x) * x + 1
    text = jax.jit(apart).lower(jnp.ones(8)).compile(options).as_text()
    assert text.count(" fusion(") == 2, text


R2D2_FOR_TWO_SEEDS = """
import rollmill
from rollmill.programs.compiled import lower
network = rollmill.NetworkConfig(torso="gru", hidden_sizes=(8,), recurrent_size=8)
sizes = {"num_envs": 4, "num_steps": 8, "batch_size": 8, "sequence_length": 16, "burn_in": 4, "gradient_steps": 2}
steps = {"total_timesteps": 16_000, "learning_starts": 200, "buffer_size": 2_000}
lower(rollmill.r2d2("CartPole-v1", network=network, **sizes, **steps), seeds=(0, 1))
"""


@pytest.mark.slow
def test_programs_that_draw_sequences_by_priority_for_two_seeds_compile() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    subprocess.run([sys.executable, "-c", R2D2_FOR_TWO_SEEDS], check=True, env=environment, timeout=300)


def convolve(kernel: jax.Array, images: jax.Array) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, (4, 4), "VALID", dimension_numbers=layout)


def library_convolutions(text: str) -> list[str]:
    """Convolutions of a compiled program that are parts of a call to a library."""
    called = set(re.findall(r"kind=kCustom, calls=(%[\w.]+)", text))
    parts = re.split(r"\n(?=%|ENTRY)", text)
    of_library = [part for part in parts if part.split(" ", 1)[0] in called]
    return [line for part in of_library for line in part.splitlines() if " convolution(" in line]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="an option of CPUs")
def test_convolutions_and_their_gradients_are_xlas_own_on_cpus() -> None:
    kernel, images = jnp.ones((8, 8, 4, 32)), jnp.ones((32, 84, 84, 4))
    gradient = jax.jit(jax.grad(lambda kernel, images: jnp.sum(jnp.square(convolve(kernel, images)))))
    text = gradient.lower(kernel, images).compile(program_options()).as_text()
    # The layer and the gradient of its kernel, by XLA or by the package's own code.
    assert text.count(" convolution(") + text.count("rollmill_") >= 2
    assert library_convolutions(text) == []


def test_programs_on_cpus_have_options_that_this_version_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_for(mesh("cpu", gpus=4)) == program_options("cpu")
    monkeypatch.setattr(compiler_options, "PLAIN_CONVOLUTIONS", {"xla_no_such_option": ""})
    assert program_options("cpu") == EXACT_PRECISION


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="options of CPUs")
def test_small_starts_compile_quickly_and_large_ones_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_options() in ({**program_options(), **quick} for quick in (QUICK_COMPILATION, UNOPTIMISED))
    assert start_options(LARGE_START_BYTES) == program_options()
    monkeypatch.setattr(compiler_options, "QUICK_COMPILATION", {**UNOPTIMISED, "xla_no_such_option": True})
    assert start_options() == {**program_options(), **UNOPTIMISED}  # as in jaxlib 0.11
    monkeypatch.setattr(compiler_options, "UNOPTIMISED", {"xla_no_such_option": True})
    assert start_options() == program_options()


def test_quickly_compiled_starts_differ_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = rollmill.ppo("CartPole-v1", num_envs=4)
    quick = start_state(graph)
    monkeypatch.setattr(compiler_options, "LARGE_START_BYTES", 0)
    usual = start_state(graph)
    for ours, theirs in zip(jax.tree.leaves(quick), jax.tree.leaves(usual), strict=True):
        if jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("platform", "fused", "tunes"),
    [
        ("gpu", ("rollouts", "gradients"), False),
        ("gpu", ("rollouts",), True),
        ("gpu", (), True),
        ("cpu", ("rollouts", "gradients"), True),
    ],
)
def test_xla_times_no_products_where_kernels_compute_almost_all_of_them(platform, fused, tunes):
    """Otherwise, two starts could choose different algorithms, which round differently."""
    kernels = plain_kernels(1)
    parts = {part: getattr(kernels, part)._replace(fused=True) for part in fused}
    none, state = SimpleNamespace(removed_from=lambda tree: tree), SimpleNamespace(mesh=mesh(platform, gpus=1))
    state.empty, state.placed, state.shapes, state.mesh.size = none, (), (), 1
    loops = SimpleNamespace(batch_size=2**24, epochs=1)
    graph, means = SimpleNamespace(replay=None, loops=loops), SimpleNamespace(operands=())
    made = compiled._step_program(graph, (0,), means, state, EXACT_PRECISION, False, kernels._replace(**parts))
    assert made.options == EXACT_PRECISION | ({} if tunes else WITHOUT_TUNING)
