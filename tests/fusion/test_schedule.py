"""Schedules compute every node once, after all that it reads, and as their branches allow."""

import jax
import jax.numpy as jnp
import pytest

import rollmill
from rollmill.fusion import lower_function, lower_gradients, lower_rollout
from rollmill.fusion.kernels.accumulators import accumulators_of
from rollmill.fusion.opt import schedule, segments
from rollmill.fusion.opt.branches import guarded_regions
from rollmill.fusion.opt.schedule import Accumulate, Emit, EmitLoop, If, Segment, schedule_of

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)


def graph_of(environment):
    network = rollmill.NetworkConfig(hidden_sizes=(16,))
    return rollmill.ppo(rollmill.make(environment), num_envs=4, num_steps=8, num_minibatches=1, network=network)


def check_items(items, available, sums=()):
    """Follows items as a code generator does; returns the nodes that are available behind them."""
    available = set(available)
    for item in items:
        match item:
            case Accumulate(number):
                assert available.issuperset(sums[number])
            case If(condition, body, results):
                assert condition in available and available.isdisjoint(results)
                assert check_items(body, available).issuperset(results)
                available |= set(results)
            case Segment(body, results):
                assert check_items(body, available).issuperset(results)
                available |= set(results)
            case Emit(node) | EmitLoop(node):
                assert node not in available and available.issuperset(node.operands)
                available.add(node)
                if isinstance(item, EmitLoop):
                    check(item.body)
    return available


def check(scheduled, sums=()):
    program = scheduled.program
    inputs = {node for node in program.nodes() if node.op == "input"}
    assert check_items(scheduled.items, inputs, sums).issuperset(program.outputs)


def emitted(items):
    """Nodes in the order in which they are computed."""
    for item in items:
        if isinstance(item, Emit | EmitLoop):
            yield item.node
        elif isinstance(item, If | Segment):
            yield from emitted(item.body)


@pytest.mark.parametrize("environment", ["CartPole-v1", "TMaze-v0"])
def test_every_node_is_computed_once_behind_what_it_reads(environment):
    program = lower_rollout(graph_of(environment)).program
    scheduled = schedule_of(program)
    check(scheduled)
    nodes = list(emitted(scheduled.items))
    assert len(nodes) == len(set(nodes))
    assert set(nodes) == {node for node in program.nodes() if node.op != "input"}


def test_each_guarded_region_stands_behind_its_branch():
    program = lower_rollout(graph_of("CartPole-v1")).program
    regions = {region.condition: region for region in guarded_regions(program.nodes(), program.outputs)}
    taken = [item for item in schedule_of(program).items if isinstance(item, If)]
    assert regions and {item.condition for item in taken} == set(regions)
    for item in taken:
        assert tuple(emitted(item.body)) == regions[item.condition].nodes
        assert item.results == regions[item.condition].results


def long(x):
    for _ in range(40):
        x = jnp.sin(x) * 1.1
    return x


def test_a_condition_that_only_another_region_reads_is_outside_of_it():
    """The outer branch would hold the inner one's condition, and read its result: neither could come first."""

    def function(x, n):
        inner = jnp.where(n * 3 > 7, long(x), x)
        return jnp.where(n > 5, long(inner + 1) * inner, x)

    scheduled = schedule_of(lower_function(function, (NUMBER, COUNT)).program)
    check(scheduled)
    first, second = [item for item in scheduled.items if isinstance(item, If)]
    assert (first.condition.operands[1].value, second.condition.operands[1].value) == (7, 5)


def test_long_programs_are_cut_into_segments(monkeypatch):
    program = lower_rollout(graph_of("CartPole-v1")).program
    assert not any(isinstance(item, Segment) for item in schedule_of(program, segmented=True).items)  # it is short
    monkeypatch.setattr(segments, "MAX_NODES", 10)
    monkeypatch.setattr(schedule, "MIN_SEGMENT", 5)
    cut = schedule_of(program, segmented=True)
    check(cut)
    parts = [item for item in cut.items if isinstance(item, Segment)]
    assert parts
    for part in parts:
        assert all(node.width is None for node in emitted(part.body))
    assert set(emitted(cut.items)) == set(emitted(schedule_of(program).items))


def test_bodies_and_conditions_of_loops_are_scheduled_too():
    def function(x, n):
        return jax.lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] * 2 + jnp.sin(c[0]), c[1] + 1), (x, 0))

    scheduled = schedule_of(lower_function(function, (NUMBER, COUNT)).program)
    check(scheduled)
    (loop,) = [item for item in scheduled.items if isinstance(item, EmitLoop)]
    assert loop.body.program == loop.loop.body and loop.condition.program == loop.loop.condition
    assert [node.op for node in emitted(loop.condition.items)] == ["lt"]


def test_sums_are_added_as_soon_as_their_nodes_are_there():
    step = lower_gradients(graph_of("CartPole-v1"))
    kept = accumulators_of(step.sums, step.program.outputs)
    sums = [term.nodes for tile in kept.tiles for term in tile.terms]
    scheduled = schedule_of(step.program, sums=sums)
    check(scheduled, sums)
    numbers = [item.number for item in scheduled.items if isinstance(item, Accumulate)]
    assert sorted(numbers) == list(range(len(sums)))
    for at, item in enumerate(scheduled.items):
        if isinstance(item, Accumulate) and isinstance(before := scheduled.items[at - 1], Emit):
            assert before.node in sums[item.number]  # the last of its nodes was not there any earlier


def test_the_same_program_has_the_same_schedule():
    program = lower_rollout(graph_of("CartPole-v1")).program
    assert schedule_of(program) == schedule_of(program)
