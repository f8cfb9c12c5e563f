"""Replicas: one copy of a group each, from its role to its stages, and snapshots of what they hold."""

from rollmill.execution.replica.context import ReplicaContext
from rollmill.execution.replica.loop import run
from rollmill.execution.replica.snapshots import StatePart, assemble, share_of
from rollmill.execution.replica.spmd import STRIDE, run_on_mesh

__all__ = ["STRIDE", "StatePart", "ReplicaContext", "assemble", "run", "run_on_mesh", "share_of"]
