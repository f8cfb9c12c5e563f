"""Fusion: functions of ONE environment as programs for kernels.

A function is traced once by JAX (a jaxpr), and then written anew in nodes, each of which is a number of every
environment of a block (`scalarise`). The program that comes out is run by JAX's own functions (`evaluate`), which
is the reference on any device.
"""

from rollmill.fusion.backends import Backend, backend_of, check_package, machine_code
from rollmill.fusion.chips import CHIPS, Chip, find_chip
from rollmill.fusion.descent import fused_descent
from rollmill.fusion.evaluate import evaluate
from rollmill.fusion.explain import Explanation, explain
from rollmill.fusion.gradients import (
    GradientLaunch,
    check_gradients,
    first_batch,
    fused_gradients,
    run_gradients_kernel,
    run_gradients_reference,
)
from rollmill.fusion.ir import Loop, Node, Program, Region
from rollmill.fusion.prelude import Numerics
from rollmill.fusion.pressure import Pressure, pressure_of
from rollmill.fusion.refusals import CannotFuse
from rollmill.fusion.rollout import (
    Launch,
    RolloutStep,
    fused_collect,
    pressure_of_rollout,
    rollout_step,
    run_kernel,
    run_reference,
)
from rollmill.fusion.scalarise import Scalarised, scalarise
from rollmill.fusion.timing import Tuned
from rollmill.fusion.tuning import rollouts_in_a_row, tune_descent, tune_rollout

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
    "fused_descent",
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
    "tune_descent",
    "tune_rollout",
]
