"""What the groups of a partition do: one replica's part of a training, and the state as parts of it."""

from rollmill.execution.groups.replica import run
from rollmill.execution.groups.seat import Seat
from rollmill.execution.groups.snapshots import Part, assemble, share_of

__all__ = ["Part", "Seat", "assemble", "run", "share_of"]
