"""What the groups of a partition do: one replica's part of a training, and the state as parts of it."""

from rollmill.execution.groups.mesh import STRIDE, run_on_mesh
from rollmill.execution.groups.replica import run
from rollmill.execution.groups.seat import Seat
from rollmill.execution.groups.snapshots import Part, assemble, share_of
from rollmill.execution.groups.worker import serve_seat

__all__ = ["STRIDE", "Part", "Seat", "assemble", "run", "run_on_mesh", "serve_seat", "share_of"]
