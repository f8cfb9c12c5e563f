"""Rejects Gymnasium wrappers that scale by running statistics, because each copy would have its own statistics."""

from typing import Any

from rollmill.core.errors import UsageError

SHARED = "whose statistics are shared by all environments and saved in checkpoints"
REMEDIES = {
    "NormalizeObservation": f"normalize_observations=True (--normalize-observations), {SHARED}",
    "NormalizeReward": f"normalize_rewards=True (--normalize-rewards), {SHARED}, or use reward-scale",
}
"""Settings to use instead of each wrapper, by the name of its class."""

EFFECTS = {
    "NormalizeObservation": "an evaluation would start without statistics",
    "NormalizeReward": "the recorded returns would be sums of scaled rewards",
}


def check_wrappers(name: str, env: Any) -> None:
    """Checks that no wrapper of an environment, or of a vector environment, keeps running statistics.

    Follows `.env` from the outermost wrapper inwards. Raises a `UsageError` if it finds a `NormalizeObservation`
    or a `NormalizeReward` that still updates its statistics.
    """
    layer, seen = env, set()
    while layer is not None and id(layer) not in seen:
        seen.add(id(layer))
        for kind in type(layer).__mro__:
            if kind.__name__ in REMEDIES and getattr(layer, "update_running_mean", True):
                raise _refusal_of(name, kind.__name__)
        inner = vars(layer) if hasattr(layer, "__dict__") else {}
        # for a SyncVectorEnv, checks the first environment
        layer = inner.get("env") or next(iter(inner.get("envs") or ()), None)


def _refusal_of(name: str, wrapper: str) -> UsageError:
    return UsageError(
        f"{name} contains Gymnasium's {wrapper}: each copy would scale by statistics of its own, which "
        f"checkpoints do not contain, and {EFFECTS[wrapper]}. hint: leave the wrapper out, and set "
        f"{REMEDIES[wrapper]}. A wrapper with fixed statistics (update_running_mean=False) is accepted."
    )
