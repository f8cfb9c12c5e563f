"""Environments as the policy's group meets them: steppers, and lanes to where they are stepped.

A stepper holds some environments in this process. A lane is the way of a policy to a stepper: in the same
process, or through channels to another group. Requests and answers are batches, `[E, ...]`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import PyTree

from rollmill.channels import Receiver, Sender
from rollmill.core.types import HostStep, HostVector
from rollmill.dataflow import Collector, Graph, ResetReply, StepReply, StepRequest, start_collector, turn_one
from rollmill.execution.replica.failures import FailureStreaks
from rollmill.execution.replica.progress import ReplicaControl

RESTARTED = 1
"""Flag of an answer: these environments were lost, and others begin anew in their place."""


@runtime_checkable
class Stepper(Protocol):
    """Environments that are stepped here."""

    def open(self) -> ResetReply:
        """First observations."""
        ...

    def step(self, request: StepRequest) -> StepReply:
        """The timesteps that follow the actions."""
        ...

    def state(self) -> PyTree[Any]:
        """What a checkpoint keeps of them."""
        ...


class CompiledStepper:
    """JAX environments, stepped by one compiled program."""

    def __init__(self, graph: Graph, start: Collector) -> None:
        self._start = start
        self._state = start.environment
        self._step = jax.jit(jax.vmap(partial(turn_one, graph)))

    def open(self) -> ResetReply:
        """First observations."""
        return ResetReply(self._start.observation, self._start.action_mask)

    def step(self, request: StepRequest) -> StepReply:
        """The timesteps that follow the actions."""
        self._state, turn = self._step(self._state, request)
        return turn

    def state(self) -> PyTree[Any]:
        """The state of all environments, `[E, ...]`."""
        return self._state


class HostStepper:
    """Environments that are Python objects.

    An answer is good until the one after the next: its arrays are written again then.

    Args:
        vector: steps them.
        index: their numbers.
        control: is told of their failures, and that it is they who are at work.
        max_failures: how many times in a row one may fail, with no whole episode in between.
    """

    def __init__(
        self, vector: HostVector, index: Sequence[int], control: ReplicaControl, *, max_failures: int
    ) -> None:
        self._vector, self._control = vector, control
        self._streaks = FailureStreaks(index, max_failures)
        self._latest: HostStep | None = None
        self._spare: HostStep | None = None

    def open(self) -> ResetReply:
        """First observations.

        Raises:
            EnvironmentFailed: one of them failed too many times in a row.
        """
        with self._control.stepping("making environments", starts=True):
            first = self._vector.reset()
        self._count_failures(None)
        return ResetReply(first.observation, first.info.get("action_mask", ()))

    def step(self, request: StepRequest) -> StepReply:
        """The timesteps that follow the actions.

        Raises:
            EnvironmentFailed: one of them failed too many times in a row.
        """
        action = jax.tree.map(np.asarray, request.action)
        with self._control.stepping("stepping environments"):
            done = self._vector.step(action, out=self._spare)
        self._spare, self._latest = self._latest, done
        self._count_failures(done)
        info = dict(done.info)
        mask = info.pop("action_mask", ())
        return StepReply(done.observation, mask, done.reward, done.terminated, done.truncated, info)  # type: ignore[arg-type]

    def _count_failures(self, step: HostStep | None) -> None:
        failures = self._vector.drain_failures()
        if failures:
            self._control.send("failures", {"failures": [failure._asdict() for failure in failures]})
        self._streaks.count(failures, None if step is None else step.terminated | step.truncated)

    def state(self) -> PyTree[Any]:
        """Nothing: Python objects are not saved, and begin new episodes when a run goes on."""
        return ()


@runtime_checkable
class EnvLink(Protocol):
    """The way to some environments, wherever they are; one request is answered before the next is sent."""

    def open(self) -> ResetReply:
        """First observations, at the beginning."""
        ...

    def send(self, request: StepRequest, iteration: int) -> None:
        """Sends actions on their way."""
        ...

    def receive(self) -> tuple[StepReply, bool]:
        """The answer, and whether the environments were lost and began anew."""
        ...


class LocalEnvs:
    """To a stepper in this process."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self._request: StepRequest | None = None

    def open(self) -> ResetReply:
        """First observations."""
        return self.stepper.open()

    def send(self, request: StepRequest, iteration: int) -> None:
        """Keeps the actions until they are asked for."""
        self._request = request

    def receive(self) -> tuple[StepReply, bool]:
        """Steps."""
        assert self._request is not None
        return self.stepper.step(self._request), False


class RemoteEnvs(NamedTuple):
    """Through channels to another group."""

    openings: Receiver
    requests: Sender
    turns: Receiver
    target: int

    def open(self) -> ResetReply:
        """First observations."""
        with self.openings.receive(source=self.target) as message:
            return message.copy()

    def send(self, request: StepRequest, iteration: int) -> None:
        """Sends actions on their way."""
        self.requests.send(request, iteration=iteration, target=self.target)

    def receive(self) -> tuple[StepReply, bool]:
        """Waits for the answer."""
        with self.turns.receive(source=self.target) as message:
            return message.copy(), bool(message.header.flags & RESTARTED)


def start_environments(graph: Graph, key: Any, index: np.ndarray) -> Collector:
    """The environments with these indices before their first step, by one compiled program."""
    return jax.jit(partial(start_collector, graph))(key, index)
