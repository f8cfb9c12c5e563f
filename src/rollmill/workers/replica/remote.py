"""Parts of a learner's program that other processes compute: means over replicas, and parameters of a parameter
server.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from rollmill.channels.layout import Layout
from rollmill.channels.protocols import Reduction
from rollmill.channels.transfers import to_device, to_host
from rollmill.dataflow import Learner
from rollmill.workers.replica.context import ReplicaContext
from rollmill.workers.replica.layouts import gradients_layout, parameters_layout

LAST, NO_UPDATE = 1, 2
"""Flags of a message of gradients. `LAST` marks the last message of an iteration, and `NO_UPDATE` a message
without gradients, because nothing was learned in the iteration."""


class MeanOverReplicas:
    """Computes means over all replicas of a group, with one reduction for each kind of content."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._reductions: dict[Any, Reduction] = {}
        self._steps = 0

    def __call__(self, tree: PyTree) -> PyTree:
        """Returns the mean, with the same bits in every replica."""
        leaves, structure = jax.tree.flatten(tree)
        kind = structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
        if kind not in self._reductions:
            self._reductions[kind] = self._open(Layout.of(tree))
        self._steps += 1
        self._context.control.at("waiting for the mean over replicas")
        mean = to_device(self._reductions[kind].mean(tree, step=self._steps))
        self._context.control.work("learning")
        return mean

    def _open(self, layout: Layout) -> Reduction:
        context, number = self._context, len(self._reductions)
        name = f"{context.group.name}/mean/{number}"
        return context.wire.reduction(name, rank=context.replica, size=context.group.replicas, layout=layout)


class ParameterClient:
    """A replica's connection to the parameter server, which sends gradients and receives parameters.

    An asynchronous client sends each message of gradients only when the next gradients or the iteration's metrics
    are ready, so that the last message of an iteration can carry its metrics.
    """

    def __init__(self, context: ReplicaContext) -> None:
        flow, group = context.flow, context.group
        self._context, self._waits = context, group.synchronous
        self._names = flow.metric_names
        self._gradients = context.wire.sender(
            "gradients",
            source=context.replica,
            targets=[0],
            layout=gradients_layout(flow),
            checksum=context.spec.checksums,
        )
        self._parameters = context.wire.latest_reader(
            "parameters", layout=parameters_layout(flow), reader=context.replica, readers=group.replicas
        )
        self._version = 0
        """Updates that the parameters here have seen."""
        self._held: tuple[PyTree, int] | None = None
        self._iteration = context.begin.first

    def begin(self, learner: Learner, iteration: int) -> Learner:
        """Returns the learner with the parameters with which an iteration begins."""
        self._iteration = iteration
        return self._context.flow.replace_parameters(learner, self._read(self._version if self._waits else None))

    def __call__(self, gradients: PyTree, last: bool) -> PyTree:
        """Returns the parameters after the update by these gradients, or the newest if the group is
        asynchronous.
        """
        gradients = to_host(gradients)
        if not self._waits:
            self._send_held()
            self._held = gradients, self._version
            return self._read(None)
        if self._context.replica == 0:
            self._send(gradients, self._version, flags=LAST if last else 0)
        return self._read(self._version + 1)

    def skip(self) -> None:
        """Tells the parameter server that nothing was learned in this iteration."""
        if self._waits and self._context.replica == 0:
            self._send(self._no_gradients(), self._version, flags=LAST | NO_UPDATE)

    def end(self, row: Mapping[str, float]) -> None:
        """Sends the last gradients of an iteration, with its metrics."""
        metrics = np.asarray([row[name] for name in self._names], np.float32)
        if self._held is None:
            self._send(self._no_gradients(), self._version, metrics, flags=LAST | NO_UPDATE)
        self._send_held(metrics, flags=LAST)

    def _no_gradients(self) -> PyTree:
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._context.flow.gradients)

    def _send_held(self, metrics: np.ndarray | None = None, *, flags: int = 0) -> None:
        if self._held is not None:
            gradients, version = self._held
            self._held = None
            self._send(gradients, version, metrics, flags=flags)

    def _send(self, gradients: PyTree, version: int, metrics: np.ndarray | None = None, *, flags: int) -> None:
        self._context.control.at("waiting for space to send gradients")
        metrics = np.zeros(len(self._names), np.float32) if metrics is None else metrics
        self._gradients.send((gradients, metrics), version=version, iteration=self._iteration, flags=flags)

    def _read(self, at_least: int | None) -> PyTree:
        self._context.control.at("waiting for parameters")
        latest = self._parameters.read(at_least=at_least)
        self._version = latest.version
        self._context.control.work("learning")
        return to_device(latest.tree)
