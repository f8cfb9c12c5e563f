"""Launches that were never verified on a device are compared with the reference before they are used."""

import contextlib
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import rollmill
from one_time import run_once
from rollmill.core.errors import CannotFuse
from rollmill.dataflow import init_state, shuffled_rows
from rollmill.fusion import (
    LaunchSearch,
    compile_candidates,
    find_fastest_launch,
    first_batch,
    lower_gradients,
    lower_rollout,
)
from rollmill.fusion.backends.cpu.launches import cpu_backend
from rollmill.fusion.backends.triton.gradients import GradientLaunch
from rollmill.fusion.backends.triton.launches import triton_backend
from rollmill.fusion.backends.triton.rollout import Launch
from rollmill.fusion.kernels.gradients import run_gradients_reference
from rollmill.fusion.kernels.minibatch_loop import epoch_inputs
from rollmill.fusion.kernels.rollout import rollout_inputs, run_reference
from rollmill.fusion.tune.agreement import gradient_agreement, rollout_agreement

SIZES = {"num_envs": 32, "num_steps": 4, "total_timesteps": 128, "num_minibatches": 2}
NETWORK = rollmill.NetworkConfig(hidden_sizes=(8,))
LAUNCH = (16, 1)


@pytest.fixture(scope="module")
def begun():
    """A graph, its first state, the batch, and the rows of an epoch."""
    graph = rollmill.ppo("CartPole-v1", network=NETWORK, **SIZES)
    index = jnp.arange(SIZES["num_envs"], dtype=jnp.int32)

    def begin(key):
        state = init_state(graph, key, index)
        return state, *first_batch(graph, state), shuffled_rows(key, index, graph.loops)

    return graph, *run_once(begin, jax.random.key(3))


def backend_of(kind, run, *, is_unverified=True):
    """A backend whose kernels of one kind are computed by `run`."""
    backend = cpu_backend()
    own = {"run": lambda launch: run, "is_unverified": lambda launch: is_unverified}
    return backend._replace(**{kind: getattr(backend, kind)._replace(**own)})


def of_rollouts(begun, change, **options):
    graph, state, *_ = begun
    step = lower_rollout(graph)

    def run(*task):
        after, steps = run_reference(*task)
        return after, [change(leaf) for leaf in steps]

    agrees = rollout_agreement(backend_of("rollouts", run, **options), step, SIZES["num_steps"], LAUNCH)
    return agrees and agrees(*rollout_inputs(step, graph.weights(state.learner), state.collector, state.key))


def of_gradients(begun, change, **options):
    graph, _, learner, batch, rows = begun
    step = lower_gradients(graph)
    run = lambda *task: change(run_gradients_reference(*task))
    agrees = gradient_agreement(backend_of("gradients", run, **options), graph, step, LAUNCH)
    return agrees and agrees(*epoch_inputs(graph, learner, batch, rows))


def doubled(x):
    return x * 2 if x.dtype == jnp.float32 else x


BOTH = pytest.mark.parametrize("agreement", [of_rollouts, of_gradients])


@BOTH
def test_equal_results_agree_and_wrong_ones_do_not(agreement, begun):
    assert agreement(begun, lambda x: x)
    assert not agreement(begun, doubled)


@BOTH
def test_verified_launches_are_not_compared(agreement, begun):
    assert agreement(begun, doubled, is_unverified=False) is None


def test_one_wrong_number_of_a_gradient_is_found(begun):
    largest = lambda x: x.at[jnp.argmax(jnp.abs(x[:16]))].multiply(1.1)
    assert not of_gradients(begun, largest)


def test_a_few_other_actions_are_rounding(begun):
    one_other = lambda leaf: leaf.at[:, 0].set(1 - leaf[:, 0]) if leaf.dtype == jnp.int32 else leaf
    assert of_rollouts(begun, one_other)


def search_of(folder, wrong):
    """A search among two launches of which some are wrong."""
    shapes = [jax.ShapeDtypeStruct((8,), jnp.float32)]
    agrees = lambda launch: lambda x: jnp.bool_(launch not in wrong)
    launches, fused = [(1,), (2,)], lambda launch: lambda x: x * launch[0]
    nothing = lambda: contextlib.nullcontext(lambda: None)
    return LaunchSearch(folder / "launch.json", launches, fused, None, shapes, nothing, make_check=agrees)


@pytest.mark.parametrize("wrong", [(1,), (2,)])
def test_a_wrong_launch_is_not_chosen(wrong, tmp_path):
    search = search_of(tmp_path, {wrong})
    assert find_fastest_launch(search, compile_candidates(search), [jnp.ones(8)]).launch != wrong


def test_a_search_without_a_right_launch_finds_none(tmp_path):
    search = search_of(tmp_path, {(1,), (2,)})
    with pytest.raises(CannotFuse, match="no launch of the kernel gives the same results"):
        find_fastest_launch(search, compile_candidates(search), [jnp.ones(8)])
    assert search.stored_result() is None


def test_wide_layers_have_launches_with_tiles_which_are_verified_first():
    backend = triton_backend("tf32")
    rollouts = partial(backend.rollouts.launches, 4_096, 1_000)
    gradients = partial(backend.gradients.launches, 131_072, SimpleNamespace(core_count=132))
    for kind, launches, tiles in (
        (backend.rollouts, rollouts, lambda launch: Launch(*launch).tile),
        (backend.gradients, gradients, lambda launch: GradientLaunch(*launch).tile),
    ):
        assert not any(kind.is_unverified(launch) for launch in launches())
        assert list(launches()) == list(launches(largest_matrix=128 * 128))
        wide = launches(largest_matrix=256 * 256)
        assert all(tiles(launch) == 64 and kind.is_unverified(launch) for launch in wide)
        assert "in tiles of 64" in kind.describe(wide[0])
    both = rollouts(largest_matrix=256 * 128)
    assert {backend.rollouts.is_unverified(launch) for launch in both} == {False, True}


@pytest.mark.parametrize(("width", "is_left"), [(256, False), (512, True)])
def test_gradients_of_very_wide_layers_take_too_long_to_compile(width, is_left):
    network = rollmill.NetworkConfig(hidden_sizes=(width, width))
    step = lower_gradients(rollmill.ppo("CartPole-v1", network=network, **SIZES))
    reason = triton_backend("tf32").reason_to_skip_gradients(step)
    assert ("products of matrix tiles" in (reason or "")) == is_left
