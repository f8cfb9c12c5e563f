"""Programs as they are written: their size, their layout, and the operations that are left out of them."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_runs import assert_same, both, by_program, by_vmap
from program_rules import check_program

from rollmill.algorithms import ppo
from rollmill.dataflow import start_learner, start_one, step_one
from rollmill.envs import make
from rollmill.fusion import Region, evaluate, lower_function
from rollmill.fusion.lower.values import Const, PrologueOutput, RowArray, ScalarArray
from rollmill.networks import NetworkConfig
from wordings import raises

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)
ROW = jax.ShapeDtypeStruct((40,), jnp.float32)


def step_program(name, network):
    graph = ppo(make(name), num_envs=4, num_steps=8, network=network)
    key = jax.random.key(0)
    one = jax.eval_shape(lambda: start_one(graph, key, jnp.int32(0)))
    weights = jax.eval_shape(lambda: graph.weights(start_learner(graph, key)))
    t = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = lower_function(partial(step_one, graph), (one, key_struct(), t), (weights,), carried=True)
    check_program(lowered.program)
    return lowered


def key_struct():
    return jax.eval_shape(lambda: jax.random.key(0))


def operations(lowered):
    return Counter(node.op for node in lowered.program.nodes())


def test_a_cartpole_step_is_small():
    lowered = step_program("CartPole-v1", NetworkConfig(hidden_sizes=(64, 64)))
    count = operations(lowered)
    # keys of policy and environment, the policy's draw, four draws of a reset: 7 times threefry
    assert count["shift_left"] == 7 * 20
    assert count["dot"] == 2 and count["row_sum"] == 2 and count["column"] == 0  # the critic is not needed
    assert len(lowered.prologue.shapes.slots) == 6
    assert sum(count.values()) < 1000


def test_a_recurrent_memory_stays_in_rows():
    network = NetworkConfig(hidden_sizes=(16,), torso="gru", recurrent_size=24, shared_torso=True)
    lowered = step_program("CartPole-v1", network)
    count = operations(lowered)
    assert isinstance(lowered.inputs[0].memory, RowArray) and isinstance(lowered.outputs[0].memory, RowArray)
    assert count["column"] == 0 and count["stack"] == 1  # the observation's
    widths = [node.width for node in lowered.program.nodes() if node.op == "dot"]
    assert sorted(widths) == [16] + [24] * 6  # the encoder, and each gate of both products


def test_what_is_carried_lies_as_it_came():
    def function(state):
        history, fixed, count = state
        return (jnp.roll(history, 1).at[0].set(history.sum()), jnp.zeros(()), jnp.int32(3)), history[:2]

    lowered = lower_function(function, ((ROW, NUMBER, COUNT),), carried=True)
    (before,), (after, _) = lowered.inputs, lowered.outputs
    for own, new in zip(before, after, strict=True):
        assert type(own) is type(new) and own.shape == new.shape


def test_what_does_not_differ_is_not_computed():
    def function(shared, x):
        return shared.sum() * 2, jnp.arange(3), x, jnp.sin(shared[1])

    lowered = lower_function(function, (NUMBER,), (jnp.arange(4.0),))
    slots, (total, sine) = lowered.prologue(jnp.arange(4.0))
    kinds = [type(value) for value in lowered.outputs]
    assert kinds == [PrologueOutput, Const, ScalarArray, PrologueOutput]
    assert float(total) == 12.0 and float(sine) == jnp.sin(1.0)
    assert operations(lowered) == {"input": 1} and slots == []


def test_small_changes_of_shared_arrays_need_no_arrays_of_their_own():
    def function(shared, x):
        table = shared.reshape(3, 2).T
        return x * shared[4] + table[1, 0] + jnp.broadcast_to(shared[0], (5,))[2] + jnp.flip(shared)[0]

    lowered = lower_function(function, (NUMBER,), (jnp.arange(6.0),))
    assert lowered.prologue.num_slots == 1 and operations(lowered)["uniform"] == 4


def test_a_matrix_is_read_as_it_lies():
    def function(matrix, x):
        return matrix @ x

    matrix = jnp.ones((12, 40))
    lowered = lower_function(function, (ROW,), (matrix,))
    (dot,) = [node for node in lowered.program.nodes() if node.op == "dot"]
    assert dot.attributes == (0, 0, 0, 40, True)
    assert lowered.prologue(matrix).slots[0] is matrix  # the argument itself: by that, weights are recognised


def test_a_prologue_is_evaluated_anywhere():
    """It is traced once, without any array, and gives the same on arrays and within another trace."""

    def function(matrix, bias, x):
        return x @ (2 * matrix) + jnp.tanh(bias), bias.sum()

    matrix, bias = jnp.linspace(-1, 1, 80).reshape(40, 2), jnp.ones(2)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (matrix, bias)]
    prologue = lower_function(function, (ROW,), shapes).prologue
    eager, traced = prologue(matrix, bias), jax.jit(prologue)(matrix, bias)
    assert jax.tree.map(jnp.shape, eager) == jax.tree.map(lambda struct: struct.shape, prologue.shapes)
    assert jax.tree.all(jax.tree.map(lambda one, other: bool((one == other).all()), eager, traced))
    assert any(bool((slot == 2 * matrix.T).all()) for slot in eager.slots if slot.shape == (2, 40))


def test_prologues_hold_what_is_read_and_nothing_else():
    def function(matrix, table, x):
        unread = jnp.sin(matrix) @ jnp.ones(3)
        return x + table[2], jnp.stack([x, unread.sum()])[0]

    shapes = [jax.ShapeDtypeStruct((4, 3), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.float32)]
    prologue = lower_function(function, (NUMBER,), shapes).prologue
    assert [slot.shape for slot in prologue.shapes.slots] == [(5,), (1,)]  # the second is never read
    assert [equation.primitive.name for equation in prologue.jaxpr.jaxpr.eqns] == ["broadcast_in_dim"]


def test_a_function_that_closes_over_a_tracer_is_refused():
    def trace(hidden):
        lower_function(lambda x: x + hidden, (NUMBER,))
        return hidden

    with pytest.raises(TypeError, match="Make it a uniform argument"):
        jax.jit(trace)(jnp.ones(()))


def test_no_tracer_is_left_in_a_program():
    with jax.checking_leaks():
        first = step_program("CartPole-v1", NetworkConfig(hidden_sizes=(16,)))
        again = step_program("CartPole-v1", NetworkConfig(hidden_sizes=(16,)))
    assert str(first.prologue.jaxpr) == str(again.prologue.jaxpr)
    assert [(node.op, node.attributes) for node in first.program.nodes()] == [
        (node.op, node.attributes) for node in again.program.nodes()
    ]


def test_what_a_loop_does_not_change_stays_outside():
    def function(x, n):
        turn = lambda c: (c[0] + jnp.sin(x) * 3.0, c[1] + 1, c[2])
        return jax.lax.while_loop(lambda c: c[1] < n, turn, (x, jnp.int32(0), jnp.float32(2.0)))

    lowered = lower_function(function, (NUMBER, COUNT))
    (loop,) = [node for node in lowered.program.nodes() if node.op == "loop"]
    body = Counter(node.op for node in loop.attributes[0].body.nodes())
    assert body == {"add": 2, "input": 3, "constant": 1}
    assert operations(lowered)["sin"] == 1
    assert isinstance(lowered.outputs[2], Const)


def test_environments_leave_a_loop_one_by_one():
    collatz = lambda n: jax.lax.while_loop(
        lambda c: c[0] > 1,
        lambda c: (jnp.where(c[0] % 2 == 0, c[0] // 2, 3 * c[0] + 1), c[1] + 1),
        (n, jnp.int32(0)),
    )[1]
    found = jax.jit(lambda n: by_program(collatz, (n,)))(jnp.array([1, 2, 7, 27]))
    assert found.tolist() == [0, 1, 16, 111]


def of_vectors(x):
    """A matrix that is left as a product of vectors where that suffices."""
    return jnp.einsum("i,k->ik", x, x[:2])


PRODUCTS = {
    "branches": lambda x: jax.lax.cond(x[0] > 0, lambda: of_vectors(x), lambda: jnp.ones((3, 2))),
    "equal branches": lambda x: jax.lax.cond(x[0] > 0, lambda: of_vectors(x), lambda: of_vectors(x)),
    "loop": lambda x: jax.lax.while_loop(
        lambda m: m[0, 0] < x[1], lambda m: of_vectors(m[:, 0] + 1), jnp.zeros((3, 2))
    ),
    "stacked": lambda x: jax.lax.map(lambda number: of_vectors(x + number), x),
    "gradient of branches": lambda x: jax.grad(
        lambda m: jax.lax.cond(x[0] > 0, lambda: x @ m @ x[:2], lambda: jnp.sum(m))
    )(jnp.ones((3, 2))),
}
"""Products of vectors as results of branches and of turns."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_vectors_leave_branches_and_loops(name):
    x = jnp.array([[1.0, 2.0, 3.0], [-1.0, 20.0, 0.0], [2.0, -3.0, 1.0], [0.0, 5.0, 4.0]])
    assert_same(*both(PRODUCTS[name], (x,)))


