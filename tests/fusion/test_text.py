"""Programs, schedules and the compiler's stages as text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.cli.explain import run
from rollmill.fusion import compiler_stages, lower_function, lower_gradients, lower_rollout, program_text
from rollmill.fusion.ir.text import NodeNames
from rollmill.fusion.opt.passes import PASSES, schedule_lines
from rollmill.fusion.opt.schedule import schedule_of

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)
ROW = jax.ShapeDtypeStruct((40,), jnp.float32)


def graph_of(environment):
    network = rollmill.NetworkConfig(hidden_sizes=(16,))
    return rollmill.ppo(rollmill.make(environment), num_envs=4, num_steps=8, num_minibatches=1, network=network)


def test_a_small_program_reads_as_it_computes():
    def function(shared, x, n):
        return jnp.where(n > 3, x * shared[1], jnp.float32(0.5)), n

    assert program_text(lower_function(function, (NUMBER, COUNT), (jnp.ones(2),)).program) == (
        "program(in0:f32, in1:i32):\n"
        "  v0:bool = gt in1, 3\n"
        "  v1:f32 = mul in0, slot0[1]\n"
        "  v2:f32 = select v0, v1, 0.5\n"
        "return v2, in1"
    )


def test_rows_show_their_widths_and_their_matrices():
    text = program_text(lower_function(lambda w, x: w @ x, (ROW,), (jnp.ones((12, 40)),)).program)
    assert text == "program(in0:f32[40]):\n  v0:f32[12] = dot(slot0[0:40, 0:12] transposed) in0\nreturn v0"


def test_loops_show_their_conditions_and_bodies():
    def function(x, n):
        return jax.lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] * 2, c[1] + 1), (x, jnp.int32(0)))

    program = lower_function(function, (NUMBER, COUNT)).program
    expected = [
        "program(in0:f32, in1:i32):",
        "  v0:(f32, i32) = loop in0, 0, in1",
        "    while:",
        "      program(in0:f32, in1:i32, in2:i32):",
        "        v0:bool = lt in1, in2",
        "      return v0",
        "    do:",
        "      program(in0:f32, in1:i32):",
        "        v0:f32 = mul in0, 2.0",
        "        v1:i32 = add in1, 1",
        "      return v0, v1",
        "  v1:f32 = item(0) v0",
        "  v2:i32 = item(1) v0",
        "return v1, v2",
    ]
    text = program_text(program).splitlines()
    # Operands of products may come in either order.
    assert [line.replace("mul 2.0, in0", "mul in0, 2.0") for line in text] == expected
    inside = "\n".join(schedule_lines(schedule_of(program), NodeNames(program)))
    assert "lt in1, in2" in inside and "while:" in inside


@pytest.mark.parametrize("lower", [lower_rollout, lower_gradients], ids=["rollout", "gradients"])
def test_the_same_function_is_lowered_to_the_same_text(lower):
    first, again = (compiler_stages(lower(graph_of("CartPole-v1")).lowered) for _ in range(2))
    assert [stage.name for stage in first] == ["jaxpr", "prologue", "program", *(each.name for each in PASSES)]
    assert first[1:] == again[1:]  # a jaxpr may show addresses of functions


def test_inputs_that_are_known_or_another_again_are_shown_as_such():
    (program,) = [stage.text for stage in compiler_stages(lower_rollout(graph_of("CartPole-v1")).lowered)][2:3]
    head = program.splitlines()[0]
    assert "in5:i32" in head and "in7=in5" in head  # an episode's length, and the steps of its time limit


def test_a_schedule_shows_its_branches_with_what_they_hand_out():
    program = lower_rollout(graph_of("CartPole-v1")).program
    lines = list(schedule_lines(schedule_of(program), NodeNames(program)))
    (branch,) = [n for n, line in enumerate(lines) if line.startswith("  if any ")]
    handed_out = lines[branch].rpartition("-> ")[2].rstrip(":").split(", ")
    inside = [line for line in lines[branch + 1 :] if line.startswith("    ")]
    assert {line.split(":")[0].strip() for line in inside} >= set(handed_out)
    assert all(np.char.isalnum(name) for name in handed_out)


def test_the_command_prints_every_stage_of_both_kernels(capsys):
    assert run(["fusion", "CartPole-v1", "--ir"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("=== ")]
    names = ["jaxpr", "prologue", "program", "branches", "segments", "skinny products", "schedule"]
    assert heads == [f"=== {kernel}: {name}" for kernel in ("rollout", "gradients") for name in names]


def test_the_command_says_which_kernel_there_is_not(capsys):
    assert run(["fusion", "TicTacToe-v0", "--ir", "--algorithm", "alphazero"]) == 0
    assert "=== rollout: not fused: " in capsys.readouterr().out
