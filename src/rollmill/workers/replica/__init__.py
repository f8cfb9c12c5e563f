"""Replicas: one copy of a group each, from its role to its stages, and snapshots of what they hold."""

from rollmill.workers.replica.context import ReplicaContext
from rollmill.workers.replica.loop import run
from rollmill.workers.replica.snapshots import StatePart, assemble, share_of
from rollmill.workers.replica.spmd import STRIDE, run_on_mesh

__all__ = ["STRIDE", "StatePart", "ReplicaContext", "assemble", "run", "run_on_mesh", "share_of"]
