"""Guards hold what only their condition needs, and long programs are written in few stretches."""

from functools import partial

import pytest

import rollmill
from rollmill.fusion import lower_rollout
from rollmill.fusion.ir import ANYWHERE
from rollmill.fusion.opt import segments
from rollmill.fusion.opt.branches import guarded_regions

ENVIRONMENTS = ["CartPole-v1", "TMaze-v0"]


def program_of(environment):
    network = rollmill.NetworkConfig(torso="gru", hidden_sizes=(16,), recurrent_size=16)
    graph = rollmill.ppo(rollmill.make(environment), num_envs=1, num_steps=8, num_minibatches=1, network=network)
    return lower_rollout(graph).program


def read_by(nodes):
    uses = {node: [] for node in nodes}
    for user in nodes:
        for n, operand in enumerate(user.operands):
            uses[operand].append((user, n))
    return uses


def chooses(condition, user, n):
    return user.op == "select" and user.operands[0] is condition and n == 1


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_guard_has_all_that_nothing_needs_where_its_condition_fails(environment):
    program = program_of(environment)
    nodes = program.nodes()
    users, taken = read_by(nodes), set(program.outputs)
    found = guarded_regions(nodes, program.outputs)
    assert found
    for guard in found:
        chosen = partial(chooses, guard.condition)
        decided = {user for node in nodes for user, n in users[node] if n == 0 and chosen(user, 1)}
        for node in nodes:
            decided |= {node} if decided.intersection(node.operands) else set()
        inside = set(nodes) - taken - decided - {node for node in nodes if node.op in ANYWHERE}
        while True:  # what anything else reads goes out, until nothing does
            kept = {x for x in inside if all(user in inside or chosen(user, n) for user, n in users[x])}
            if kept == inside:
                break
            inside = kept
        assert set(guard.nodes) == inside
        assert set(guard.results) == {x for x in inside if any(chosen(*use) for use in users[x])}
        assert list(guard.nodes) == [node for node in nodes if node in inside]
        taken |= inside


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_long_program_takes_turns_between_rows_and_scalars(monkeypatch, environment):
    nodes = program_of(environment).nodes()
    assert [stretch.nodes for stretch in segments.segments_of(nodes)] == [nodes]  # it is short
    monkeypatch.setattr(segments, "MAX_NODES", len(nodes) - 1)
    found = segments.segments_of(nodes)
    assert 2 <= len(found) <= 5
    written = set()
    for stretch in found:
        for node in stretch.nodes:
            assert written.issuperset(node.operands) and node not in written
            made_of_rows = node.width is not None or any(x.width is not None for x in node.operands)
            assert node.op in ANYWHERE or made_of_rows == stretch.of_rows
            written.add(node)
    assert written == set(nodes)
    assert all(one.of_rows != other.of_rows for one, other in zip(found, found[1:], strict=False))
