"""The group that holds the environment, but not the policy: actions come, timesteps go, once a step."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from rollmill.channels import ChannelClosed, Receiver, Sender
from rollmill.dataflow import Collector, StepReply
from rollmill.execution.replica.context import ReplicaContext
from rollmill.execution.replica.env_client import (
    RESTARTED,
    CompiledStepper,
    HostStepper,
    Stepper,
    start_environments,
)
from rollmill.execution.replica.layouts import (
    EnvPolicyPair,
    collector_shapes,
    links,
    opening_layout,
    request_layout,
    turn_layout,
)
from rollmill.execution.replica.snapshots import environment_part, restored_collector


class Over(Exception):
    """Nobody asks for steps any more."""


class _Served(NamedTuple):
    link: EnvPolicyPair
    stepper: Stepper
    openings: Sender
    requests: Receiver
    turns: Sender


class EnvServer:
    """Steps the environments of this replica for whoever holds the policy."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        policies = context.partition.holder("policy")
        own = [
            link
            for link in links(context.group, policies, context.graph.loops.num_envs)
            if link.environment == context.replica
        ]
        collector = _collector(context)
        self._served = [self._serve(link, policies.replicas, collector) for link in own]
        self._restarted = [False] * len(own)
        for n in range(len(own)):
            self._open(n)
        self._asked = [self._count(served) for served in self._served]
        self._skipped = [asked - min(self._asked) // self._steps * self._steps for asked in self._asked]

    def __call__(self) -> None:
        """One iteration's steps, in every link, or the rest of them that a replaced worker left.

        Raises:
            Over: those who ask for steps have ended.
        """
        for step in range(self._steps):
            for n in range(len(self._served)):
                if step >= self._skipped[n]:
                    self._turn(n)
        self._skipped = [0] * len(self._served)

    @property
    def begun(self) -> int:
        """The first iteration that was not served whole when this replica began."""
        return self._context.first + min(self._asked) // self._steps

    @property
    def _steps(self) -> int:
        return self._context.graph.loops.num_steps

    def _count(self, served: _Served) -> int:
        """Requests that were taken so far, by this worker and those that it has replaced."""
        return served.requests.statistics()[served.link.policy].messages

    def part(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps."""
        return environment_part([served.stepper.state() for served in self._served])

    def _turn(self, n: int) -> None:
        served, control = self._served[n], self._context.control
        control.at("waiting for actions")
        try:
            with served.requests.receive(source=served.link.policy) as message:
                request = message.copy()
        except ChannelClosed as closed:  # between hosts, a policy that has ended closes what it asked through
            raise Over from closed
        control.work("stepping environments")
        if self._restarted[n]:
            self._restart(n)
        else:
            self._reply(served, served.stepper.step(request))

    def _reply(self, served: _Served, turn: StepReply, flags: int = 0) -> None:
        self._context.control.at("waiting for room to send timesteps")
        served.turns.send(turn, flags=flags, target=served.link.policy)

    # --- beginning, and after a loss -------------------------------------------------------------------

    def _open(self, n: int) -> None:
        """Sends the first observations, or says that these environments take the place of lost ones."""
        served, context = self._served[n], self._context
        target = served.link.policy
        if context.opens and served.openings.statistics()[target].messages == 0:
            served.openings.send(jax.tree.map(np.asarray, served.stepper.open()), target=target)
        elif context.attempt:
            self._restarted[n] = True
            if self._count(served) > served.turns.statistics()[target].messages:
                self._restart(n)  # the lost one had taken a request and not answered it

    def _restart(self, n: int) -> None:
        """Answers that these environments were lost, with the first observations of others."""
        served = self._served[n]
        opening = jax.tree.map(np.asarray, served.stepper.open())
        layout = turn_layout(self._context.flow, len(served.link.index))
        blank: StepReply = layout.unflatten([np.zeros(leaf.shape, leaf.dtype) for leaf in layout.leaves])
        turn = blank._replace(observation=opening.observation, action_mask=opening.action_mask)
        self._restarted[n] = False
        self._reply(served, turn, RESTARTED)

    def _serve(self, link: EnvPolicyPair, policies: int, collector: Collector | None) -> _Served:
        context, width = self._context, len(link.index)
        wire, flow, own = context.wire, context.flow, context.replica
        return _Served(
            link,
            self._stepper(link, collector),
            wire.sender("opening", source=own, targets=[link.policy], layout=opening_layout(flow, width)),
            wire.receiver("action", sources=[link.policy], target=own, layout=request_layout(flow, width)),
            wire.sender(
                "timestep",
                source=own,
                targets=[link.policy],
                layout=turn_layout(flow, width),
                checksum=context.checksums,
            ),
        )

    def _stepper(self, link: EnvPolicyPair, collector: Collector | None) -> Stepper:
        if collector is None:
            return host_stepper(self._context, link.index)
        lowest = int(self._context.index[0])
        cut = slice(link.index.start - lowest, link.index.stop - lowest)
        return CompiledStepper(self._context.graph, jax.tree.map(lambda leaf: leaf[cut], collector))


def host_stepper(context: ReplicaContext, index: Sequence[int]) -> HostStepper:
    """Environments that are Python objects, in this process."""
    generation = context.generation + context.attempt
    assert context.graph.host is not None
    vector = context.graph.host(index, seed=context.seed, generation=generation)
    return HostStepper(vector, index, context.control, max_failures=context.max_failures)


def _collector(context: ReplicaContext) -> Collector | None:
    if context.graph.host is not None:
        return None
    shapes = collector_shapes(context.flow, len(context.index))
    restored = restored_collector(context, shapes)
    return start_environments(context.graph, context.start_key, context.index) if restored is None else restored
