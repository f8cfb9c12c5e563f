"""Values that a rollout need not carry from step to step, and facts that are known of an observation."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_runs import assert_same, both
from gymnasium import spaces

import rollmill
from one_time import first_state
from rollmill.core.types import Environment, Timestep
from rollmill.dataflow import collect
from rollmill.fusion import backend_for, evaluate, fused_collect, lower_function, rollout_step, run_reference
from rollmill.fusion.kernels.leaves import each_struct
from rollmill.fusion.kernels.rollout import MAX_LOWERINGS
from rollmill.fusion.lower.invariants import ConstLabel, labels_of, meet
from rollmill.fusion.lower.values import Const, RowArray, ScalarArray

NUM_ENVS, NUM_STEPS = 32, 24


class Counters(NamedTuple):
    """Numbers that are equal at first, or known, for as long as they say."""

    steps: jax.Array
    twin: jax.Array
    """Always `steps`."""
    slow: jax.Array
    """`steps` halved: equal to it before the first step."""
    late: jax.Array
    """`slow` of the step before: known for longer than that."""
    broken: jax.Array
    """No number, ever."""
    gravity: jax.Array
    """Known."""
    small: jax.Array
    """Known to be another number from the first step on."""
    large: jax.Array
    """The same number, of another type."""


def counting() -> Environment:
    """An environment of such numbers; it sees them all, and who it is."""

    def seen(state):
        own = jnp.stack([state.steps, state.twin, state.slow, state.late]).astype(jnp.float32)
        return jnp.concatenate([own / 8, jnp.array([1.0, 0.0, -0.0]), state.gravity[None]])

    def reset(key, params):
        zero = jnp.int32(0)
        state = Counters(zero, zero, zero, zero, jnp.float32(jnp.nan), jnp.float32(9.5), jnp.int8(0), zero)
        return seen(state), state

    def step(key, state, action, params):
        steps = state.steps + 1
        one = jnp.int8(1), jnp.int32(1)
        after = Counters(steps, state.twin + 1, steps // 2, state.slow, state.broken, state.gravity, *one)
        ends = (steps >= 7) & (action == 0)
        return Timestep(
            seen(after), after, steps.astype(jnp.float32) * state.gravity, ends, jnp.zeros((), bool), {}
        )

    box = spaces.Box(-np.inf, np.inf, (8,), np.float32)
    return Environment("Counting", reset, step, box, spaces.Discrete(2))


def delaying(length: int) -> Environment:
    """An environment that sees its last numbers of steps, and a known one."""
    seen = lambda line: jnp.append(line.astype(jnp.float32) / 8, 9.5)

    def reset(key, params):
        line = jnp.zeros(length, jnp.int32)
        return seen(line), line

    def step(key, line, action, params):
        after = jnp.concatenate([line[:1] + 1, line[:-1]])
        return Timestep(seen(after), after, jnp.float32(1), action == 0, jnp.zeros((), bool), {})

    box = spaces.Box(-np.inf, np.inf, (length + 1,), np.float32)
    return Environment("Delaying", reset, step, box, spaces.Discrete(2))


def begun(env, **sizes):
    make = rollmill.mappo if env.agents else rollmill.ppo
    graph = make(env, num_envs=NUM_ENVS, num_steps=NUM_STEPS, total_timesteps=NUM_ENVS * NUM_STEPS, **sizes)
    state = first_state(graph, jax.random.key(2), jnp.arange(NUM_ENVS, dtype=jnp.int32))
    return graph, graph.weights(state.learner), state.collector


def carried(graph, weights, collector):
    """For each of the collector's leaves how many numbers a rollout carries."""
    step = rollout_step(graph, weights, each_struct(collector))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(collector)]
    counts = [sum(map(step.carries, leaf.places)) for leaf in step.carried_leaves]
    return {name: count for name, count in zip(names, counts, strict=True) if count}


def test_only_what_may_change_by_itself_is_carried():
    count = carried(*begun(counting()))
    own = {name.rpartition(".")[2]: number for name, number in count.items()}
    assert {name: own.get(name, 0) for name in Counters._fields} == {
        "steps": 1,
        "twin": 0,
        "slow": 1,
        "late": 1,
        "broken": 0,
        "gravity": 0,
        "small": 1,
        "large": 1,
    }
    assert own["observation"] == 3  # of eight: the twin's is the other's, and four are known


