"""Gradients as programs of one sample are those of `jax.grad` of the mean; their kernels compile without a GPU."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from one_time import run_once
from rollmill.dataflow import flat_samples, identity, init_state, pack, plain_minibatch_loop, row_gradients
from rollmill.fusion import (
    GradientLaunch,
    first_batch,
    fused_gradients,
    fused_minibatch_loop,
    lower_gradients,
    run_gradients_reference,
)
from rollmill.fusion.backends.cpu.launches import cpu_backend
from rollmill.fusion.backends.triton.compile import compile_for
from rollmill.fusion.backends.triton.gradients import gradient_kernel
from rollmill.fusion.kernels.accumulators import accumulators_of
from rollmill.fusion.kernels.gradients import GradientStep, Minibatch, Shuffled
from rollmill.fusion.kernels.leaves import input_leaves
from rollmill.fusion.kernels.loop_fission import plan_sample_loops
from rollmill.fusion.kernels.sums import sums_of
from rollmill.fusion.lower.function import lower_function
from wordings import raises

SHARED = rollmill.NetworkConfig(shared_torso=True)
SEPARATE = rollmill.NetworkConfig(hidden_sizes=(40, 33), activation="relu")
WIDE = rollmill.NetworkConfig(hidden_sizes=(96, 72), layer_norm=True, shared_torso=True)
TINY = rollmill.NetworkConfig(hidden_sizes=(8,))
LINEAR = rollmill.NetworkConfig(hidden_sizes=())
GRU = rollmill.NetworkConfig(torso="gru", hidden_sizes=(12,), recurrent_size=36)
LSTM = rollmill.NetworkConfig(torso="lstm", hidden_sizes=(12,), recurrent_size=8)
STATE_STD = rollmill.NetworkConfig(hidden_sizes=(64,), state_dependent_std=True, squash_actions=True)


class Case(NamedTuple):
    environment: str
    network: rollmill.NetworkConfig = SHARED
    algorithm: str = "ppo"
    settings: dict = {}


CASES = {
    "shared": Case("CartPole-v1"),
    "separate": Case("CartPole-v1", SEPARATE),
    "no-hidden-layer": Case("CartPole-v1", LINEAR),
    "wide": Case("CartPole-v1", WIDE),
    "continuous": Case("Pendulum-v1", settings={"normalize_observations": True, "normalize_values": True}),
    "state-dependent-std": Case("Pendulum-v1", STATE_STD),
    "plain-losses": Case("Acrobot-v1", settings={"clip_vloss": False, "norm_adv": False}),
    "masked": Case("Probe-ActionMask-v0"),
    "several-actions": Case("Probe-MultiDiscrete-v0"),
    "a3c": Case("CartPole-v1", algorithm="a3c"),
    "mappo": Case("TagGridWorld-Small-v0", SEPARATE, "mappo"),
    "ippo": Case("TagGridWorld-Small-v0", SEPARATE, "ippo"),
    "dqn": Case("CartPole-v1", SEPARATE, "dqn"),
    "vdn": Case("TwoStepGame-v0", SEPARATE, "vdn"),
    "qmix": Case("TwoStepGame-v0", SEPARATE, "qmix", {"mixing_size": 8, "hypernetwork_size": 8}),
    "dqn-prioritised": Case(
        "CartPole-v1", SEPARATE, "dqn", {"prioritised": True, "duelling": True, "huber": True}
    ),
    "dqn-masked": Case("Probe-ActionMask-v0", SEPARATE, "dqn"),
    "dqn-c51": Case("CartPole-v1", TINY, "dqn", {"value_distribution": "c51", "num_atoms": 5}),
    "dqn-quantiles": Case("CartPole-v1", TINY, "dqn", {"value_distribution": "quantiles", "num_atoms": 5}),
    "pqn": Case("CartPole-v1", rollmill.NetworkConfig(hidden_sizes=(8,), layer_norm=True), "pqn"),
    "sac": Case("Pendulum-v1", SEPARATE, "sac"),
    "sac-discrete": Case("CartPole-v1", SEPARATE, "sac"),
    "td3": Case("Pendulum-v1", SEPARATE, "td3"),
    "ddpg": Case("Pendulum-v1", SEPARATE, "ddpg"),
    "impala": Case("CartPole-v1", SEPARATE, "impala"),
    "gru": Case("CartPole-v1", GRU),
    "lstm": Case("Pendulum-v1", LSTM),
    "a3c-gru": Case("CartPole-v1", GRU, "a3c"),
    "impala-gru": Case("CartPole-v1", GRU, "impala"),
}
FAST = ("separate", "continuous", "masked", "td3", "gru")
REPLAY = {"batch_size": 64, "learning_starts": 64, "buffer_size": 1000}
TABLE = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES]


def graph_of(case, num_envs=8, num_steps=16):
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "total_timesteps": num_envs * num_steps}
    if case.algorithm in ("dqn", "sac", "td3", "ddpg", "vdn", "qmix"):
        sizes |= REPLAY
    elif case.algorithm != "a3c":
        sizes |= {"num_minibatches": 2}
    env = rollmill.time_limit(rollmill.make(case.environment), 9)
    return getattr(rollmill, case.algorithm)(env, network=case.network, **sizes, **case.settings)


def learned_a_little(graph):
    """A learner that is not quite the one that has acted, its batch, and rows of a minibatch in some order."""
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    learner, batch = run_once(lambda key: first_batch(graph, init_state(graph, key, index)), jax.random.key(5))
    keys = iter(jax.random.split(jax.random.key(2), 64))
    moved = lambda x: x + 0.05 * jax.random.normal(next(keys), x.shape) if x.dtype == jnp.float32 else x
    network = jax.tree.map(moved, graph.gradients.network(learner))
    learner = eqx.tree_at(graph.gradients.network, learner, network)
    count = num_rows(graph, batch)
    rows = jax.random.permutation(jax.random.key(1), count)[: count // 2]
    return learner, batch, rows.astype(jnp.uint32)


def first(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.slow_beyond(1)
def test_they_are_the_gradients_of_the_mean(name):
    graph = graph_of(CASES[name])
    assert_the_gradients_of_the_mean(graph, *learned_a_little(graph))


def test_a_matrix_that_agents_share_has_one_product_for_each_of_them():
    step = lower_gradients(graph_of(CASES["mappo"]))
    assert [len(found.pairs) for found in step.sums if found.shape == (40, 33)] == [1, 1, 4, 4]


@pytest.mark.slow
def test_a_minibatch_is_of_any_size():
    """29 of 61 samples do not fill a block."""
    graph = graph_of(CASES["no-hidden-layer"])
    learner, batch, rows = learned_a_little(graph)
    assert_the_gradients_of_the_mean(graph, learner, batch, rows[:61])


@pytest.mark.parametrize("algorithm", ["a3c", pytest.param("impala", marks=pytest.mark.slow)])
def test_metrics_that_are_counts_or_flags_have_a_mean(algorithm):
    """The mean of integers is no integer."""

    def loss_with_counts(loss, *args):
        total, metrics = loss(*args)
        flag = total > 0
        counts = {"count": 1 + 4 * flag.astype(jnp.int32), "short": 200 * flag.astype(jnp.uint8)}
        return total, {**metrics, "flag": flag, **counts}

    graph = graph_of(Case("CartPole-v1", LINEAR, algorithm))
    counting = replace(graph.gradients, loss=partial(loss_with_counts, graph.gradients.loss))
    assert_the_gradients_of_the_mean(graph._replace(gradients=counting), *learned_a_little(graph))


def test_constants_of_sequences_are_those_of_the_conditioned_minibatch():
    """V-trace reads rewards, which are scaled here."""

    def scale_rewards(minibatch, reduce):
        samples = minibatch.samples
        return minibatch._replace(samples=samples._replace(reward=3 * samples.reward))

    graph = graph_of(Case("CartPole-v1", LINEAR, "impala"))._replace(condition=scale_rewards)
    assert_the_gradients_of_the_mean(graph, *learned_a_little(graph))


def test_conditioning_of_whole_sequences_is_refused():
    def shift_ends(minibatch, reduce):
        return minibatch._replace(sequences=jax.tree.map(lambda leaf: leaf + 1, minibatch.sequences))

    graph = graph_of(Case("CartPole-v1", LINEAR, "impala"))._replace(condition=shift_ends)
    begin = lambda key: first_batch(graph, init_state(graph, key, jnp.arange(8)))
    learner, batch = jax.eval_shape(begin, jax.random.key(0))
    computed = lambda learner, batch, rows: fused_gradients(graph, batch, identity, run=run_gradients_reference)(
        learner, rows
    )
    with raises("conditioning-minibatch-changes-leaves-whole"):
        jax.eval_shape(computed, learner, batch, jnp.arange(4, dtype=jnp.uint32))


def conditioned(change):
    condition = lambda minibatch, reduce: minibatch._replace(samples=change(minibatch.samples))
    return graph_of(CASES["no-hidden-layer"])._replace(condition=condition)


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        (
            lambda samples: samples._replace(target=samples.target.astype(jnp.float16)),
            "conditioning-minibatch-turns-samples-from",
            ("samples.target", "float32[64]", "float16[64]"),
        ),
        (
            lambda samples: samples._replace(observation=samples.observation[:, :2]),
            "conditioning-minibatch-turns-samples-from",
            ("samples.observation", "float32[64,4]", "float32[64,2]"),
        ),
        (lambda samples: (samples, samples.target), "conditioning-minibatch-adds-or-removes", ()),
    ],
)
def test_conditioning_changes_values_alone(change, code, values):
    """Kernels would read numbers of another type as numbers of the batch's type."""
    with raises(code, *values):
        lower_gradients(conditioned(change))


