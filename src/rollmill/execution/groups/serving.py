"""The group that holds the environment, but not the policy: actions come, timesteps go, once a step."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from rollmill.channels import Receiver, Sender
from rollmill.core.types import HostFailure
from rollmill.dataflow import Collector, Turn
from rollmill.execution.groups.orders import Orders, patiently
from rollmill.execution.groups.seat import Seat
from rollmill.execution.groups.shapes import (
    Link,
    collector_shapes,
    links,
    opening_layout,
    request_layout,
    turn_layout,
)
from rollmill.execution.groups.snapshots import environment_part, restored_collector
from rollmill.execution.groups.stepping import (
    RESTARTED,
    CompiledStepper,
    HostStepper,
    Stepper,
    start_environments,
)


class Over(Exception):
    """The training ended before this iteration."""


class _Served(NamedTuple):
    link: Link
    stepper: Stepper
    openings: Sender
    requests: Receiver
    turns: Sender


class Serving:
    """Steps the environments of this replica for whoever holds the policy."""

    def __init__(self, seat: Seat, orders: Orders) -> None:
        self._seat, self._orders = seat, orders
        policies = seat.partition.holder("policy")
        own = [
            link
            for link in links(seat.group, policies, seat.graph.loops.num_envs)
            if link.environment == seat.replica
        ]
        collector = _collector(seat)
        self._served = [self._serve(link, policies.replicas, collector) for link in own]
        self._restarted = [seat.attempt > 0] * len(own)
        if seat.attempt:
            self._answer_what_was_asked()
        elif not _goes_on(seat):
            for served in self._served:
                served.openings.send(jax.tree.map(np.asarray, served.stepper.open()), target=served.link.policy)

    def __call__(self, iteration: int) -> None:
        """One iteration's steps, in every link.

        Raises:
            Over: the training ends before this iteration.
        """
        for _ in range(self._seat.graph.loops.num_steps):
            for n in range(len(self._served)):
                self._turn(n, iteration)

    @property
    def begun(self) -> int:
        """Iterations that the earlier holder of this seat had begun; counted by what it was asked for."""
        asked = self._served[0].requests.statistics()[self._served[0].link.policy].messages
        return self._seat.first + asked // self._seat.graph.loops.num_steps

    def part(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps."""
        return environment_part([served.stepper.state() for served in self._served])

    def _turn(self, n: int, iteration: int) -> None:
        served, control = self._served[n], self._seat.control
        control.at("waiting for actions")
        source = served.link.policy
        receive = lambda wait: served.requests.receive(source=source, timeout=wait)
        with patiently(receive, lambda: self._look_around(iteration)) as message:
            request = message.copy()
        control.at("stepping environments")
        if self._restarted[n]:
            self._restart(n)
        else:
            self._reply(served, served.stepper.step(request))

    def _reply(self, served: _Served, turn: Turn, flags: int = 0) -> None:
        self._seat.control.at("waiting for room to send timesteps")
        served.turns.send(jax.tree.map(np.asarray, turn), flags=flags, target=served.link.policy)

    def _look_around(self, iteration: int) -> None:
        self._seat.control.at("waiting for actions")
        if not self._seat.endless and iteration >= self._orders.last:
            raise Over

    # --- after a loss --------------------------------------------------------------------------------

    def _answer_what_was_asked(self) -> None:
        """The earlier holder of this seat may have taken a request and not answered it."""
        for n, served in enumerate(self._served):
            source = served.link.policy
            asked = served.requests.statistics()[source].messages
            answered = served.turns.statistics()[source].messages
            if asked > answered:
                self._restart(n)

    def _restart(self, n: int) -> None:
        """Answers that these environments were lost, with the first observations of others."""
        served = self._served[n]
        opening = jax.tree.map(np.asarray, served.stepper.open())
        layout = turn_layout(self._seat.flow, len(served.link.index))
        blank: Turn = layout.unflatten([np.zeros(leaf.shape, leaf.dtype) for leaf in layout.leaves])
        turn = blank._replace(observation=opening.observation, action_mask=opening.action_mask)
        self._restarted[n] = False
        self._reply(served, turn, RESTARTED)

    # --- beginning -----------------------------------------------------------------------------------

    def _serve(self, link: Link, policies: int, collector: Collector | None) -> _Served:
        seat, width = self._seat, len(link.index)
        wire, flow, own = seat.wire, seat.flow, seat.replica
        return _Served(
            link,
            self._stepper(link, collector),
            wire.sender("opening", source=own, targets=[link.policy], layout=opening_layout(flow, width)),
            wire.receiver("action", sources=[link.policy], target=own, layout=request_layout(flow, width)),
            wire.sender("timestep", source=own, targets=[link.policy], layout=turn_layout(flow, width)),
        )

    def _stepper(self, link: Link, collector: Collector | None) -> Stepper:
        if collector is None:
            return host_stepper(self._seat, link.index)
        lowest = int(self._seat.index[0])
        cut = slice(link.index.start - lowest, link.index.stop - lowest)
        return CompiledStepper(self._seat.graph, jax.tree.map(lambda leaf: leaf[cut], collector))


def host_stepper(seat: Seat, index: Sequence[int]) -> HostStepper:
    """Environments that are Python objects, in this process."""
    generation = seat.generation + seat.attempt

    def report(failures: Sequence[HostFailure]) -> None:
        seat.control.send("failures", {"failures": [failure._asdict() for failure in failures]})

    assert seat.graph.host is not None
    return HostStepper(seat.graph.host(index, seed=seat.seed, generation=generation), report)


def _collector(seat: Seat) -> Collector | None:
    if seat.graph.host is not None:
        return None
    shapes = collector_shapes(seat.flow, len(seat.index))
    restored = restored_collector(seat, shapes)
    return start_environments(seat.graph, seat.start_key, seat.index) if restored is None else restored


def _goes_on(seat: Seat) -> bool:
    return any(name.startswith("collector") for name in seat.restored)