def test_numbers_of_two_types_are_never_one():
    """Also where no select between a step and a new episode's beginning keeps them apart."""
    begin = labels_of([Const(np.int8([0])), Const(np.uint32([0])), Const(np.int8([0]))])
    (one,), (other,), (again,) = meet(begin, [Const(np.int8([1])), Const(np.uint32([1])), Const(np.int8([1]))])
    assert one == again != other


@pytest.mark.parametrize(("length", "seen"), [(3, 3), (2 * MAX_LOWERINGS, 2 * MAX_LOWERINGS + 1)])
def test_what_takes_long_to_find_is_not_looked_for(length, seen):
    """Each reading finds one more number of a line that may change; what is known beside it is carried then."""
    count = carried(*begun(delaying(length)))
    assert [number for leaf, number in count.items() if "observation" in leaf] == [seen]


@pytest.mark.slow
def test_agents_that_see_the_same_carry_it_once():
    count = carried(*begun(rollmill.make("TagGridWorld-v0")))
    seen = sum(number for name, number in count.items() if "observation" in name)
    assert seen == 11  # of 5 x 21 numbers: where the five are, and the time


@pytest.mark.parametrize("way", ["evaluated", "machine code"])
@pytest.mark.slow_beyond(1)
def test_rollouts_are_those_of_the_unfused_path(way):
    if way == "machine code":
        pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install 'rollmill[fusion]'")
    backend = backend_for(jax.devices()[0], "float32")
    kind = backend.rollouts
    run = kind.run(kind.launches(NUM_ENVS, 0)[0]) if way == "machine code" else run_reference
    graph, weights, collector = begun(counting())
    fused, plain = jax.jit(partial(fused_collect, graph, run=run)), jax.jit(partial(collect, graph))
    for turn in range(2):  # the second begins in the midst of episodes
        key = jax.random.key(turn)
        mine, right = fused(weights, collector, key), plain(weights, collector, key)
        assert bool(right[1].steps.terminated.any()) and not bool(right[1].steps.terminated.all())
        assert_same(mine, right, rtol=1e-5, atol=1e-6)
        collector = right[0]


def test_an_environment_whose_beginning_cannot_be_read_carries_everything():
    def reset(key, params):
        jax.debug.callback(lambda: None)
        return counting().reset(key, params)

    graph, weights, collector = begun(counting())
    strange, _, _ = begun(counting()._replace(reset=reset))
    free = graph._replace(start_environment=strange.start_environment)
    assert sum(carried(free, weights, collector).values()) > sum(carried(graph, weights, collector).values())


# --- labels ---------------------------------------------------------------------------------------------------


def values_of(function, count):
    return lower_function(function, [jax.ShapeDtypeStruct((), jnp.float32)] * count).outputs


def fixed(number, dtype=np.float32):
    return ConstLabel(number, np.dtype(dtype))


def test_a_memory_may_begin_with_numbers_of_python():
    def count_turns(*args):
        decision = act(*args)
        turns, is_odd = args[2]
        return decision._replace(memory=(turns + 1, jnp.logical_not(is_odd)))

    graph, *_ = begun(counting())
    act = graph.policy
    graph = graph._replace(policy=count_turns, start_memory=lambda: (0, False))
    state = first_state(graph, jax.random.key(2), jnp.arange(NUM_ENVS, dtype=jnp.int32))
    given = graph.weights(state.learner), state.collector
    fused, plain = partial(fused_collect, graph, run=run_reference), partial(collect, graph)
    found, right = (jax.jit(way)(*given, jax.random.key(0)) for way in (fused, plain))
    assert_same(found[0].memory, right[0].memory)
    assert len(np.unique(right[0].memory[0])) > 1


def test_equal_numbers_have_one_label_and_known_ones_say_so():
    found = labels_of(values_of(lambda x, y: (jnp.stack([x, y + 0.0, x]), jnp.float32(3), jnp.ones(2)), 2))
    (x, y, again), three, ones = found
    assert x == again != y and three == (fixed(3.0),) and ones == (fixed(1.0),) * 2


def test_zeros_have_signs_and_what_is_no_number_equals_itself():
    assert fixed(0.0) != fixed(-0.0) and fixed(float("nan")) == fixed(float("nan"))
    assert fixed(1, np.int32) != fixed(1, np.uint32)