def assert_the_gradients_of_the_mean(graph, learner, batch, rows):
    by_code = cpu_backend()
    exact = partial(run_gradients_reference, precision="highest")
    coded = by_code.gradients.run(by_code.gradients.launches(len(rows), None)[0])

    def all_ways(learner, batch, rows):
        fused = [fused_gradients(graph, batch, identity, run=run)(learner, rows) for run in (exact, coded)]
        return *fused, row_gradients(graph, batch, identity)(learner, rows)

    *fused, plain = jax.jit(all_ways)(learner, batch, rows)

    def assert_close(path, mine, right):
        assert mine.dtype == right.dtype and mine.shape == right.shape
        scale = float(np.abs(right).max(initial=0.0))
        np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-4 * scale, err_msg=jax.tree_util.keystr(path))

    for found in fused:
        assert jax.tree.structure(found) == jax.tree.structure(plain)
        jax.tree.map_with_path(assert_close, found, plain)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain[0])) > 1e-3


def test_no_gradient_of_one_sample_is_written_out():
    graph = graph_of(CASES["separate"])
    step = lower_gradients(graph)
    products = [found.shape for found in step.sums if found.pairs]
    assert products == [(4, 40), (40, 33), (33, 2), (4, 40), (40, 33), (33, 1)]
    assert len(step.program.nodes()) < 300


