"""Makes all replicas end training after the same iteration, before the planned end. A stop has two phases:

    hold    each replica answers at once how many iterations it has begun, and begins no more
    end     all end after the highest of these counts, and replicas behind it continue up to it

Messages may take any time. Replicas answer at any point of their work (`workers.replica.requests`), so others wait
for data of a held replica only until all have answered. No replica ends before that.
"""

from collections.abc import Set

from rollmill.processes.jobs import Job
from rollmill.processes.supervision import ALL, Supervision
from rollmill.workers.protocol import End, Hold, send_to


class StopBarrier:
    """Decides after which iteration all replicas end: after `planned` iterations, or earlier if a stop is
    requested.
    """

    def __init__(self, workers: Supervision, planned: int) -> None:
        self.last = planned
        """The number of iterations after which the training ends."""
        self._workers, self._planned = workers, planned
        self._stopping = self._settled = False
        self._begun: dict[str, int] = {}

    def stop(self) -> None:
        """Asks all replicas to begin no further iterations. Repeated calls have no effect."""
        if not self._stopping:
            self._stopping = True
            send_to(self._workers, ALL, Hold())

    def hear(self, job: Job, begun: int) -> None:
        """Records a replica's answer to `Hold`: the number of iterations that it has begun."""
        self._begun[job.name] = begun

    def finished(self, job: Job) -> None:
        """Records that a replica finished its planned iterations before it was held."""
        self._begun[job.name] = self.last

    def settle(self, replicas: Set[str]) -> bool:
        """Sends the number of the last iteration to all replicas, once all of `replicas` have answered.

        Returns whether this call sent the number.
        """
        if not self._stopping or self._settled or not replicas <= self._begun.keys():
            return False
        self._settled = True
        self.last = max(self._begun[name] for name in replicas)
        send_to(self._workers, ALL, End(self.last))
        return True

    def inform(self, job: Job) -> None:
        """Sends the current state of the stop to a newly started replica, because it may replace a replica that
        had received this state.
        """
        self._begun.pop(job.name, None)
        if self._settled:
            send_to(self._workers, job, End(self.last))
        elif self._stopping:
            send_to(self._workers, job, Hold())

    def begin_again(self) -> None:
        """Discards all answers, because all replicas restart from an earlier iteration."""
        self.last, self._settled = self._planned, False
        self._begun.clear()
