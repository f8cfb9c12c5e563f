"""Environments as the group of the policy sees them: steppers, and links to steppers.

A stepper holds environments in this process. A link connects a policy to a stepper, either in the same process or
through channels to another group. Requests and replies are batches `[E, ...]`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import PyTree

from rollmill.channels.shm.queue import QueueReceiver, QueueSender
from rollmill.core.errors import EnvironmentFailed
from rollmill.core.types import HostFailure, HostStep, HostVector
from rollmill.dataflow import Collector, Graph, ResetReply, StepReply, StepRequest, answer_request
from rollmill.workers.protocol import EnvFailures, EnvGrowth, send
from rollmill.workers.replica.memory_watch import MemoryWatch
from rollmill.workers.replica.progress import ReplicaControl

RESTARTED = 1
"""Flag of a reply: the environments were lost, and new environments have replaced them."""


@runtime_checkable
class Stepper(Protocol):
    """Interface of environments that this process steps."""

    def open(self) -> ResetReply:
        """Starts the environments, and returns their first observations."""
        ...

    def step(self, request: StepRequest) -> StepReply:
        """Steps the environments with the given actions, and returns the timesteps."""
        ...

    def state(self) -> PyTree[Any]:
        """Returns the part of the environments' state that a checkpoint contains."""
        ...


class CompiledStepper:
    """JAX environments that one compiled program steps."""

    def __init__(self, graph: Graph, start: Collector) -> None:
        self._start = start
        self._state = start.environment
        self._step = jax.jit(jax.vmap(partial(answer_request, graph)))

    def open(self) -> ResetReply:
        """Starts the environments, and returns their first observations."""
        return ResetReply(self._start.observation, self._start.action_mask)

    def step(self, request: StepRequest) -> StepReply:
        """Steps the environments with the given actions, and returns the timesteps."""
        self._state, reply = self._step(self._state, request)
        return reply

    def state(self) -> PyTree[Any]:
        """Returns the state of all environments, with leaves `[E, ...]`."""
        return self._state


class HostStepper:
    """Environments that are Python objects, stepped in this process.

    A reply is valid until the one after the next, which reuses its arrays.
    """

    def __init__(
        self, vector: HostVector, index: Sequence[int], control: ReplicaControl, *, max_failures: int
    ) -> None:
        self._vector, self._control = vector, control
        self._streaks = FailureStreaks(index, max_failures)
        self._index, self._memory = index, MemoryWatch(len(index))
        self._latest: HostStep | None = None
        self._spare: HostStep | None = None

    def open(self) -> ResetReply:
        """Starts the environments, and returns their first observations.

        Raises `EnvironmentFailed` after too many consecutive failures of one environment.
        """
        with self._control.stepping("making environments", starts=True):
            first = self._vector.reset()
        self._count_failures(None)
        return ResetReply(first.observation, first.info.get("action_mask", ()))

    def step(self, request: StepRequest) -> StepReply:
        """Steps the environments with the given actions, and returns the timesteps.

        Raises `EnvironmentFailed` after too many consecutive failures of one environment.
        """
        action = jax.tree.map(np.asarray, request.action)
        before = self._memory.before()
        with self._control.stepping("stepping environments"):
            step = self._vector.step(action, out=self._spare)
        if (growth := self._memory.after(before)) is not None:
            send(self._control, EnvGrowth(*growth, first=int(self._index[0]), last=int(self._index[-1])))
        self._spare, self._latest = self._latest, step
        self._count_failures(step)
        info = dict(step.info)
        mask = info.pop("action_mask", ())
        return StepReply(step.observation, mask, step.reward, step.terminated, step.truncated, info)  # type: ignore[arg-type]

    def _count_failures(self, step: HostStep | None) -> None:
        failures = self._vector.drain_failures()
        if failures:
            send(self._control, EnvFailures([failure._asdict() for failure in failures]))
        self._streaks.count(failures, None if step is None else step.terminated | step.truncated)

    def state(self) -> PyTree[Any]:
        """Returns an empty state: Python objects are not saved, and begin new episodes when a run is resumed."""
        return ()


class FailureStreaks:
    """Counts the failures of each environment since its last complete episode.

    `index` contains the global indices of the environments. More than `max_failures` failures of one environment
    raise an error.
    """

    def __init__(self, index: Sequence[int], max_failures: int) -> None:
        self._streaks = dict.fromkeys(map(int, index), 0)
        self._max_failures = max_failures

    def count(self, failures: Sequence[HostFailure], done: np.ndarray | None) -> None:
        """Counts the failures of one step, or of the first reset, in order.

        `done` marks the environments whose episode ended in the step, `[n]`, including those that failed. It is
        None for a reset. Raises `EnvironmentFailed` after too many consecutive failures of one environment.
        """
        if done is not None and done.any():
            cut = {failure.index for failure in failures if failure.doing == "step"}
            for number, ended in zip(self._streaks, done, strict=True):
                if ended and number not in cut:
                    self._streaks[number] = 0
        for failure in failures:
            self._streaks[failure.index] += 1
            if self._streaks[failure.index] > self._max_failures:
                raise _too_often(failure, self._streaks[failure.index])


def _too_often(failure: HostFailure, count: int) -> EnvironmentFailed:
    return EnvironmentFailed(
        f"environment {failure.index} failed {count} times without a complete episode in between, most recently "
        f"in its {failure.doing}: {failure.error}\n  at {failure.line}\nhint: fix the environment, or allow more "
        f"failures in a row with --max-failures (now {count - 1})."
    )


@runtime_checkable
class EnvLink(Protocol):
    """Interface of a connection to environments in this or another process. It handles one request at a time."""

    def open(self) -> ResetReply:
        """Returns the first observations, once the environments have started."""
        ...

    def send(self, request: StepRequest, iteration: int) -> None:
        """Sends actions to the environments."""
        ...

    def receive(self) -> tuple[StepReply, bool]:
        """Returns the environments' reply, and whether they were lost and replaced since the last reply."""
        ...


class LocalEnvs:
    """A link to environments in this process."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self._request: StepRequest | None = None

    def open(self) -> ResetReply:
        """Starts the environments, and returns their first observations."""
        return self.stepper.open()

    def send(self, request: StepRequest, iteration: int) -> None:
        """Keeps the actions until `receive` steps the environments."""
        self._request = request

    def receive(self) -> tuple[StepReply, bool]:
        """Steps the environments with the actions that were sent, and returns the reply.

        The second result is False, because environments in the same process are never replaced.
        """
        assert self._request is not None
        return self.stepper.step(self._request), False


class RemoteEnvs(NamedTuple):
    """A link through channels to the environments of another group."""

    openings: QueueReceiver
    requests: QueueSender
    replies: QueueReceiver
    target: int

    def open(self) -> ResetReply:
        """Returns the first observations, once the other group has sent them."""
        with self.openings.receive(source=self.target) as message:
            return message.copy()

    def send(self, request: StepRequest, iteration: int) -> None:
        """Sends actions to the environments of the other group."""
        self.requests.send(request, iteration=iteration, target=self.target)

    def receive(self) -> tuple[StepReply, bool]:
        """Waits for the environments' reply. Returns it, and whether they were lost and replaced since the last
        reply.
        """
        with self.replies.receive(source=self.target) as message:
            return message.copy(), bool(message.header.flags & RESTARTED)
