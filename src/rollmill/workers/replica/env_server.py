"""The environment server: steps environments for a policy in another group."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from rollmill.channels.errors import ChannelClosed
from rollmill.channels.shm.queue import QueueReceiver, QueueSender
from rollmill.dataflow import Collector, StepReply
from rollmill.programs.states import start_environments
from rollmill.workers.replica.context import IterationState, ReplicaContext, StageRun
from rollmill.workers.replica.env_client import RESTARTED, CompiledStepper, HostStepper, Stepper
from rollmill.workers.replica.layouts import (
    EnvPolicyPair,
    collector_shapes,
    env_policy_pairs,
    opening_layout,
    reply_layout,
    request_layout,
)
from rollmill.workers.replica.snapshots import environment_part, restored_collector


class ClientClosed(Exception):
    """Raised if the group with the policy has ended, so that no more actions will arrive."""


class _Served(NamedTuple):
    pair: EnvPolicyPair
    stepper: Stepper
    openings: QueueSender
    requests: QueueReceiver
    replies: QueueSender


class EnvServer(StageRun):
    """Stage that steps the environments of this replica for the group with the policy."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        pairs = env_policy_pairs(context.group, context.role.partner("action"), context.graph.loops.num_envs)
        collector = _collector(context)
        self._served = [self._serve(pair, collector) for pair in pairs if pair.environment == context.replica]
        self._restarted = [False] * len(self._served)
        for n in range(len(self._served)):
            self._open(n)
        self._asked = [self._count(served) for served in self._served]
        self._skipped = [asked - min(self._asked) // self._steps * self._steps for asked in self._asked]

    def run(self, state: IterationState) -> IterationState:
        """Answers all clients for one iteration, or only for the steps that a replaced worker had not served.

        Raises `ClientClosed` if the clients have ended.
        """
        for step in range(self._steps):
            for n in range(len(self._served)):
                if step >= self._skipped[n]:
                    self._serve_step(n)
        self._skipped = [0] * len(self._served)
        return state

    @property
    def resumed_at(self) -> int:
        """The first iteration that had not been served completely when this replica began."""
        return self._context.begin.first + min(self._asked) // self._steps

    @property
    def _steps(self) -> int:
        return self._context.graph.loops.num_steps

    def _count(self, served: _Served) -> int:
        """Counts the requests taken so far, by this worker and those that it has replaced."""
        return served.requests.statistics()[served.pair.policy].messages

    def part(self) -> dict[str, np.ndarray]:
        """Returns the states of the environments for a snapshot, if this replica owns them."""
        return environment_part(self._context, [served.stepper.state() for served in self._served])

    def _serve_step(self, n: int) -> None:
        served, control = self._served[n], self._context.control
        control.at("waiting for actions")
        try:
            with served.requests.receive(source=served.pair.policy) as message:
                request = message.copy()
        # between hosts, a policy that has ended closes the channel of its requests
        except ChannelClosed as closed:
            raise ClientClosed from closed
        control.work("stepping environments")
        if self._restarted[n]:
            self._restart(n)
        else:
            self._reply(served, served.stepper.step(request))

    def _reply(self, served: _Served, reply: StepReply, flags: int = 0) -> None:
        self._context.control.at("waiting for space to send timesteps")
        served.replies.send(reply, flags=flags, target=served.pair.policy)

    # --- beginning, and after a loss -------------------------------------------------------------------

    def _open(self, n: int) -> None:
        """Sends the first observations, or marks these environments as replacements of lost ones."""
        served, context = self._served[n], self._context
        target = served.pair.policy
        if context.begin.resets_environments and served.openings.statistics()[target].messages == 0:
            served.openings.send(jax.tree.map(np.asarray, served.stepper.open()), target=target)
        elif context.begin.attempt:
            self._restarted[n] = True
            if self._count(served) > served.replies.statistics()[target].messages:
                self._restart(n)  # the lost worker had taken a request that it did not answer

    def _restart(self, n: int) -> None:
        """Replies that these environments were lost, with the first observations of their replacements."""
        served = self._served[n]
        opening = jax.tree.map(np.asarray, served.stepper.open())
        layout = reply_layout(self._context.flow, len(served.pair.index))
        blank: StepReply = layout.unflatten([np.zeros(leaf.shape, leaf.dtype) for leaf in layout.leaves])
        reply = blank._replace(observation=opening.observation, action_mask=opening.action_mask)
        self._restarted[n] = False
        self._reply(served, reply, RESTARTED)

    def _serve(self, pair: EnvPolicyPair, collector: Collector | None) -> _Served:
        context, width = self._context, len(pair.index)
        wire, flow, here = context.wire, context.flow, context.replica
        return _Served(
            pair,
            self._stepper(pair, collector),
            wire.sender("opening", source=here, targets=[pair.policy], layout=opening_layout(flow, width)),
            wire.receiver("action", sources=[pair.policy], target=here, layout=request_layout(flow, width)),
            wire.sender(
                "timestep",
                source=here,
                targets=[pair.policy],
                layout=reply_layout(flow, width),
                checksum=context.spec.checksums,
            ),
        )

    def _stepper(self, pair: EnvPolicyPair, collector: Collector | None) -> Stepper:
        if collector is None:
            return host_stepper(self._context, pair.index)
        lowest = int(self._context.index[0])
        cut = slice(pair.index.start - lowest, pair.index.stop - lowest)
        return CompiledStepper(self._context.graph, jax.tree.map(lambda leaf: leaf[cut], collector))


def host_stepper(context: ReplicaContext, index: Sequence[int]) -> HostStepper:
    """Creates the stepper of Python environments in this process, with the global indices `index`."""
    assert context.graph.host is not None
    vector = context.graph.host(index, seed=context.spec.seed, generation=context.start_number)
    return HostStepper(vector, index, context.control, max_failures=context.spec.tolerances.max_failures)


def _collector(context: ReplicaContext) -> Collector | None:
    if context.graph.host is not None:
        return None
    shapes = collector_shapes(context.flow, len(context.index))
    restored = restored_collector(context, shapes)
    if restored is not None:
        return restored
    return start_environments(context.graph, context.start_key, context.index, context.begin.first)