def test_results_share_tiles_and_none_is_lost():
    graph = graph_of(CASES["shared"])
    step = lower_gradients(graph)
    kept = accumulators_of(step.sums, step.program.outputs)
    assert [len(tile.parts) for tile in kept.tiles] == [2, 1, 2, 1]  # the first layer with its bias; both heads
    covered = [
        part.offset + n for tile in kept.tiles for part in tile.parts for n in range(part.rows * part.columns)
    ]
    assert sorted(covered + [offset for offset, _ in kept.numbers]) == list(range(kept.size))


def kernel_of(case, numerics, launch):
    graph = graph_of(case)
    found = []

    def run(step, minibatch):
        kernel, arrays = gradient_kernel(step, minibatch, launch=launch, numerics=numerics)
        found.append((kernel, [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]))
        return jnp.zeros(sum(each.size for each in step.sums if each.is_computed))

    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    begin = lambda key: first_batch(graph, init_state(graph, key, index))
    learner, batch = jax.eval_shape(begin, jax.eval_shape(jax.random.key, 5))
    rows = jax.ShapeDtypeStruct((2, num_rows(graph, batch) // 4), jnp.uint32)
    jax.eval_shape(partial(an_epoch, graph, partial(fused_minibatch_loop, run=run)), learner, batch, rows)
    return found[0]


def num_rows(graph, batch):
    if graph.loops.minibatch_items == "sequences":
        return graph.loops.num_envs
    return jax.tree.leaves(jax.eval_shape(flat_samples, batch))[0].shape[0]


def an_epoch(graph, make_minibatch_loop, learner, batch, rows):
    loop = make_minibatch_loop(graph, identity)
    samples = loop.prepare_samples(batch)
    after, metrics = loop.run_epoch(loop.begin(learner), samples, first(loop.shuffle(samples, rows[None])))
    return loop.end(after), metrics


@pytest.mark.parametrize("name", ["separate", "continuous", "mappo"])
@pytest.mark.slow
def test_an_epoch_leads_to_the_same_weights(name):
    graph = graph_of(CASES[name])
    learner, batch, rows = learned_a_little(graph)
    run = partial(run_gradients_reference, precision="highest")
    ways = (partial(fused_minibatch_loop, run=run), plain_minibatch_loop)
    mine, right = (jax.jit(partial(an_epoch, graph, way))(learner, batch, rows.reshape(2, -1)) for way in ways)
    assert jax.tree.structure(mine) == jax.tree.structure(right)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), mine, right)
    before = graph.gradients.network(learner)
    after = graph.gradients.network(mine[0])
    assert not jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.all(x == y)), before, after))


