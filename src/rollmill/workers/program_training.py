"""Runs training as one compiled program in this process."""

from collections.abc import Callable, Iterator, Sequence

from rollmill.core.folder import Folder
from rollmill.dataflow import Graph, State, first_learning_iteration
from rollmill.programs.compiled import CompiledProgram
from rollmill.programs.dispatch import TARGET_SECONDS, Pauses, dispatch_ahead
from rollmill.programs.faults.locate import is_finite, stop_at_fault
from rollmill.workers.reports import Durations, MetricsRows, Report, Saved, StartedUp


class ProgramTraining:
    """`Training` by one compiled program, from `state` after the `first` iterations on.

    The state is available after each iteration whose number is a multiple of one of the `strides`. A row of
    metrics covers `span` iterations, whose metrics may be summed. A non-finite number ends training, and the
    state from which its iteration can be replayed is written to the folder `fault`. If `fault` is None, training
    continues. Training ends after `until` iterations, by default after all.
    """

    def __init__(
        self,
        graph: Graph,
        program: CompiledProgram,
        state: State,
        *,
        first: int,
        strides: Sequence[int],
        pauses: Pauses | None,
        span: int,
        fault: Folder | None,
        until: int | None = None,
    ) -> None:
        self._graph, self._program, self._state = graph, program, state
        self._first, self._span, self._fault = first, span, fault
        self._strides, self._pauses = strides, pauses
        self._until = graph.loops.iterations if until is None else until
        self._snapshot_requested = False
        self.report_seconds = TARGET_SECONDS
        """Approximate time between two reports, in seconds. Set it before `run`."""

    def run(self, stopping: Callable[[], bool]) -> Iterator[Report]:
        """Runs the training and yields reports until it ends. The last report carries the last state."""
        yield StartedUp(Durations(self._program.compile_seconds, 0.0))
        keeps = lambda iteration: self._may_want(iteration) or stopping()
        windows = dispatch_ahead(
            self._program,
            self._state,
            first=self._first,
            until=self._until,
            strides=self._strides,
            pauses=self._pauses,
            span=self._span,
            slower_from=first_learning_iteration(self._graph),
            keeps=keeps,
            window_seconds=self.report_seconds,
        )
        for window in windows:
            yield MetricsRows(window.first, window.metrics, window.counts)
            if self._fault is not None:
                if self._program.loses_state and not all(map(is_finite, window.metrics)):
                    # drops the window that is computed ahead, because the search for the fault needs the memory
                    windows.close()
                stop_at_fault(self._graph, self._program, window, self._fault)
            if not window.kept:
                continue  # the state of this window was not kept, so the next kept state is used
            ends = stopping()
            if ends or self._snapshot_requested:
                self._snapshot_requested = False
                yield Saved(window.last, window.after)
            if ends:
                return

    def _may_want(self, iteration: int) -> bool:
        """Returns whether the state after this iteration is or may be requested."""
        ends = [*self._strides, *([self._pauses.every] if self._pauses else [])]
        return self._program.sums_iterations or self._snapshot_requested or any(iteration % n == 0 for n in ends)

    def request_snapshot(self) -> None:
        """Requests the state after the current window of iterations, or after the next window whose state
        is kept.
        """
        self._snapshot_requested = True

    @property
    def waited_for(self) -> str:
        """Workers that delay the end of the run. Always empty, because a single program has no workers."""
        return ""

    @property
    def unreachable_workers(self) -> str:
        """Names of the workers on unreachable hosts. Empty, because a single program has no workers."""
        return ""
