"""Fusion: functions of ONE environment as programs for kernels.

A function is traced once by JAX (a jaxpr), and then written anew in nodes, each of which is a number of every
environment of a block (`scalarise`). The program that comes out is run by JAX's own functions (`evaluate`), which
is the reference on any device.
"""

from rollmill.fusion.backends import backend_of
from rollmill.fusion.backends.base import Backend, check_package
from rollmill.fusion.backends.cpu.launches import machine_code
from rollmill.fusion.backends.triton.gradients import GradientLaunch, run_gradients_kernel
from rollmill.fusion.backends.triton.rollout import Launch, run_kernel
from rollmill.fusion.errors import CannotFuse
from rollmill.fusion.estimate.chips import CHIPS, Chip, find_chip
from rollmill.fusion.estimate.pressure import Pressure, pressure_of
from rollmill.fusion.explain import Explanation, explain
from rollmill.fusion.ir import Loop, Node, Program, Region, evaluate
from rollmill.fusion.kernels.gradients import (
    check_gradients,
    first_batch,
    fused_gradients,
    run_gradients_reference,
)
from rollmill.fusion.kernels.minibatch_loop import fused_minibatch_loop
from rollmill.fusion.kernels.rollout import (
    RolloutStep,
    fused_collect,
    pressure_of_rollout,
    rollout_step,
    run_reference,
)
from rollmill.fusion.lower.scalarise import Scalarised, scalarise
from rollmill.fusion.numerics import Numerics
from rollmill.fusion.tune.search import rollouts_in_a_row, tune_minibatch_loop, tune_rollout
from rollmill.fusion.tune.timing import Tuned

__all__ = [
    "CHIPS",
    "Backend",
    "CannotFuse",
    "Chip",
    "Explanation",
    "GradientLaunch",
    "Launch",
    "Loop",
    "Node",
    "Numerics",
    "Pressure",
    "Program",
    "Region",
    "RolloutStep",
    "Scalarised",
    "Tuned",
    "backend_of",
    "check_gradients",
    "check_package",
    "evaluate",
    "explain",
    "find_chip",
    "first_batch",
    "fused_collect",
    "fused_minibatch_loop",
    "fused_gradients",
    "machine_code",
    "pressure_of",
    "pressure_of_rollout",
    "rollout_step",
    "rollouts_in_a_row",
    "run_gradients_kernel",
    "run_gradients_reference",
    "run_kernel",
    "run_reference",
    "scalarise",
    "tune_minibatch_loop",
    "tune_rollout",
]
