"""Programs cut where data leaves them: whatever lies around a crossing, the numbers are those of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from rollmill.core.errors import ContractError
from rollmill.dataflow import answer_crossings, cross, divide_at_crossings, evaluate, walk, walk_leaves
from wordings import raises

NUMBER = jax.ShapeDtypeStruct((), "float32")
ONE = jnp.float32(1)


def ask(name, operands):
    """A crossing whose answer looks like what leaves."""
    return cross(name, operands, jax.eval_shape(lambda tree: tree, operands))


def run(function, *arguments, **handlers):
    """Cuts and drives."""
    return answer_crossings(walk(divide_at_crossings(function, *arguments), *arguments), handlers)


def double(tree):
    return jax.tree.map(lambda leaf: 2 * leaf, tree)


def sizes(program):
    """Operations of each piece."""
    return [len(piece.program.jaxpr.eqns) for piece in program.pieces]


# --- by value -----------------------------------------------------------------------------------------


def test_what_leaves_and_what_comes_back():
    seen = []
    found = run(lambda x: ask("ask", x + 1) * 3, jnp.float32(4), ask=lambda x: (seen.append(x), 2 * x)[1])
    assert seen == [5.0]
    assert found == 30.0


def test_crossings_are_met_in_order_each_with_the_answers_before():
    def function(x):
        a = ask("first", x)
        b = ask("second", a + 10)
        return ask("first", {"a": a, "b": b})

    program = divide_at_crossings(function, ONE)
    assert program.crossings == ("first", "second", "first")
    seen = []

    def handler(name, answer):
        return lambda operands: (seen.append((name, operands)), answer(operands))[1]

    handlers = {"first": handler("first", double), "second": handler("second", lambda x: -x)}
    assert answer_crossings(walk(program, ONE), handlers) == {"a": 4.0, "b": -24.0}
    assert seen == [("first", 1.0), ("second", 12.0), ("first", {"a": 2.0, "b": -12.0})]


def test_trees_go_out_and_come_back_in_other_shapes():
    answer = {"sum": NUMBER, "many": jax.ShapeDtypeStruct((4,), "int32")}

    def function(x, y):
        found = cross("ask", (x, {"y": y}), answer)
        return found["many"] + jnp.int32(1), found["sum"] + x[0]

    handler = lambda sent: {"sum": sent[0].sum() + sent[1]["y"], "many": np.arange(4, dtype=np.int32)}
    many, total = run(function, jnp.arange(3.0), jnp.float32(10), ask=handler)
    np.testing.assert_array_equal(many, [1, 2, 3, 4])
    assert total == 13.0


@pytest.mark.parametrize("mapped", [{"in_axes": (0, None)}, {"in_axes": (1, None)}, {"in_axes": (0, 0)}])
def test_under_vmap_one_crossing_takes_all(mapped):
    def function(x, y):
        return ask("ask", {"x": x, "y": y})["x"] + y

    x, y = jnp.arange(9.0).reshape(3, 3), jnp.arange(3.0) if mapped["in_axes"][1] == 0 else jnp.float32(5)
    program = divide_at_crossings(jax.vmap(function, **mapped), x, y)
    assert program.crossings == ("ask",)
    sent = []
    found = answer_crossings(walk(program, x, y), {"ask": lambda tree: (sent.append(tree), double(tree))[1]})
    rows = x.T if mapped["in_axes"][0] == 1 else x
    each = jnp.broadcast_to(y, (3,))
    np.testing.assert_array_equal(sent[0]["x"], rows)  # the new axis in front, wherever it was
    np.testing.assert_array_equal(sent[0]["y"], each)  # what all have in common is sent for each
    np.testing.assert_array_equal(found, 2 * rows + each[:, None])


def test_under_two_vmaps():
    function = jax.vmap(jax.vmap(lambda x, y: ask("ask", x * y), in_axes=(0, None)), in_axes=(None, 0))
    x, y = jnp.arange(3.0), jnp.arange(1.0, 3.0)
    np.testing.assert_array_equal(run(function, x, y, ask=double), 2 * np.outer(y, x))


def test_a_crossing_that_is_not_mapped_is_met_once_for_all():
    function = lambda x, y: x + ask("ask", y)
    sent = []
    found = run(
        jax.vmap(function, in_axes=(0, None)), jnp.arange(3.0), ONE, ask=lambda y: (sent.append(y), 2 * y)[1]
    )
    assert [y.shape for y in sent] == [()]
    np.testing.assert_array_equal(found, [2, 3, 4])


def test_arguments_answers_constants_and_literals_pass_through():
    table = np.arange(4.0, dtype=np.float32)

    def function(x, y):
        answer = ask("ask", x)
        return x, answer, jnp.asarray(table), 3.0, y, jnp.asarray(table)[1] + answer

    found = run(function, ONE, {"unused": jnp.int32(7)}, ask=double)
    assert jax.tree.map(float, (found[0], found[1], found[3], found[5])) == (1.0, 2.0, 3.0, 3.0)
    assert found[4] == {"unused": 7}
    np.testing.assert_array_equal(found[2], table)


def test_constants_and_literals_leave_like_anything_else():
    table = np.arange(4.0, dtype=np.float32)
    sent = []

    def function(x):
        constants = {"literal": jnp.float32(3), "count": jnp.int32(2), "table": jnp.asarray(table)}
        return cross("ask", {**constants, "x": x}, NUMBER)

    assert run(function, ONE, ask=lambda tree: (sent.append(tree), jnp.float32(8))[1]) == 8.0
    kinds = {name: (leaf.dtype.name, leaf.tolist()) for name, leaf in sent[0].items()}
    assert kinds == {
        "literal": ("float32", 3.0),
        "count": ("int32", 2),
        "table": ("float32", [0, 1, 2, 3]),
        "x": ("float32", 1.0),
    }


def test_nothing_may_leave_and_nothing_come_back():
    asked = []
    function = lambda x: (cross("wait", (), NUMBER), cross("tell", x, ()), x)[::2]
    handlers = {"wait": lambda nothing: jnp.float32(5), "tell": asked.append}
    program = divide_at_crossings(function, ONE)
    first = walk(program, ONE)
    assert next(first) == ("wait", ())
    assert first.send(jnp.float32(5)) == ("tell", 1.0)
    with pytest.raises(StopIteration) as end:
        first.send(())
    assert end.value.value == (5.0, 1.0)
    assert answer_crossings(walk(program, ONE), {**handlers, "tell": lambda x: ()}) == (5.0, 1.0)


def test_typed_keys_stay_in_their_piece_or_travel():
    key = jax.random.key(3)
    stays = lambda key: (key, ask("ask", jax.random.uniform(key)) + jax.random.normal(key))
    kept, number = run(stays, key, ask=double)
    assert jax.random.key_data(kept).tolist() == jax.random.key_data(key).tolist()
    assert number == 2 * jax.random.uniform(key) + jax.random.normal(key)
    travels = jax.vmap(lambda key: jax.random.uniform(ask("ask", key)))
    keys = jax.random.split(key, 3)
    backwards = run(travels, keys, ask=lambda keys: keys[::-1])
    np.testing.assert_array_equal(backwards, jax.vmap(jax.random.uniform)(keys)[::-1])


def test_a_program_without_crossings_is_one_piece():
    program = divide_at_crossings(lambda x: x * 2, ONE)
    assert program.crossings == ()
    assert answer_crossings(walk(program, ONE), {}) == 2.0


def test_pieces_compute_what_the_whole_does_compiled_or_not():
    def function(x, table):
        a = jnp.tanh(x @ table)
        b = ask("ask", a.sum(axis=0, keepdims=True))
        c = jnp.where(b > 0, a * b, jnp.sort(a, axis=0))
        return c, ask("ask", {"c": c, "a": a})

    x, table = jax.random.normal(jax.random.key(0), (2, 5, 4))
    table = table[:4]
    compiled = lambda piece, values: jax.jit(core.jaxpr_as_fun(piece.program))(*values)
    results = [
        answer_crossings(walk(divide_at_crossings(function, x, table), x, table, run=how), {"ask": double})
        for how in (evaluate, compiled)
    ]
    a = jnp.tanh(x @ table)
    b = 2 * a.sum(axis=0, keepdims=True)
    c = jnp.where(b > 0, a * b, jnp.sort(a, axis=0))
    for result in results:
        jax.tree.map(
            lambda mine, right: np.testing.assert_allclose(mine, right, rtol=1e-6),
            result,
            (c, {"c": 2 * c, "a": 2 * a}),
        )


# --- order --------------------------------------------------------------------------------------------


def test_what_a_crossing_does_not_need_is_computed_after_it():
    """So that nobody who waits for the crossing waits for that."""

    def function(x):
        beside = jnp.sin(jnp.cos(x))
        return beside + ask("ask", x + 1)

    assert sizes(divide_at_crossings(function, ONE)) == [1, 3]


def test_where_nothing_is_computed_with_the_answer_the_program_has_one_piece():
    """Each piece is a program to start, and a step of a policy without a memory needs no second one."""

    def function(x):
        beside = jnp.sin(jnp.cos(x))
        return beside, ask("ask", x + 1)

    assert sizes(divide_at_crossings(function, ONE)) == [3, 0]
    assert run(function, ONE, ask=double) == pytest.approx((np.sin(np.cos(1)), 4))


def test_what_nobody_reads_is_left_out():
    def function(x, y):
        jnp.sin(x)
        answer = ask("ask", x + 1)
        jnp.exp(answer * y)
        return answer * 2

    program = divide_at_crossings(function, ONE, ONE)
    assert sizes(program) == [1, 1]
    assert program.pieces[0].inputs == (0,)


def test_leaves_go_through_as_trees_do():
    function = lambda x: {"a": ask("ask", x["b"]) + x["c"], "d": x["c"]}
    program = divide_at_crossings(function, {"b": ONE, "c": jnp.float32(3)})
    walking = walk_leaves(program, [jnp.float32(5), jnp.float32(7)])
    assert next(walking) == ("ask", 5.0)
    with pytest.raises(StopIteration) as end:
        walking.send(jnp.float32(11))
    assert end.value.value == [18.0, 7.0]


def test_values_are_let_go_when_nobody_reads_them_any_more():
    def function(x, y):
        a = ask("first", jnp.exp(x))
        b = ask("second", a * y)
        return b + y

    arguments = (ONE, jnp.float32(3))
    program = divide_at_crossings(function, *arguments)
    kept = []

    def watched(piece, values):
        kept.append(len(values))
        return evaluate(piece, values)

    found = answer_crossings(walk(program, *arguments, run=watched), {"first": double, "second": double})
    assert found == pytest.approx(2 * 2 * np.e * 3 + 3)
    assert kept == [1, 2, 2]
    *dropped, last = (set(piece.unused_after) for piece in program.pieces)
    read_later = [{n for piece in program.pieces[m + 1 :] for n in piece.inputs} for m in range(len(dropped))]
    assert all(dropped) and not any(gone & read for gone, read in zip(dropped, read_later, strict=True))
    assert not last & set(program.results)


def test_several_walks_go_on_side_by_side():
    program = divide_at_crossings(lambda x: ask("second", ask("first", x) + x), ONE)
    walks = [walk(program, jnp.float32(x)) for x in (1, 2, 3)]
    assert [next(w) for w in walks] == [("first", 1.0), ("first", 2.0), ("first", 3.0)]
    later = [walks[n].send(jnp.float32(10 * n)) for n in (2, 0, 1)]
    assert later == [("second", 23.0), ("second", 1.0), ("second", 12.0)]
    ends = []
    for n in (1, 2, 0):
        with pytest.raises(StopIteration) as end:
            walks[n].send(jnp.float32(100 + n))
        ends.append(end.value.value)
    assert ends == [101.0, 102.0, 100.0]


# --- what is refused ----------------------------------------------------------------------------------


def loop(x):
    return jax.lax.scan(lambda carry, _: (ask("ask", carry), None), x, None, length=3)[0]


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (loop, "scan"),
        (lambda x: jax.lax.while_loop(lambda y: y < 9, lambda y: ask("ask", y), x), "while"),
        (lambda x: jax.lax.cond(x > 0, lambda y: ask("ask", y), lambda y: y, x), "cond"),
        (jax.jit(lambda x: ask("ask", x)), "jit"),
        (lambda x: jax.lax.cond(x > 0, loop, lambda y: y, x), "cond"),
    ],
)
def test_a_crossing_inside_of_another_program_is_refused(function, where):
    message = f"a crossing to another group lies inside {where}, but the loop or branch around a crossing must run"
    with pytest.raises(ContractError, match=message):
        divide_at_crossings(function, ONE)


def test_a_crossing_cannot_be_computed_where_it_stands():
    with raises("fragment-lives-outside-this-program", "'ask'"):
        ask("ask", ONE)


def test_other_arguments_than_those_that_were_traced_are_refused():
    program = divide_at_crossings(lambda x: ask("ask", x), {"x": ONE})
    with raises("arguments-structure-were-given-were", "'y'", "'x'"):
        next(walk(program, {"y": ONE}))


def test_another_answer_than_the_one_announced_is_refused():
    program = divide_at_crossings(lambda x: ask("ask", {"x": x})["x"], ONE)
    with raises("answered-with-was-announced", "'ask'", "'y'", "'x'"):
        answer_crossings(walk(program, ONE), {"ask": lambda tree: {"y": ONE}})
