"""The description of an environment's kernel, before anything is run."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from rollmill.cli import explain as command
from rollmill.fusion import CHIPS, KernelResources, lower_function
from rollmill.fusion.estimate.cost import Cost, costs_of
from wordings import raises

HAS_TRITON = importlib.util.find_spec("triton") is not None
LENGTH = jax.ShapeDtypeStruct((64,), jnp.float32)


def program_of(function, *each, uniform=()):
    return lower_function(function, each, uniform).program


def test_operations_are_counted_by_their_unit():
    number, integer = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    assert costs_of(program_of(lambda x, y: x * y + 1, number, number)).always == Cost(floats=2)
    assert costs_of(program_of(lambda n: (n ^ 5) << 1, integer)).always == Cost(integers=2)
    assert costs_of(program_of(jnp.exp, number)).always == Cost(floats=2, special=1)


def test_matrix_products_are_for_tensor_cores():
    matrix = jnp.arange(64.0 * 48).reshape(64, 48)
    cost = costs_of(program_of(lambda m, x: jnp.tanh(x @ m), LENGTH, uniform=(matrix,))).always
    assert cost.tensor == 2 * 64 * 48 and cost.special == 48


def test_bounds_come_from_what_there_is_least_of():
    bounds = CHIPS["H200"].bounds(Cost(floats=10, special=100), 4, "tf32")
    assert min(bounds, key=lambda name: bounds[name]) == "special functions"
    assert bounds["special functions"] == pytest.approx(132 * 1.83e9 * 16 / 100)
    assert bounds["memory"] == pytest.approx(4.8e12 / 4)


@pytest.mark.skipif(not HAS_TRITON, reason="no compiler for kernels")
def test_an_environment_that_fuses(capsys):
    assert command.run(["fusion", "CartPole-v1", "--chip", "A100", "--verbose"]) == 0
    told = capsys.readouterr().out
    for part in ("CartPole-v1 fuses", "registers a thread", "on one A100", "by special functions"):
        assert part in told, told


def test_what_needs_no_compilation_is_printed_before_it(capsys, monkeypatch):
    def compile_nothing(found, chip):
        so_far = capsys.readouterr()
        assert f"{found.pressure.num_operations:,} operations" in so_far.out
        assert "on one H100" in so_far.out and "Gradients: one kernel" in so_far.out
        assert "registers a thread" not in so_far.out
        assert so_far.err == f"compiling the kernel of {found.pressure.num_operations:,} operations ...\n"
        return KernelResources(registers=64, spilled_bytes=128, shared_bytes=1024, code_bytes=2048)

    monkeypatch.setattr(command, "compiled_resources", compile_nothing)
    assert command.run(["fusion", "CartPole-v1", "--chip", "H100", "--verbose"]) == 0
    # 64 registers x 4 warps x 32 threads / 64 environments, and 65,536 / (64 x 128) x 64 environments.
    after = capsys.readouterr().out
    assert "128 registers and 16 B on chip an environment\n" in after, after
    assert "512 environments at once on each multiprocessor" in after
    assert "128 B of a thread found no register" in after and "compiled in 0." in after


def test_without_verbose_it_says_what_auto_does_and_compiles_nothing(capsys, monkeypatch):
    monkeypatch.setattr(command, "compiled_resources", None)
    assert command.run(["fusion", "CartPole-v1", "--chip", "A100"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("CartPole-v1 fuses: policy and environment become one kernel")
    assert told[2].startswith("On a GPU, `--fusion auto`, the default, times kernels at the start of a run")
    assert told[3].startswith("One A100 makes at most ") and told[3].endswith("limited by instructions.")
    assert len(told) == 6 and max(map(len, told)) < 125


def test_an_environment_that_does_not(capsys):
    assert command.run(["fusion", "gymnasium:CartPole-v1"]) == 0
    told = capsys.readouterr().out
    assert "gymnasium:CartPole-v1 does not fuse: its environments are stepped by Python" in told


@pytest.mark.slow
def test_environments_of_several_agents_need_an_algorithm_for_them(capsys):
    with raises("has-several-agents-train-with"):
        command.run(["fusion", "TagGridWorld-Small-v0"])
    command.run(["fusion", "TagGridWorld-Small-v0", "--algorithm", "mappo", "--no-norm-adv"])
    printed = capsys.readouterr().out
    assert "TagGridWorld-Small-v0 fuses" in printed and "Gradients: one kernel for each minibatch." in printed


def test_what_is_wrong_is_said():
    with raises("unknown-name", "chip", "'H20'"):
        command.run(["fusion", "CartPole-v1", "--chip", "H20"])
    with raises("there-is-nothing-to-explain", "'fission'"):
        command.run(["fission", "CartPole-v1"])
    with raises("unknown-name", "algorithm", "'mapo'", "mappo"):
        command.run(["fusion", "CartPole-v1", "--algorithm", "mapo"])
    with raises("must-be-power-two-from", "block", "48"):
        command.run(["fusion", "CartPole-v1", "--block", "48"])
