"""Agents that share weights are turns of one loop, with the sums that all of them have together."""

from functools import partial

import jax
import numpy as np
import pytest

import rollmill
from rollmill.fusion.backends.triton import launches
from rollmill.fusion.backends.triton.gradients import gradient_operations
from rollmill.fusion.backends.triton.launches import reason_to_skip_gradients_on_gpu
from rollmill.fusion.ir import Program, evaluate
from rollmill.fusion.kernels.accumulators import accumulators_of
from rollmill.fusion.kernels.gradients import lower_gradients
from rollmill.fusion.kernels.loop_fission import plan_sample_loops
from rollmill.fusion.kernels.rerolling import reroll

SIZES = {"num_envs": 4, "num_steps": 4, "total_timesteps": 16, "num_minibatches": 1}
NETWORK = rollmill.NetworkConfig(hidden_sizes=(20,))


def plans_of(step):
    kept = accumulators_of(step.sums, step.program.outputs)
    plan = plan_sample_loops(kept, step.program, step.forwarded_outputs)
    return plan, reroll(plan, step.program, step.sample_leaves)


def sums_by(plan, step, inputs, uniforms, count):
    """All sums of a plan, each loop in its turns: what a kernel stores."""
    size = sum(each.size for each in step.sums if each.is_computed)
    found, numbers = np.zeros(size), {}
    for loop in plan.loops:
        terms = [(n, term) for n, tile in loop.tiles.items() for term in tile.terms]
        nodes = [node for _, term in terms for node in term.nodes] + loop.numbers
        program = Program(step.program.inputs, tuple(dict.fromkeys(nodes)))
        run = jax.jit(partial(evaluate, program, block=count))
        for turn in range(loop.turns.count):
            here = list(inputs)
            for place, stride in loop.turns.strides.items():
                here[place] = inputs[place + turn * stride]
            values = dict(zip(program.outputs, run(here, uniforms), strict=True))
            side = lambda nodes, values=values: np.concatenate(
                [np.ones((count, 1)) if n is None else np.asarray(values[n]).reshape(count, -1) for n in nodes], 1
            )
            for n, term in terms:
                tile = side(term.left).T @ side(term.right)
                for part in loop.tiles[n].parts:
                    rows = tile[part.first_row : part.first_row + part.rows]
                    places = part.offset + np.add.outer(
                        np.arange(part.rows) * part.strides[0], np.arange(part.columns) * part.strides[1]
                    )
                    found[places] += rows
            for node in loop.numbers:
                numbers[node] = numbers.get(node, 0) + np.broadcast_to(values[node], count).sum()
    for offset, terms in plan.numbers:
        found[offset] += sum(term.factor * numbers[term.node] for term in terms)
    return found


def inputs_of(step, key):
    """Numbers for the leaves of a sample: each integer is a legal action."""
    made = []
    for leaf in step.sample_leaves:
        for _ in leaf.places:
            key, own = jax.random.split(key)
            tail = () if leaf.width is None else (leaf.width,)
            if np.issubdtype(leaf.dtype, np.floating):
                made.append(jax.random.normal(own, (7, *tail), leaf.dtype))
            else:
                made.append(jax.random.randint(own, (7, *tail), 0, 2).astype(leaf.dtype))
    return made


@pytest.mark.parametrize("algorithm", ["ippo", pytest.param("mappo", marks=pytest.mark.slow)])
def test_agents_that_share_weights_are_turns_of_one_loop(algorithm):
    graph = getattr(rollmill, algorithm)("TagGridWorld-Small-v0", **SIZES, network=NETWORK)
    step = lower_gradients(graph)
    plan, rolled = plans_of(step)
    assert sorted(loop.turns.count for loop in rolled.loops) == [1, 4]
    assert {len(tile.terms) for loop in rolled.loops for tile in loop.tiles.values()} == {1}
    learner = graph.start_learner(jax.random.key(2))
    inputs, uniforms = inputs_of(step, jax.random.key(1)), step.prologue(learner).slots
    mine, right = (sums_by(each, step, inputs, uniforms, 7) for each in (rolled, plan))
    assert np.abs(right).max() > 1
    np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-4 * np.abs(right).max())


def test_agents_in_turns_count_once(monkeypatch):
    step = lower_gradients(rollmill.ippo("TagGridWorld-Small-v0", **SIZES, network=NETWORK))
    size = gradient_operations(step)
    assert size < len(step.program.nodes()) / 1.5
    assert reason_to_skip_gradients_on_gpu(step) is None
    monkeypatch.setattr(launches, "MAX_GRADIENT_OPERATIONS", size - 1)
    assert f"{size:,} operations. A kernel with more than {size - 1:,}" in str(
        reason_to_skip_gradients_on_gpu(step)
    )


def test_agents_whose_constants_differ_are_no_turns():
    graph = rollmill.ippo("TagGridWorld-Small-v0", **SIZES, network=NETWORK, agent_ids=True)
    plan, rolled = plans_of(lower_gradients(graph))
    assert rolled == plan
