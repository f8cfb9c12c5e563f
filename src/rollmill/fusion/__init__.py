"""Fusion: functions of ONE environment as programs for kernels.

A function is traced once by JAX (a jaxpr), and then written anew in nodes, each of which is a number of every
environment of a block (`scalarise`). The program that comes out is run by JAX's own functions (`evaluate`), which
is the reference on any device.
"""

from rollmill.fusion.evaluate import evaluate
from rollmill.fusion.ir import Loop, Node, Program, Region
from rollmill.fusion.refusals import CannotFuse
from rollmill.fusion.rollout import Launch, RolloutStep, fused_collect, rollout_step, run_kernel, run_reference
from rollmill.fusion.scalarise import Scalarised, scalarise

__all__ = [
    "CannotFuse",
    "Launch",
    "Loop",
    "Node",
    "Program",
    "Region",
    "RolloutStep",
    "Scalarised",
    "evaluate",
    "fused_collect",
    "rollout_step",
    "run_kernel",
    "run_reference",
    "scalarise",
]
