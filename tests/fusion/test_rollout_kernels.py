"""Rollouts as programs: trajectories are those of the unfused path, and the kernels compile without a GPU."""

import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from one_time import first_state
from rollmill.dataflow import collect, init_state, prepare
from rollmill.envs import RunningStatistics, registered
from rollmill.fusion import Launch, fused_collect, lower_rollout, run_reference
from rollmill.fusion.backends.triton.compile import compile_for
from rollmill.fusion.backends.triton.control import ALWAYS
from rollmill.fusion.backends.triton.hoist import Hoisted, permute_to_mma_order
from rollmill.fusion.backends.triton.rollout import rollout_kernel, rollout_source
from rollmill.fusion.kernels.leaves import to_raw
from rollmill.fusion.opt import segments

GRU = rollmill.NetworkConfig(torso="gru", hidden_sizes=(32,), recurrent_size=32)
SHARED = rollmill.NetworkConfig(hidden_sizes=(64, 64), shared_torso=True)
TINY = rollmill.NetworkConfig(hidden_sizes=(16,), shared_torso=True)
NUM_STEPS = 40


def graph_on(environment, network=SHARED, num_envs=16):
    sizes = {"num_envs": num_envs, "num_steps": NUM_STEPS, "total_timesteps": num_envs * NUM_STEPS}
    env = rollmill.time_limit(rollmill.make(environment), 25)
    # Of a game, one player makes the moves of both sides: policies for two players search, which is no kernel.
    env = env._replace(num_players=1, to_move=None)
    if environment.startswith("Tag"):
        return rollmill.mappo(env, **sizes, num_minibatches=1)
    return rollmill.ppo(env, **sizes, num_minibatches=1, network=network, normalize_values=True)


def begun(graph):
    state = first_state(graph, jax.random.key(3), jnp.arange(graph.loops.num_envs, dtype=jnp.int32))
    return in_other_units(graph.weights(state.learner)), state.collector


def in_other_units(weights):
    """Weights whose values are not in the units of rewards, as after an iteration."""
    if getattr(weights, "values", None) is None:
        return weights
    units = RunningStatistics(jnp.float32(-7), jnp.float32(4), jnp.float32(100))
    return eqx.tree_at(lambda whole: whole.values, weights, units)


def with_values(graph, weights, trajectory):
    return trajectory._replace(steps=jax.vmap(jax.vmap(partial(graph.compute_values, weights)))(trajectory.steps))


@pytest.mark.slow
def test_values_of_a_rollout_are_those_that_the_learner_would_compute():
    graph = graph_on("CartPole-v1")
    state = first_state(graph, jax.random.key(3), jnp.arange(16, dtype=jnp.int32))
    weights = in_other_units(graph.weights(state.learner))
    learner = eqx.tree_at(lambda whole: whole.weights, state.learner, weights)
    _, trajectory = jax.jit(partial(collect, graph))(weights, state.collector, jax.random.key(1))
    learn_from = jax.jit(lambda trajectory: prepare(graph, learner, trajectory, state.collector.index))
    mine, right = learn_from(with_values(graph, weights, trajectory)), learn_from(trajectory)
    assert int(trajectory.steps.truncated.sum()) > 0
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), mine, right)


@pytest.mark.parametrize("network", [SHARED, pytest.param(GRU, marks=pytest.mark.slow)], ids=["shared", "gru"])
def test_a_whole_trajectory_is_that_of_the_unfused_path(network):
    graph = graph_on("CartPole-v1", network)
    weights, collector = begun(graph)
    key = jax.random.key(1)
    fused = jax.jit(partial(fused_collect, graph, run=run_reference))(weights, collector, key)
    after, trajectory = jax.jit(partial(collect, graph))(weights, collector, key)
    plain = after, trajectory if graph.compute_values is None else with_values(graph, weights, trajectory)
    assert jax.tree.structure(fused) == jax.tree.structure(plain)
    assert int(fused[1].steps.truncated.sum()) > 0 and int(fused[1].steps.terminated.sum()) > 0

    def assert_close(path, mine, right):
        assert mine.dtype == right.dtype
        np.testing.assert_allclose(mine, right, rtol=1e-3, atol=1e-4, err_msg=jax.tree_util.keystr(path))

    jax.tree.map_with_path(assert_close, fused, plain)


def kernel_of(graph, numerics, launch):
    _, collector = begun(graph)
    step = lower_rollout(graph)
    keys = jax.ShapeDtypeStruct((graph.loops.num_envs, 2), jnp.uint32)
    task = step, step.prologue.shapes, to_raw(collector), keys, NUM_STEPS
    kernel, arrays = rollout_kernel(*task, launch=launch, numerics=numerics)
    return kernel, [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]