def test_products_of_vectors_that_are_too_large_for_a_branch():
    product = lambda x: jnp.einsum("i,k->ik", jnp.tile(x, 30), jnp.tile(x, 40))
    function = lambda x: jax.lax.cond(x[0] > 0, lambda: product(x), lambda: jnp.ones((90, 120)))
    with raises("cannot-be-fused", "cond", "a matrix product takes 10800 multiplications"):
        lower_function(function, (jax.ShapeDtypeStruct((3,), jnp.float32),))


@pytest.mark.parametrize("partitionable", [True, False])
def test_random_streams_of_both_kinds(partitionable):
    def draw(shared, key, i):
        own = jax.random.fold_in(shared, i)
        halves = jax.random.split(own, 3)
        return (
            jax.random.uniform(halves[1], (3,)),
            jax.random.split(key),
            jax.random.bits(halves[i % 3], (2,), jnp.uint16),
        )

    keys = jax.random.split(jax.random.key(0), 4)
    each = (keys, jnp.arange(4))
    with jax.threefry_partitionable(partitionable):
        assert_same(*both(draw, each, (jax.random.key(5),)), rtol=0, atol=0)


def test_wide_states_that_are_cut_are_no_rows():
    wide = jnp.arange(300.0).reshape(3, 100) * 0.01
    assert_same(*both(lambda x: (x[:70].sum(), x[70:].max(), x * 2.0, jnp.zeros((0,))), (wide,)))