def test_an_assumption_loses_what_a_step_does_not_keep():
    node = lambda: lower_function(lambda x: x, [jax.ShapeDtypeStruct((), jnp.float32)]).outputs.nodes[()]
    one, two = node(), node()
    scalars = lambda *nodes: ScalarArray(np.array(nodes, object), np.dtype(np.float32))
    before = labels_of([scalars(one, one, one, two), Const(np.float32([4, 5]))])
    assert meet(before, [scalars(one, one, two, two), Const(np.float32([4, 5]))]) == ((0, 0, 1, 2), before[1])
    (_, known) = meet(before, [scalars(one, one, one, two), Const(np.float32([4, 6]))])
    assert known[0] == fixed(4.0) and not isinstance(known[1], ConstLabel)
    rows = RowArray(scalars(one).nodes, 2, np.dtype(np.float32))
    assert meet(before, [rows, Const(np.float32([4, 5]))])[0] is None


# --- products of what is partly known -------------------------------------------------------------------------

SHARED = np.linspace(-1, 1, 7 * 20, dtype=np.float32).reshape(7, 20)


def products(*values, turned=False):
    """The products of vectors with the same matrix, which lies one way or the other, and a bias."""
    matrix = SHARED.T.copy() if turned else SHARED

    def function(matrix, bias, x, y):
        return [(matrix @ value(x, y) if turned else value(x, y) @ matrix) + bias for value in values]

    return function, (matrix, jnp.arange(20.0))


def lowered(function, uniform):
    return lower_function(function, [jax.ShapeDtypeStruct((), jnp.float32)] * 2, uniform)


def operations(function, uniform):
    return [node for node in lowered(function, uniform).program.nodes() if node.op in ("dot", "add")]


KINDS = {
    "one that is one": lambda x, y: jnp.stack([x, y, 1.0, x, 0.0, y, x * y]),
    "only zeros": lambda x, y: jnp.stack([0.0, x, 0.0, y, 0.0, 0.0, x]),
    "one that differs": lambda x, y: jnp.stack([2.0, -3.0, 0.5, 4.0, x, 0.0, 1.0]),
}


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_what_is_partly_known(kind, turned):
    function, uniform = products(KINDS[kind], turned=turned)
    each = [np.linspace(-2, 3, 9, dtype=np.float32), np.linspace(1, -1, 9, dtype=np.float32)]
    assert_same(*both(function, each, uniform, evaluate=partial(evaluate, precision="highest")))
    nodes = operations(function, uniform)
    assert [node.operands[0].width for node in nodes if node.op == "dot"] in ([5], [3], [])
    assert sum(node.op == "add" for node in nodes) <= 1  # what is known is added with the bias


def test_uniform_arrays_that_nothing_reads_are_not_computed():
    found = lowered(*products(KINDS["one that is one"]))
    computed = {slot for slot, array in enumerate(found.prologue.shapes.slots) if array.shape != (1,)}
    assert computed == found.program.slots() and len(computed) == 2  # a part of the matrix, and one row


def test_agents_that_differ_in_who_they_are_share_a_product():
    agents = [lambda x, y, n=n: jnp.concatenate([jnp.stack([x, y, x - y]), jnp.eye(4)[n]]) for n in range(4)]
    function, uniform = products(*agents)
    nodes = operations(function, uniform)
    assert sum(node.op == "dot" for node in nodes) == 1 and sum(node.op == "add" for node in nodes) == 4


def test_the_same_product_is_made_once():
    """A policy and a critic with one torso ask for the same first layer."""
    same = lambda x, y: jnp.stack([x, y, 1.0, x, 0.0, y, 2.0])
    nodes = operations(*products(same, same))
    assert sum(node.op == "dot" for node in nodes) == 1 and sum(node.op == "add" for node in nodes) == 1


def test_what_is_known_beside_rows_leaves_them_rows():
    def function(weights, h):
        return jnp.concatenate([jnp.array([1.0, 0.0, 2.0]), jnp.tanh(h)]) @ weights

    weights, h = jnp.ones((43, 128)) / 8, jnp.linspace(-1, 1, 4 * 40).reshape(4, 40)
    assert_same(*both(function, (h,), (weights,), evaluate=partial(evaluate, precision="highest")))
