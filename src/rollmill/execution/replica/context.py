"""The context of one replica of one group: its part of the graph, its environments, its channels."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from rollmill.channels import Wire
from rollmill.core.types import Key
from rollmill.dataflow import Flow, Graph, Group, Partition, peers, share
from rollmill.execution.coordination.start_up import CompileClock
from rollmill.execution.replica.progress import ReplicaControl


class ReplicaContext(NamedTuple):
    """One replica of one group of a running training."""

    graph: Graph
    flow: Flow
    partition: Partition
    group: Group
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
    """How many times this replica was replaced since all of them were started together."""
    generation: int = 0
    """How many times all of them were started before."""
    unroll: int = 1
    opens: bool = True
    """Whether environments begin with this beginning of the run, instead of going on."""
    checksums: bool = False
    """Whether packages carry a checksum."""
    compiling: CompileClock | None = None
    """Knows what this replica has compiled; left out, nobody is told."""
    max_failures: int = 5
    """How many times in a row one environment of Python may fail, with no whole episode in between."""

    @property
    def index(self) -> np.ndarray:
        """Global indices of the environments that this replica holds."""
        return np.asarray(share(self.graph.loops.num_envs, self.group.replicas, self.replica), np.int32)

    @property
    def start_key(self) -> Key:
        """The key that environments start with: another one each time that they begin anew."""
        if not self.attempt and not self.generation:
            return self.key
        return jax.random.fold_in(jax.random.fold_in(self.key, self.generation), self.attempt)

    @property
    def name(self) -> str:
        """Such as `actor/2`."""
        return f"{self.group.name}/{self.replica}"

    @property
    def endless(self) -> bool:
        """Whether it goes on until it is ended, because the learner waits for nobody in particular."""
        policies = self.partition.holder("policy")
        follows = self.group.has("policy") or self.group.has("environment") and not self.group.has("gradients")
        return follows and not policies.synchronous

    @property
    def keeps_environments(self) -> bool:
        """Whether checkpoints hold the environments: asynchronous ones and Python objects begin anew."""
        return self.partition.synchronous and self.graph.host is None

    def peers(self, fragment: str) -> tuple[Group, range]:
        """The group that holds a fragment, and the replicas of it that share environments with this one."""
        group = self.partition.holder(fragment)
        return group, peers(self.group.replicas, group.replicas, self.replica)
