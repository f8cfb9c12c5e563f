"""Steps of optimisers as one kernel of a GPU: by its programs, by Triton's interpreter, and compiled."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rollmill
from one_time import run_once
from rollmill.algorithms.optimisers import clipped_descent, descend
from rollmill.core.flat_descent import descending_by
from rollmill.dataflow import evaluate_schedules, identity, init_state, plain_minibatch_loop, shuffled_rows
from rollmill.fusion import GradientLaunch, first_batch, fused_minibatch_loop, run_gradients_reference
from rollmill.fusion.ir import evaluate
from rollmill.fusion.kernels.descents import Descended, DescentPrograms, descent_programs

SIZE = 1_000
OPTIMISERS = {
    "adam": optax.scale_by_adam(eps=1e-5),
    "a root of squares": optax.scale_by_rms(),
    "a corrected root of squares": optax.scale_by_rms(bias_correction=True),
    "momentum": optax.trace(0.9),
    "none": optax.identity(),
}


def drawn(seed: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(SIZE), jnp.float32)


def by_programs(operands: Any, program: Any, count: int) -> Any:
    """Computes a step by the programs of a kernel, number by number."""
    programs = descent_programs(program)
    assert programs is not None
    return evaluated(programs, operands).results


def evaluated(programs: DescentPrograms, operands: Any, means: Any = None) -> Descended:
    weights, gradients, *state = operands
    size = weights.size
    gradients = gradients if means is None else means[:size]
    jaxpr = programs.plan.program
    known = dict(zip(jaxpr.invars[1:], state, strict=True))
    flat, single = ([known[atom] for atom in atoms] for atoms in (programs.flat, programs.single))
    *totals, squares = map(jnp.sum, evaluate(programs.sums, [gradients, *flat], [], block=size))
    whole = lambda numbers: [jnp.broadcast_to(number, (size,)) for number in numbers]
    inputs = [gradients, weights, *flat, *whole(totals), *whole(single)]
    moved, *changed = evaluate(programs.step, inputs, [], block=size)
    flat_after, single_after = changed[: len(programs.changed_flat)], changed[len(programs.changed_flat) :]
    known |= dict(zip(programs.changed_flat, flat_after, strict=True))
    known |= {atom: each[0] for atom, each in zip(programs.changed_single, single_after, strict=True)}
    return Descended([moved, *(known[atom] for atom in jaxpr.outvars[1:])], squares)


@pytest.mark.parametrize("scaling", OPTIMISERS.values(), ids=OPTIMISERS)
@pytest.mark.parametrize("scale", [1.0, 1e-5], ids=["clipped", "unclipped"])
def test_steps_are_those_of_optax(scaling: Any, scale: float) -> None:
    optimiser = clipped_descent(scaling, learning_rate=0.01, max_grad_norm=0.5, anneal_over=100)

    def step(weights: Any, state: Any, gradients: Any) -> Any:
        with descending_by(by_programs):
            return descend(optimiser, weights, state, gradients, share=0.5)

    weights, state = drawn(0), optimiser.init(drawn(0))
    expected, expected_state = weights, state
    for number in range(3):
        weights, state = jax.jit(step)(weights, state, drawn(number + 1, scale))
        with jax.numpy_dtype_promotion("standard"):
            steps, expected_state = optimiser.update(drawn(number + 1, scale), expected_state, expected, share=0.5)
        expected = optax.apply_updates(expected, steps)
    pairs = zip(jax.tree.leaves((weights, state)), jax.tree.leaves((expected, expected_state)), strict=True)
    for found, wanted in pairs:
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-7)


def test_an_epoch_with_steps_by_a_kernel_has_the_same_weights_and_metrics() -> None:
    network = rollmill.NetworkConfig(hidden_sizes=(8,))
    graph = rollmill.ppo(
        "CartPole-v1", num_envs=8, num_steps=8, num_minibatches=2, max_grad_norm=0.05, network=network
    )
    index = jnp.arange(8, dtype=jnp.int32)
    calls: list[int] = []

    def by_kernel(operands: Any, program: Any, count: int, means: Any) -> Descended:
        programs = descent_programs(program)
        assert programs is not None and count == 1 and means.size > operands[0].size  # metrics follow
        calls.append(count)
        return evaluated(programs, operands, means)

    def epoch(make: Any, key: Any) -> Any:
        state = init_state(graph, key, index)
        learner, batch = first_batch(graph, state)
        loop = make(graph, identity)
        samples = loop.prepare_samples(batch)
        shuffled = loop.shuffle(samples, shuffled_rows(key, index, graph.loops)[None])
        only = jax.tree.map(lambda leaf: leaf[0], shuffled)
        after, metrics = loop.run_epoch(loop.begin(evaluate_schedules(graph, learner)), samples, only)
        return loop.end(after), metrics

    run = partial(run_gradients_reference, precision="highest")
    ways = (partial(fused_minibatch_loop, run=run, descend=by_kernel), plain_minibatch_loop)
    mine, right = (run_once(partial(epoch, way), jax.random.key(5)) for way in ways)
    assert calls and mine[1]["losses/gradient_norm"].min() > 0.05  # clipped
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), mine, right)


FOLDER = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(("script", "count"), [("interpreted_descent.py", 4), ("interpreted_means.py", 1)])
def test_kernels_compute_steps_of_optax_and_means(script: str, count: int, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollmill[fusion]'")
    own = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(FOLDER / script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=own, check=False)
    assert done.returncode == 0, done.stderr
    differences = [abs(float(word)) for word in done.stdout.split()]
    assert len(differences) == count and max(differences) < 1e-5


def programs_of(
    scaling: optax.GradientTransformation, **settings: Any
) -> tuple[DescentPrograms | None, list[Any]]:
    """Returns the programs of an optimiser's step, and the shapes of its operands."""
    optimiser = clipped_descent(scaling, learning_rate=0.01, **settings)
    found: list[Any] = []

    def keep(operands: Any, program: Any, count: int) -> None:
        found.append((descent_programs(program), operands))

    with descending_by(keep):
        jax.eval_shape(lambda *given: descend(optimiser, *given), drawn(0), optimiser.init(drawn(0)), drawn(1))
    return found[0]