@pytest.fixture
def kernels_of_this_test(tmp_path, monkeypatch):
    """Their folder; what needs Triton is passed over where it is missing."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollmill[fusion]'")
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))


def by_triton(test):
    """A test that compiles kernels."""
    quiet = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
    return quiet(pytest.mark.usefixtures("kernels_of_this_test")(test))


CAPABILITIES = (80, 90, 120)
OWN = [name for name, _ in registered() if name not in ("CartPole-v1", "TagContinuous-v0", "CraftaxClassic-v0")]
"""All but one that is compiled anyway, one whose state does not fit, and one whose observations do not."""
LONG = ("ConnectFour-v0", "TagContinuous-Small-v0", "TagGridWorld-v0")
"""A step of the first is 29,000 nodes, which compile for minutes; for the other, TagGridWorld-Small-v0 stands."""
SHOW_NOTHING = ("Probe-ActionMask-v0", "Probe-ActionReward-v0", "Probe-ConstantReward-v0")
"""Whose observation is always the same, so that a policy of it is computed beside the kernel."""


def cases_of(name, of_three):
    """An environment's kernels, of which one is compiled in each run of the suite, on chips by turns."""
    for n, capability in enumerate(CAPABILITIES):
        rare = name in LONG or n != of_three
        marks = [pytest.mark.slow, pytest.mark.timeout(1_800)] if rare else []
        yield pytest.param(name, SHARED, "tf32", capability, Launch(32, 1), marks=marks)


KERNELS = [
    ("CartPole-v1", SHARED, "tf32", 90, Launch(64, 4)),
    ("CartPole-v1", SHARED, "bfloat16", 80, Launch(16, 1)),
    ("CartPole-v1", SHARED, "float32", 120, Launch(32, 2)),
    ("CartPole-v1", SHARED, "tf32", 90, Launch(32, 2, tile=32, kept_kilobytes=8)),
    *(case for n, name in enumerate(OWN) for case in cases_of(name, n % len(CAPABILITIES))),
    *(
        pytest.param("CartPole-v1", GRU, "tf32", capability, Launch(16, 1), marks=pytest.mark.slow)
        for capability in CAPABILITIES
    ),
]


@by_triton
@pytest.mark.parametrize(("environment", "network", "numerics", "capability", "launch"), KERNELS)
@pytest.mark.slow_beyond(2)
def test_kernels_compile_for_gpus_that_are_not_here(environment, network, numerics, capability, launch):
    found = compile_for(*kernel_of(graph_on(environment, network, num_envs=40), numerics, launch), capability)
    assert f".target sm_{capability}" in found.asm["ptx"]
    assert ("mma" in found.asm["ptx"]) == (numerics != "float32" and environment not in SHOW_NOTHING)


@by_triton
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("numerics", "launch"), [("bfloat16", Launch(32, 1, max_registers=128)), ("float32", Launch(32, 4))]
)
def test_a_thread_computes_the_environment_of_its_own_place_alone(numerics, launch):
    kernel, arrays = kernel_of(graph_on("CartPole-v1", num_envs=32), numerics, launch)
    found = compile_for(kernel, arrays, 90).asm["ptx"]
    assert found.count("div.rn.f32") == kernel.source.count("tl.div_rn(") > 0
    assert (".maxnreg 128" in found) == (launch.max_registers == 128)


@pytest.mark.slow
@by_triton
@pytest.mark.parametrize(("num_envs", "condition"), [(32, ""), (40, "@inside ")], ids=["whole", "partly empty"])
def test_the_numbers_of_a_long_leaf_leave_side_by_side(num_envs, condition):
    """An observation of six: three pairs, written in each step and after the last one.

    Two of them are read once; the third are velocities, which the state has as well.
    """
    found = compile_for(
        *kernel_of(graph_on("Acrobot-v1", TINY, num_envs=num_envs), "tf32", Launch(32, 1)), 90
    ).asm["ptx"]
    what = re.escape(condition) + r"{}\.global\.v2\.b32 {}; "
    place, pair = r"\[(%rd\d+) \+ (\d+)\]", r"\{%r\d+, ?%r\d+\}"
    loads = re.findall(what.format("ld", rf"{pair}, {place}").rstrip(), found)
    stores = re.findall(what.format("st", rf"{place}, {pair}"), found)
    assert [[offset for _, offset in own] for own in (loads, stores)] == [["0", "8"], ["0", "8", "16"] * 2]
    assert found.count("@inside") == (len(loads + stores) if condition else 0)


@pytest.mark.slow
@by_triton
def test_in_long_programs_triton_places_nothing_and_products_stand_apart(monkeypatch):
    """As a program of one node more than a long one is written; the branch is not there in the end."""
    monkeypatch.setattr(segments, "MAX_NODES", 0)
    kernel, arrays = kernel_of(graph_on("Acrobot-v1", GRU, num_envs=40), "tf32", Launch(32, 1))
    vectors = re.sub(r"tl\.load\(uniform\d+ \+ \d+\)", "", kernel.source)  # Triton need not place single numbers
    assert "tl.load(" not in vectors and "tl.store(" not in vectors
    assert kernel.source.count(f"if {ALWAYS}:") == 1
    before, branch = re.split(rf"\n( +)if {re.escape(ALWAYS)}:\n", kernel.source)[::2]
    inside = re.match(r"( {12}.*\n)*", branch).group()
    assert "tl.dot(" in before and inside.count("\n") > 400 and "tl.dot(" not in inside
    assert "nctaid" not in compile_for(kernel, arrays, 90).asm["ptx"]


