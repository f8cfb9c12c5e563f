"""Trainings whose rollouts are fused give what others give; where they cannot be, that is said."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.core.errors import UsageError
from rollmill.core.machine import describe_processor
from rollmill.dataflow import MeanGradients
from rollmill.fusion import CannotFuse, GradientLaunch, estimate_rollout_pressure
from rollmill.fusion.backends import base
from rollmill.fusion.backends.cpu import launches as code_launches
from rollmill.fusion.backends.triton import launches as kernel_launches
from rollmill.programs import fused_kernels as fusing, kernels as choosing
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from rollmill.programs.kernel_choice import choose_kernels
from rollmill.programs.search_cost import SearchBudget, SearchRecords
from rollmill.record.leaves import to_host
from wordings import raises

SIZES = {"num_envs": 8, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2}
GPU = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="H200")
CHOICE = {"numerics": "tf32", "unroll": 1, "devices": [GPU], "num_seeds": 1}


@pytest.fixture
def rollouts_alone(monkeypatch):
    """Gradients are left as they are: there is no GPU to time their kernel on; no training is too short."""
    monkeypatch.setattr(choosing, "MIN_STEPS_TO_TUNE", {"gpu": 0, "cpu": 0})

    def no_gradients(self):
        raise CannotFuse("there is no GPU.")

    monkeypatch.setattr(fusing._Chooser, "_gradient_candidates", no_gradients)


def graph_on(env, iterations=4):
    network = rollmill.NetworkConfig(hidden_sizes=(16,))
    return rollmill.ppo(env, **SIZES, total_timesteps=8 * 16 * iterations, network=network)


def calling_back():
    """CartPole whose step asks the host."""
    env = rollmill.make("CartPole-v1")

    def step(key, state, action, params):
        timestep = env.step(key, state, action, params)
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        told = jax.pure_callback(np.asarray, shape, timestep.observation[0], vmap_method="expand_dims")
        return timestep._replace(reward=timestep.reward + 0 * told)

    return env._replace(step=step)


def trained(graph, **options):
    program = lower(graph, **options)
    *_, last = dispatch_ahead(program, program.start(), first=0, until=graph.loops.iterations)
    return to_host(last.after)


@pytest.mark.parametrize(
    "fusion", [pytest.param(fusion, marks=pytest.mark.slow) for fusion in ("rollout", "full")]
)
def test_fused_trainings_learn_as_others_do(fusion):
    graph = graph_on(rollmill.make("CartPole-v1"))
    fused, plain = trained(graph, fusion=fusion), trained(graph)
    assert fused.keys() == plain.keys()
    for name in plain:
        np.testing.assert_allclose(fused[name], plain[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_rollouts_fuse_before_a_replay_memory():
    graph = rollmill.dqn(
        rollmill.make("CartPole-v1"),
        num_envs=8,
        num_steps=8,
        total_timesteps=8 * 8 * 4,
        buffer_size=8 * 40,
        batch_size=16,
        learning_starts=64,
        network=rollmill.NetworkConfig(hidden_sizes=(16,)),
    )
    fused, plain = trained(graph, fusion="rollout"), trained(graph)
    assert any(name.startswith("rings.") for name in plain)
    for name in plain.keys() - {"rings.views.words", "rings.outcomes.words"}:  # whose bits differ by rounding
        np.testing.assert_allclose(fused[name], plain[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_fused_run_goes_on_where_it_was_stopped():
    graph = graph_on(rollmill.make("CartPole-v1"), iterations=6)
    program = lower(graph, fusion="rollout")
    states = {
        window.last: window.after
        for window in dispatch_ahead(program, program.start(), first=0, until=6, strides=(3,))
    }
    *_, last = dispatch_ahead(program, states[3], first=3, until=6)
    again, whole = to_host(last.after), to_host(states[6])
    for name in whole:
        np.testing.assert_array_equal(again[name], whole[name], err_msg=name)


def test_what_cannot_be_fused_trains_all_the_same_and_says_why(rollouts_alone):
    graph = graph_on(calling_back(), iterations=1)
    rollouts = choose_kernels(graph, fusion="auto", **CHOICE).rollouts
    assert not rollouts.fused
    assert "rollouts are not fused" in rollouts.note and "pure_callback" in rollouts.note
    assert "test_fusing.py" in rollouts.note  # the caller's own line
    assert trained(graph, fusion="auto")
    with raises("fusion-is-not-possible-auto", "rollout", "pure_callback"):
        lower(graph, fusion="rollout")


def test_short_trainings_are_not_timed_first():
    ways = choose_kernels(graph_on(rollmill.make("CartPole-v1")), fusion="auto", **CHOICE)
    assert not ways.rollouts.fused and not ways.gradients.fused
    assert ways.notes == [
        (
            "nothing is fused: 512 environment steps are too few to make up for the search for the fastest "
            "kernels. Use fusion=full to fuse anyway"
        )
    ]


def test_a_search_says_what_it_took_and_saves(monkeypatch):
    def start(tuner, search, prepare):
        tuner.seconds = 12.0
        return lambda: fusing.TunedLaunch(tuple(search.launches[0]), 1.0, 3.0)

    monkeypatch.setattr(fusing.Tuner, "start", start)
    graph = graph_on(rollmill.make("CartPole-v1"))
    choice = choose_kernels(graph, fusion="full", **CHOICE)
    saved = graph.loops.iterations * (1 + graph.loops.epochs) * 2 / 4  # four rollouts, or epochs, are timed
    took = "the search for kernels took 12 s, once for this device and size"
    note = f"{took}; they save about {saved:.0f} s in this run"
    assert choice.notes[-1] == note and len(choice.notes) == 3


def test_a_run_keeps_the_launches_that_it_began_with(monkeypatch):
    monkeypatch.setattr(fusing, "rollout_search", None)  # there is nothing to be timed
    launches = {"device": "H200", "rollouts": [32, 1], "gradients": None}
    ways = choose_kernels(graph_on(rollmill.make("CartPole-v1")), fusion="auto", launches=launches, **CHOICE)
    assert ways.rollouts.fused and ways.rollouts.launch == (32, 1) and not ways.gradients.fused
    assert ways.notes == [
        "rollouts are one kernel (blocks of 32 environments, 1 warps each), as at the beginning of this run"
    ]
    assert ways.launches == {**launches, "rollouts": (32, 1)}


@pytest.mark.parametrize("part", ["rollouts", "gradients"])
def test_a_group_has_the_kernels_of_its_own_parts(part):
    launches = {"device": "H200", "rollouts": None, "gradients": None, part: [1, 32, 1]}
    graph = graph_on(rollmill.make("CartPole-v1"))
    choice = choose_kernels(graph, fusion="full", launches=launches, **CHOICE, parts=(part,), shares=2)
    other = choice.gradients if part == "rollouts" else choice.rollouts
    assert getattr(choice, part).launch == (1, 32, 1) and not other.fused and len(choice.notes) == 1
    assert choice.launches == {**launches, part: (1, 32, 1)}


def test_a_run_of_an_earlier_version_keeps_its_gradient_launch():
    """It recorded seven numbers, of which the fifth was for kernels of optimiser steps."""
    launches = {"device": "H200", "rollouts": None, "gradients": [264, 64, 4, 0, 0, 64, 0]}
    graph = graph_on(rollmill.make("CartPole-v1"))
    choice = choose_kernels(graph, fusion="full", launches=launches, **CHOICE, parts=("gradients",))
    run = choice.gradients.function.keywords["run"]
    assert run.keywords["launch"] == GradientLaunch(264, 64, 4, tile=64)
    assert choice.notes == [
        "gradients are one kernel (264 programs of 64 samples, 4 warps each, matrices in tiles of 64), as at the "
        "beginning of this run"
    ]


@pytest.mark.parametrize(
    ("part", "launch", "named"),
    [
        ("rollouts", [32, 1, 0, 0, 0, 7], "block, num_warps"),
        ("rollouts", [], "block, num_warps"),
        ("rollouts", [0, 4], "block=0"),
        ("rollouts", [32, 3], "num_warps=3"),
        ("gradients", [0, 64, 4], "num_programs=0"),
        ("gradients", [264, 64, 4, 0, 0, 64, 0, 1], "num_programs, block"),
    ],
)
def test_a_launch_that_does_not_fit_is_named(part, launch, named):
    launches = {"device": "H200", "rollouts": None, "gradients": None, part: launch}
    graph = graph_on(rollmill.make("CartPole-v1"))
    with raises("run-has-recorded-launches-but", f"launches.{part}={launch}", named):
        choose_kernels(graph, fusion="auto", launches=launches, **CHOICE, parts=(part,))


def test_launches_of_another_device_are_not_kept():
    launches = {"device": "A100", "rollouts": [32, 1], "gradients": None}
    ways = choose_kernels(graph_on(rollmill.make("CartPole-v1")), fusion="auto", launches=launches, **CHOICE)
    assert not ways.rollouts.fused  # 512 steps are too few to time anew


@pytest.mark.parametrize("fusion", ["auto", "rollout"])
@pytest.mark.slow
def test_what_turns_out_impossible_at_the_end_is_left_to_xla_unless_it_was_asked_for(monkeypatch, fusion):
    """The program of a mesh may hold what the one that was timed did not."""

    def refuse(*task, launch):
        raise CannotFuse("sinc cannot be fused.")

    monkeypatch.setattr(code_launches, "run_rollout_code", refuse)
    graph = graph_on(rollmill.make("CartPole-v1"))
    begun = {"device": describe_processor(), "rollouts": (8,), "gradients": None}
    if fusion == "rollout":
        with pytest.raises(UsageError, match="fusion=rollout is not possible; .* sinc cannot be fused"):
            lower(graph, fusion=fusion, launches=begun)
        return
    program = lower(graph, fusion=fusion, launches=begun)
    assert program.notes == ["nothing is fused: sinc cannot be fused."] and program.launches is None


@pytest.mark.slow
def test_games_of_several_agents_fuse_on_a_mesh_of_one():
    """JAX says of their arrays on which devices they lie, in the middle of the environment."""
    env = rollmill.make("TagGridWorld-Small-v0")
    graph = rollmill.mappo(
        env, **SIZES, total_timesteps=8 * 16 * 2, network=rollmill.NetworkConfig(hidden_sizes=(8,))
    )
    fused, plain = trained(graph, fusion="rollout"), trained(graph)
    for name in plain:
        np.testing.assert_allclose(fused[name], plain[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_what_triton_cannot_compile_is_left_to_xla(monkeypatch, rollouts_alone):
    def refuse(*_, **__):
        raise CannotFuse("Triton cannot compile the kernel: no")

    monkeypatch.setattr(fusing._Chooser, "_tune_rollouts", refuse)
    ways = choose_kernels(graph_on(rollmill.make("CartPole-v1")), fusion="auto", **CHOICE)
    assert not ways.rollouts.fused and "Triton cannot compile the kernel" in ways.rollouts.note


@pytest.mark.parametrize(("training", "fused"), [(1e5, True), (100.0, False)])
def test_a_kernel_that_compiles_for_minutes_is_tried_in_long_runs(monkeypatch, rollouts_alone, training, fused):
    """`auto` leaves no step to XLA because of its size: a long run times both."""
    monkeypatch.setattr(kernel_launches, "needs_segments", lambda count: True)
    monkeypatch.setattr(kernel_launches, "COMPILE_SECONDS", 1.0)
    launches, graph = [], graph_on(rollmill.make("CartPole-v1"))
    budget = SearchBudget(training, 5.0, SearchRecords("gpu", "an artificial machine"))

    def timed(tuner, search, prepare):
        launches.extend(search.launches)
        budget.admit(search.file, 1, 0.0, search.compile_seconds)
        return lambda: fusing.TunedLaunch((32, 1), 1.0, 2.0)

    monkeypatch.setattr(fusing.Tuner, "start", timed)
    way = choose_kernels(graph, fusion="auto", budget=budget, **CHOICE).rollouts
    assert way.fused == fused and launches == [(32, 1, 0, 0, 0)]
    operations = estimate_rollout_pressure(graph).num_operations
    assert fused or f"would take about {operations:,} s, but only 20 s are left for it in this run" in way.note


@pytest.mark.parametrize(("longest", "fused"), [(1e6, True), (10, False)])
def test_kernels_that_compile_for_minutes_have_to_be_asked_for_without_a_budget(
    monkeypatch, rollouts_alone, longest, fused
):
    """As on a mesh, and with a replay memory."""
    monkeypatch.setattr(kernel_launches, "needs_segments", lambda count: True)
    monkeypatch.setattr(kernel_launches, "COMPILE_SECONDS", 1.0)
    monkeypatch.setattr(fusing, "MAX_COMPILE_SECONDS", longest)
    monkeypatch.setattr(
        fusing._Chooser, "_tune_rollouts", lambda *_: lambda: fusing.TunedLaunch((32, 1), 1.0, 2.0)
    )
    graph = graph_on(rollmill.make("CartPole-v1"))
    way = choose_kernels(graph, fusion="auto", **CHOICE).rollouts
    assert way.fused == fused
    assert fused or "more than the limit of 10 s for runs whose duration is not estimated" in way.note
    assert choose_kernels(graph, fusion="rollout", **CHOICE).rollouts.fused


def test_very_many_products_have_to_be_asked_for(monkeypatch, rollouts_alone):
    monkeypatch.setattr(base, "MAX_PRODUCTS", 0)
    monkeypatch.setattr(fusing._Chooser, "_tune_rollouts", lambda *_: lambda: fusing.TunedLaunch((32, 1)))
    graph = graph_on(rollmill.make("CartPole-v1"))
    way = choose_kernels(graph, fusion="auto", **CHOICE).rollouts
    assert not way.fused and "With more than 0, compiling takes minutes. Use fusion=rollout to fuse" in way.note
    assert choose_kernels(graph, fusion="rollout", **CHOICE).rollouts.fused


@pytest.mark.parametrize("capability", ["7.5", "gfx942"])
def test_chips_without_kernels_are_named(rollouts_alone, capability):
    chip = SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="a chip")
    ways = choose_kernels(graph_on(rollmill.make("CartPole-v1")), fusion="auto", **{**CHOICE, "devices": [chip]})
    assert not ways.rollouts.fused and f"a chip has {capability}" in ways.rollouts.note


@pytest.mark.slow
def test_two_devices_descend_as_one():
    graph = graph_on(rollmill.make("CartPole-v1"), iterations=2)
    two = trained(graph, fusion="full", devices=jax.devices()[:2])
    one = trained(graph, fusion="full")
    for name in one:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_each_of_several_seeds_is_fused_as_it_is_alone():
    graph = graph_on(rollmill.make("CartPole-v1"), iterations=2)
    both, alone = trained(graph, fusion="full", seeds=(0, 1)), trained(graph, fusion="full", seeds=(1,))
    for name in alone:
        np.testing.assert_array_equal(both[name][1], alone[name], err_msg=name)


def replay_graph():
    return rollmill.dqn(
        rollmill.make("CartPole-v1"),
        total_timesteps=256,
        num_envs=8,
        num_steps=8,
        learning_starts=64,
        batch_size=16,
        buffer_size=320,
        network=rollmill.NetworkConfig(hidden_sizes=(4,)),
    )


@pytest.mark.slow
def test_seeds_with_replay_memories_learn_by_kernels_what_xla_learns():
    fused, plain = (trained(replay_graph(), fusion=fusion, seeds=(0, 1)) for fusion in ("full", "off"))
    for name in plain:
        np.testing.assert_allclose(fused[name], plain[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_lanes_divide_the_programs_of_a_gpu():
    kernels = kernel_launches.triton_backend("tf32")
    assert kernels.gradients.share((256, 64, 4), 16).num_programs == 16
    assert kernels.gradients.share((8, 64, 4), 16).num_programs == 1
    assert kernels.rollouts.share((64, 4, 0), 16) == (64, 4, 0)


def test_a_loss_of_whole_sequences_is_refused_and_rollouts_advised():
    network = rollmill.NetworkConfig(torso="gru", hidden_sizes=(8,), recurrent_size=8)
    graph = rollmill.ppo(rollmill.make("CartPole-v1"), **SIZES, total_timesteps=8 * 16, network=network)
    total = lambda network: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(network))
    of_sequences = MeanGradients(lambda network, *_: (total(network), {}), graph.gradients.network)
    with raises("fusion-is-not-possible-auto", "full", "train on whole sequences") as refusal:
        lower(graph._replace(gradients=of_sequences), fusion="full")
    assert "hint: fusion=rollout is possible" in str(refusal.value)


def test_a_state_that_is_too_large_says_so(rollouts_alone):
    env = rollmill.make("CartPole-v1")

    def reset(key, params):
        observation, state = env.reset(key, params)
        return observation, (state, jnp.zeros((64, 64)) + observation[0])

    def step(key, state, action, params):
        timestep = env.step(key, state[0], action, params)
        return timestep._replace(state=(timestep.state, jnp.cumsum(state[1], axis=0)))

    graph = graph_on(env._replace(reset=reset, step=step), iterations=1)
    rollouts = choose_kernels(graph, fusion="auto", **CHOICE).rollouts
    assert not rollouts.fused and "(64, 64) has 4096 numbers per environment" in rollouts.note