@pytest.mark.parametrize("bound", [0.5, float("inf")], ids=["clipped", "not clipped"])
def test_a_kernel_compiles_for_a_gpu_that_is_not_here(bound: float) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollmill[fusion]'")
    from rollmill.fusion.backends.triton.compile import compile_for
    from rollmill.fusion.backends.triton.descents import descent_kernel

    programs, (weights, gradients, *state) = programs_of(optax.scale_by_adam(), max_grad_norm=bound)
    assert programs is not None
    known = dict(zip(programs.plan.program.invars[1:], state, strict=True))
    arrays = [gradients, weights, *(known[atom] for atom in (*programs.flat, *programs.single))]
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    kernel = descent_kernel(programs, SIZE)
    assert ".target sm_90" in compile_for(kernel, shapes, 90).asm["ptx"]
    assert kernel.aliases == {1: 1, 2: 2, 3: 3}


def test_means_compile_for_a_gpu_that_is_not_here() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollmill[fusion]'")
    from rollmill.fusion.backends.triton.compile import compile_for
    from rollmill.fusion.backends.triton.means import means_kernel

    kernel = means_kernel((132, 4_681), 131_072)
    assert ".target sm_90" in compile_for(kernel, [jax.ShapeDtypeStruct((132, 4_681), jnp.float32)], 90).asm["ptx"]
    assert kernel.programs == 147 and kernel.outputs[0].shape == (4_681,)


def test_launches_tried_by_default_leave_steps_to_xla() -> None:
    from rollmill.fusion.backends.triton.launches import triton_backend

    backend, device = triton_backend("tf32"), SimpleNamespace(core_count=132)
    launches = [launch for rows in (64, 131_072) for launch in backend.gradients.launches(rows, device)]
    launches += backend.gradients.launches(64, device, by_step=True)
    assert launches and all(backend.descend(launch) is None for launch in launches)
    assert backend.descend(GradientLaunch(132, steps_optimiser=1)) is not None


def test_steps_that_depend_on_more_than_sums_have_no_kernel() -> None:
    assert programs_of(optax.add_noise(0.1, 0.5, 0), max_grad_norm=0.5)[0] is None
