"""Compiler options by mesh, and that this version of XLA accepts them."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from rollmill.execution.program import compiler_options
from rollmill.execution.program.compiler_options import EXACT_PRECISION, options_for


def mesh(platform: str, *, gpus: int, instances: int = 1) -> Any:
    devices = SimpleNamespace(flat=[SimpleNamespace(platform=platform)] * (gpus * instances))
    return SimpleNamespace(shape={"instance": instances, "gpu": gpus}, devices=devices)


@pytest.mark.parametrize(
    "alone",
    [mesh("gpu", gpus=1), mesh("cpu", gpus=4), mesh("gpu", gpus=2, instances=2), mesh("gpu", gpus=1, instances=4)],
)
def test_programs_without_all_reduces_between_gpus_have_no_more_options(alone: Any) -> None:
    assert options_for(alone) == EXACT_PRECISION


def test_programs_of_several_gpus_have_options_that_this_version_accepts() -> None:
    options = options_for(mesh("gpu", gpus=2))
    assert options.items() >= EXACT_PRECISION.items()
    jax.jit(lambda x: x + 1).lower(1.0).compile(options)


def test_what_a_version_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_options, "ALL_REDUCES_IN_CUDA_GRAPHS", {"xla_no_such_option": True})
    monkeypatch.setattr(compiler_options, "SYMMETRIC_BUFFERS", {"xla_cpu_enable_fast_math": False})
    assert options_for(mesh("gpu", gpus=2)) == {**EXACT_PRECISION, "xla_cpu_enable_fast_math": False}
