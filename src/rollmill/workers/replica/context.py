"""The context of one replica of one group: its role, its environments, its channels."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from rollmill.channels.protocols import Wire
from rollmill.core.types import Key
from rollmill.dataflow import Flow, Graph, Group, Role, peers, share
from rollmill.programs.compile_clock import CompileClock
from rollmill.workers.replica.progress import ReplicaControl


class ReplicaContext(NamedTuple):
    """One replica of one group of a running training."""

    graph: Graph
    flow: Flow
    role: Role
    replica: int
    wire: Wire
    control: ReplicaControl
    key: Key
    """The training's root key."""
    seed: int
    first: int
    """Iterations that came before."""
    restored: Mapping[str, np.ndarray]
    """Leaves of a checkpoint by name, cut to this replica's environments; empty at the beginning."""
    attempt: int = 0
    """How many times this replica was replaced since the last common start of all replicas."""
    generation: int = 0
    """Common starts of all replicas before this one: 0 for a new run, 1 for a resumed one, and one more for each
    restart of all replicas since."""
    unroll: int = 1
    opens: bool = True
    """Whether environments are reset at the common start, because no checkpoint restores them; the server of
    environments then sends their first observations."""
    checksums: bool = False
    """Whether messages between groups carry a checksum."""
    compile_clock: CompileClock | None = None
    """Measures this replica's compilations; None where nobody asks."""
    max_failures: int = 5
    """How many times in a row one environment of Python may fail, with no whole episode in between."""

    @property
    def group(self) -> Group:
        """The group that this is a replica of."""
        return self.role.group

    @property
    def index(self) -> np.ndarray:
        """Global indices of the environments that this replica holds."""
        return np.asarray(share(self.graph.loops.num_envs, self.group.replicas, self.replica), np.int32)

    @property
    def start_key(self) -> Key:
        """The key that environments start with: another one each time that they begin anew."""
        return jax.random.fold_in(self.key, self.start_number) if self.start_number else self.key

    @property
    def start_number(self) -> int:
        """The start of environments that this is: 0 for the first one of a run, else a hash.

        `first` belongs to it: a run may be resumed many times, each time with `generation` 1.
        """
        starts = self.first, self.generation, self.attempt
        return int(np.random.SeedSequence(starts).generate_state(1)[0]) if any(starts) else 0

    @property
    def name(self) -> str:
        """Group and number, such as `actor/2`."""
        return f"{self.group.name}/{self.replica}"

    def peers(self, channel: str) -> range:
        """Replicas at the other end of a channel that share environments with this one."""
        return peers(self.group.replicas, self.role.partner(channel).replicas, self.replica)