def test_known_arguments_are_as_good_as_traced_ones():
    function = lambda weights, x: (jnp.tanh(x @ weights["w"]) @ weights["v"], x[:9] * weights["w"][0, :9])
    weights = {"w": jnp.ones((40, 20)) * 0.1, "v": jnp.ones((20, 2))}
    x = jnp.arange(80.0).reshape(2, 40) * 0.01
    found = by_program(function, (x,), (weights,))  # not under jit
    assert_same(found, by_vmap(function, (x,), (weights,)))


# --- nodes ------------------------------------------------------------------------------------------------


def test_equal_operations_are_one_node():
    region = Region()
    x, y = region.input(np.int32), region.input(np.int32)
    add = lambda a, b: region.emit("add", a, b, dtype=np.int32)
    assert add(x, y) is add(y, x)
    assert region.emit("sub", x, y, dtype=np.int32) is not region.emit("sub", y, x, dtype=np.int32)


def test_simplification_is_exact():
    region = Region()
    x, n, b = region.input(np.float32), region.input(np.int32), region.input(bool)
    zero, minus_zero, one = (region.constant(value, np.float32) for value in (0.0, -0.0, 1.0))
    of_x = lambda op, other: region.emit(op, x, other, dtype=np.float32)
    assert of_x("add", zero) is not x  # -0 + 0 is 0
    assert of_x("sub", zero) is x and of_x("sub", minus_zero) is not x
    assert of_x("mul", one) is x and of_x("div", one) is x
    assert of_x("mul", zero) is not zero  # NaN times 0
    assert region.emit("eq", x, x, dtype=bool).op == "eq"  # not of NaN
    assert of_x("max", region.constant(-np.inf, np.float32)) is x
    nothing = region.constant(0, np.int32)
    assert region.emit("add", n, nothing, dtype=np.int32) is n
    assert region.emit("mul", nothing, n, dtype=np.int32) is nothing
    assert region.emit("eq", n, n, dtype=bool).value is True
    number = region.emit("convert", b, dtype=np.int32)
    assert region.emit("ne", number, nothing, dtype=bool) is b
    assert region.emit("eq", number, region.constant(1, np.int32), dtype=bool) is b
    assert region.emit("lt", number, nothing, dtype=bool).value is False
    assert region.emit("convert", number, dtype=np.float32).operands == (b,)
    assert region.emit("select", b, x, x, dtype=np.float32) is x
    assert region.constant(300, np.uint8).value == 44
    half = region.emit("div", one, region.constant(2.0, np.float32), dtype=np.float32)
    assert half.value == 0.5


def test_a_scalar_result_is_a_row_where_one_is_asked_for():
    region = Region()
    row, x = region.input(np.float32, 12), region.input(np.float32)
    condition = region.emit("gt", row, x, dtype=bool, width=12)
    chosen = region.emit("select", condition, x, x, dtype=np.float32, width=12)
    assert chosen.op == "splat" and chosen.width == 12
    program = region.program([chosen])
    inputs = [jnp.zeros((3, 12)), jnp.arange(3.0)]
    (found,) = evaluate(program, inputs, [], block=3)
    np.testing.assert_array_equal(found, np.repeat(np.arange(3.0)[:, None], 12, axis=1))