KERNELS = [
    ("shared", "tf32", 90, GradientLaunch(4, 64, 4)),
    ("wide", "tf32", 90, GradientLaunch(4, 64, 4, tile=32)),
    ("continuous", "bfloat16", 80, GradientLaunch(2, 32, 2)),
    ("masked", "tf32", 120, GradientLaunch(1, 16, 1)),
]
LONG = ("mappo", "ippo", "dqn", "dqn-masked", "sac", "td3", "impala", "gru", "lstm")
"""Cases of many operations, of which one kernel each is compiled."""
SHORT = (
    "shared",
    "separate",
    "no-hidden-layer",
    "continuous",
    "state-dependent-std",
    "plain-losses",
    "masked",
    "a3c",
)
ALL = [
    (name, numerics, capability, GradientLaunch(2, *block))
    for name in SHORT
    for numerics in ("tf32", "bfloat16")
    for capability in (80, 90, 120)
    for block in ((64, 4), (128, 8))
]
ALL += [(name, "tf32", 90, GradientLaunch(2, 16 if name in ("gru", "lstm") else 64, 4)) for name in LONG]


@pytest.mark.parametrize(
    ("name", "numerics", "capability", "launch"),
    [*KERNELS, *(pytest.param(*x, marks=pytest.mark.slow) for x in ALL)],
)
@pytest.mark.slow_beyond(1)
def test_kernels_compile_for_gpus_that_are_not_here(name, numerics, capability, launch):
    pytest.importorskip("triton")
    kernel, arrays = kernel_of(CASES[name], numerics, launch)
    assert compile_for(kernel, arrays, capability).asm["cubin"]


def test_a_long_program_is_read_by_instructions():
    """Triton looks for what depends on each of its own reads, which takes hours with five agents."""
    long, short = (kernel_of(CASES[name], "tf32", GradientLaunch(2, 64, 4))[0].source for name in ("ippo", "dqn"))
    assert "read_four(table + at + " in long and "tl.load(table" not in long
    assert "tl.load(table" in short and "read_four" not in short


@pytest.mark.parametrize(
    ("recorded", "launch"),
    [
        ([528, 64, 4], GradientLaunch(528, 64, 4)),
        ([132, 16, 4, 1], GradientLaunch(132, 16, 4, reloads_weights=1)),
        ([528, 64, 4, 1, 1], GradientLaunch(528, 64, 4, reloads_weights=1)),
        ([264, 64, 4, 1, 0, 64, 192], GradientLaunch(264, 64, 4, 1, 64, 192)),
        ([264, 64, 4, 1, 64, 192], GradientLaunch(264, 64, 4, 1, 64, 192)),
    ],
)
def test_launches_that_any_version_has_recorded_are_read(recorded, launch):
    assert GradientLaunch.read(recorded) == launch


# --- losses that are no algorithm's ---------------------------------------------------------------------------


def kernel_of_loss(loss, weights, width):
    """The kernel of the gradients of `loss(weights, x)`, and its plan and arrays."""
    found = []

    def trace(weights, samples, rows):
        one = jax.ShapeDtypeStruct((width,), jnp.float32)
        lowered = lower_function(lambda weights, x: jax.grad(loss)(weights, x), (one,), (weights,), summed=True)
        leaves, results = input_leaves(lowered, [one]), lowered.outputs
        step = GradientStep(lowered, leaves, sums_of(results), results, [], [])
        minibatch = Minibatch(jnp.int32(0), pack([samples]), Shuffled(rows, {}), step.prologue(weights))
        kernel, arrays = gradient_kernel(step, minibatch, launch=GradientLaunch(2, 32, 2), numerics="tf32")
        kept = accumulators_of(step.sums, step.program.outputs)
        structs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        found.append((kernel, structs, kept, plan_sample_loops(kept, step.program)))
        return ()

    shapes = jax.ShapeDtypeStruct((64, width), jnp.float32), jax.ShapeDtypeStruct((1, 64), jnp.uint32)
    jax.eval_shape(trace, weights, *shapes)
    return found[0]


def test_as_many_passes_as_networks():
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    loss = lambda critics, x: sum(jnp.tanh(x @ inner) @ outer for inner, outer in critics)
    critics = [(struct(4, 16), struct(16)) for _ in range(10)]
    kernel, _, kept, plan = kernel_of_loss(loss, critics, 4)
    assert len(plan.loops) == 10
    assert all(f", tile{n}, mask" in kernel.source for n in range(len(kept.tiles)))


def test_a_stack_that_is_read_as_a_row_is_multiplied_as_one():
    pytest.importorskip("triton")
    loss = lambda weights, x: jnp.sum(jnp.tanh(x @ weights + x))
    kernel, arrays, _, _ = kernel_of_loss(loss, jax.ShapeDtypeStruct((12, 12), jnp.float32), 12)
    assert compile_for(kernel, arrays, 90).asm["cubin"]
