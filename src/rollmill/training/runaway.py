"""Notices a temperature that grows without end, because the policy cannot reach the entropy that it is to keep."""

from collections.abc import Mapping
from typing import Any

TEMPERATURE = "losses/temperature"

MAX_GROWTH = 1000
"""Growth of the temperature beyond its initial value that is worth a line.

Trainings whose returns are in the tens of thousands reach temperatures of some hundreds in earnest.
"""


class TemperatureWatch:
    """Looks at the lines of the log; `initial` is the temperature that the training began with."""

    def __init__(self, initial: float) -> None:
        self._limit = MAX_GROWTH * initial
        self._latest = initial
        self._is_told = False

    def seen(self, row: Mapping[str, Any]) -> str | None:
        """Returns a note on a runaway temperature for the first log line that shows one."""
        before, now = self._latest, row.get(TEMPERATURE)
        if now is None:
            return None
        self._latest = now
        if self._is_told or not before < now or now < self._limit:
            return None
        self._is_told = True
        return (
            f"note: the temperature has grown to {now:.3g}: the policy does not reach its target entropy, and "
            "acts at random. Lower target_entropy, or set learn_temperature=False; docs/algorithms/sac.md"
        )
