"""What the groups of a partition do: one replica's part of a training, and the state as parts of it."""

from rollmill.execution.replica.context import ReplicaContext
from rollmill.execution.replica.entry import run_replica
from rollmill.execution.replica.loop import run
from rollmill.execution.replica.snapshots import StatePart, assemble, share_of
from rollmill.execution.replica.spmd import STRIDE, run_on_mesh

__all__ = ["STRIDE", "StatePart", "ReplicaContext", "assemble", "run", "run_on_mesh", "run_replica", "share_of"]
