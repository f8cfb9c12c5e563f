"""Brings replicas to a common end before the planned one, in two phases.

    hold    each answers how many iterations it has begun, at once, and begins no other
    end     they end after as many as the furthest of them has begun; those behind it go on until there

Messages may take as long as they like. Replicas answer whatever they are doing (`groups.ending`), so nobody waits
for data of one that is held for longer than it takes to hear from all. None ends before all have answered.
"""

from collections.abc import Set

from rollmill.execution.processes import ALL, Job, Supervision


class StopBarrier:
    """Where all replicas end: after the `planned` iterations, unless they are asked to `stop`."""

    def __init__(self, workers: Supervision, planned: int) -> None:
        self.last = planned
        """The number of iterations after which the training ends."""
        self._workers, self._planned = workers, planned
        self._stopping = self._settled = False
        self._begun: dict[str, int] = {}

    def stop(self) -> None:
        """Has all replicas hold; a second time changes nothing."""
        if not self._stopping:
            self._stopping = True
            self._workers.send(ALL, "hold")

    def hear(self, job: Job, begun: int) -> None:
        """A replica's answer."""
        self._begun[job.name] = begun

    def finished(self, job: Job) -> None:
        """A replica was not held any more: it has done what was planned."""
        self._begun[job.name] = self.last

    def settle(self, replicas: Set[str]) -> bool:
        """Tells where the end is, once all of these replicas have answered; whether it was told now."""
        if not self._stopping or self._settled or not replicas <= self._begun.keys():
            return False
        self._settled = True
        self.last = max(self._begun[name] for name in replicas)
        self._workers.send(ALL, "end", {"iteration": self.last})
        return True

    def tell(self, job: Job) -> None:
        """What a replica has to know before it begins, because it takes another one's place."""
        self._begun.pop(job.name, None)
        if self._settled:
            self._workers.send(job, "end", {"iteration": self.last})
        elif self._stopping:
            self._workers.send(job, "hold")

    def begin_again(self) -> None:
        """All replicas do, from an earlier iteration: what they answered before counts no more."""
        self.last, self._settled = self._planned, False
        self._begun.clear()