def lamps(dtype):
    """Eight numbers of a type, of which an action changes every other one."""

    def reset(key, params):
        state = jax.random.bits(key, (8,), jnp.uint32).astype(dtype)
        return state.astype(jnp.float32), state

    def step(key, state, action, params):
        changed = (~state.astype(bool)).astype(dtype)
        state = jnp.where(jnp.arange(8) % 2 == action, changed, state)
        observation, ended = state.astype(jnp.float32), ~state[1].astype(bool)
        return rollmill.Timestep(observation, state, observation[0], ended, jnp.asarray(False), {})

    box = spaces.Box(-np.inf, np.inf, (8,), np.float32)
    return rollmill.Environment("Lamps", reset, step, box, spaces.Discrete(2))


@pytest.mark.slow
@by_triton
@pytest.mark.parametrize(("dtype", "stored"), [(bool, "v4.b8"), (jnp.int16, "v4.b16")])
def test_numbers_of_all_sizes_are_stored(dtype, stored):
    sizes = {"num_envs": 40, "num_steps": 8, "total_timesteps": 320, "num_minibatches": 1}
    graph = rollmill.ppo(lamps(dtype), **sizes, network=TINY)
    found = compile_for(*kernel_of(graph, "tf32", Launch(32, 1)), 90).asm["ptx"]
    assert f"st.global.{stored}" in found


def test_scalars_are_gathered_before_exact_sums_repeat_them_in_rows():
    graph = graph_on("CartPole-v1")
    step = lower_rollout(graph)
    source = {numerics: rollout_source(step, NUM_STEPS, 16, 16, numerics) for numerics in ("float32", "tf32")}
    first_layers = [line for line in source["float32"].splitlines() if line.count("[:, None] * v") == 4]
    assert [line.count("tl.gather(v") for line in first_layers] == [4, 4]
    assert "0)[:, None] * v" not in source["tf32"]


def test_products_take_columns_and_rows_of_a_matrix_in_one_order():
    prelude = Hoisted("tf32", [], iter(["column", "taken"]).__next__)
    assert prelude.mma_order(32) == "taken"
    formula = prelude.lines[1].partition(" = ")[2]
    row = permute_to_mma_order("row", 32, "tf32")
    assert row == "tl.reshape(tl.permute(tl.reshape(row, [BLOCK, 4, 4, 2]), (0, 1, 3, 2)), [BLOCK, 32])"
    of_rows = eval(formula, {"column": np.arange(32)})  # noqa: S307 - our own text
    np.testing.assert_array_equal(of_rows, np.arange(32).reshape(4, 4, 2).transpose(0, 2, 1).reshape(32))


@pytest.mark.parametrize(("num_steps", "wide"), [(2**10, False), (2**25, True)])
def test_places_in_a_trajectory_that_is_too_long_have_64_bits(num_steps, wide):
    graph = graph_on("CartPole-v1")
    step = lower_rollout(graph)
    assert ("at = t.to(tl.int64) * N + env" in rollout_source(step, num_steps, 16, 16, "tf32")) == wide


# --- matrices that do not fit -------------------------------------------------------------------------------

LSTM = rollmill.NetworkConfig(torso="lstm", hidden_sizes=(64,), recurrent_size=64)
"""Actor and critic have eight matrices of 16 KB each."""


def kernel_from_shapes(network):
    graph = graph_on("CartPole-v1", network)
    index = jax.ShapeDtypeStruct((graph.loops.num_envs,), jnp.int32)
    collector = jax.eval_shape(partial(init_state, graph), jax.eval_shape(jax.random.key, 3), index).collector
    step = lower_rollout(graph)
    keys = jax.ShapeDtypeStruct((graph.loops.num_envs, 2), jnp.uint32)
    task = step, step.prologue.shapes, to_raw(collector), keys, NUM_STEPS
    return rollout_kernel(*task, launch=Launch(16, 1), numerics="tf32")


def test_a_rollout_reads_matrices_anew_where_they_do_not_fit():
    kernel, _ = kernel_from_shapes(LSTM)
    before, inside = kernel.source.split("    for t in range(T):")
    assert "[:, None] * 256" not in before
    assert inside.count("[:, None] * 256") == 16
    assert "again" not in kernel_from_shapes(TINY)[0].source


@by_triton
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rollout_of_a_large_memory_finds_room_in_shared_memory():
    assert compile_for(*kernel_from_shapes(LSTM), 90).metadata.shared < 64 * 1024
