"""The policy lag: the age, in versions, of the weights that a batch was collected with."""

from collections.abc import Iterable


class Lag:
    """Collects lags between two rows of metrics."""

    def __init__(self) -> None:
        self._lags: list[int] = []

    def add(self, *lags: int) -> None:
        """Notes the lag of a package."""
        self._lags.extend(lags)

    def take(self) -> dict[str, float]:
        """Mean and maximum since the last time."""
        lags, self._lags = self._lags, []
        return metrics_of(lags)


def metrics_of(lags: Iterable[int]) -> dict[str, float]:
    """Mean and maximum of the lags, as metrics."""
    known = list(lags) or [0]
    return {"policy_lag/mean": sum(known) / len(known), "policy_lag/max": float(max(known))}
