"""The table of a plan search: the outcome of each candidate, and the chosen candidate."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from rollmill.core.text import compact
from rollmill.plan_search.search.candidate import Candidate

Status: TypeAlias = Literal["chosen", "slower", "rejected", "skipped", "not reached"]


class MemoryEstimate(NamedTuple):
    """The predicted memory of a candidate, and the identity of its program."""

    memory: float | None
    """Predicted bytes on each GPU, or on the host without GPUs. None if unknown."""
    program: str | None = None
    """Identity of the compiled program, equal for candidates with the same program. None if unknown."""


class Measurement(NamedTuple):
    """The measured speed and memory of a short training run."""

    steps_per_second: float
    memory: float | None = None
    """Peak bytes on the fullest GPU, or on the host without GPUs."""
    stopped_early: bool = False
    """True if the run was stopped because another run is faster. Its throughput is then approximate."""


@dataclass(frozen=True)
class CandidateRow:
    """A candidate with its predictions, its measurements, its status, and a reason."""

    candidate: Candidate
    status: Status
    reason: str
    predicted_speed: float | None = None
    """Predicted environment steps per second."""
    measured_speed: float | None = None
    predicted_memory: float | None = None
    """Predicted memory in bytes."""
    measured_memory: float | None = None


@dataclass(frozen=True)
class PlanTable:
    """The result of a plan search: one row per candidate, of which at most one is chosen."""

    rows: tuple[CandidateRow, ...]
    seconds: float
    """Seconds that the search took."""

    @property
    def chosen(self) -> CandidateRow | None:
        """The row of the chosen candidate, or None if no candidate could be measured."""
        return next((row for row in self.rows if row.status == "chosen"), None)

    @property
    def is_complete(self) -> bool:
        """True if the budget sufficed for all candidates."""
        return all(row.status != "not reached" for row in self.rows)


def draw_table(table: PlanTable) -> str:
    """Formats the table of a plan search: measured candidates first, the fastest on top."""
    head = ("candidate", "steps/s", "predicted steps/s", "memory", "predicted memory", "status", "reason")
    ordered = sorted(table.rows, key=lambda row: (row.measured_speed is None, -(row.measured_speed or 0.0)))
    cells = [head, *(_cells(row) for row in ordered)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head) - 1)]
    return "\n".join(_align(line, widths) for line in cells)


def speed_text(steps_per_second: float | None) -> str:
    """Formats environment steps per second with three significant digits."""
    return "-" if steps_per_second is None else compact(steps_per_second)


def memory_text(count: int | float | None) -> str:
    """Formats a number of bytes with its unit."""
    if count is None:
        return "-"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _cells(row: CandidateRow) -> tuple[str, ...]:
    return (
        str(row.candidate),
        speed_text(row.measured_speed),
        speed_text(row.predicted_speed),
        memory_text(row.measured_memory),
        memory_text(row.predicted_memory),
        row.status,
        row.reason,
    )


def _align(line: tuple[str, ...], widths: list[int]) -> str:
    """Returns a line of the table. Figures are aligned to the right."""
    name, *figures, status, reason = line
    right = [text.rjust(width) for text, width in zip(figures, widths[1:], strict=False)]
    return "  ".join([name.ljust(widths[0]), *right, status.ljust(widths[5]), reason]).rstrip()
