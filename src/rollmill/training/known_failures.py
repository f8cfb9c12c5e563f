"""Notes for users on runs that are likely to learn nothing."""

from collections.abc import Mapping
from typing import Any

from rollmill.dataflow import Graph

WITHOUT_A_SIGNAL = {
    "MountainCar-v0": "the reward is -1 until the goal is reached",
    "MountainCarContinuous-v0": "actions cost reward, and only the goal pays any",
}
"""Environments that random actions hardly ever solve, and the reason why an algorithm then learns nothing."""

ON_POLICY = ("ppo", "a3c", "a2c", "impala")
"""Algorithms that explore only through the noise of their policies."""

REMEDIES = {
    "MountainCar-v0": "ppo --recipe mountain-car, which normalises observations and rewards",
    "MountainCarContinuous-v0": "ppo --rnd-coef 1, which rewards rare observations",
}
"""Commands that learn these environments, for hints."""

FAILING = {"MountainCar-v0": (*ON_POLICY, "dqn"), "MountainCarContinuous-v0": (*ON_POLICY, "sac")}
"""Algorithms that learned nothing with their default settings (benchmarks/defaults.py)."""

UNSCALED = {"a2c": "Pendulum-v1"}
"""Algorithms whose default settings do not suit rewards in the thousands, as in this environment."""


HOVERING, FAR_SIGHTED = "LunarLander-v3", 0.995
"""An environment in which PPO learns to hover instead of landing, unless its discount is at least this."""


def note_on_known_failure(graph: Graph) -> str | None:
    """Returns a note for the user if the algorithm is known to fail in this environment, and None otherwise."""
    algorithm = graph.settings["algorithm"]
    name = str(graph.settings["environment"]).rpartition(":")[2]
    if (algorithm, name) == ("ppo", HOVERING) and _is_short_sighted(graph.settings["config"]["gamma"]):
        return (
            f"note: ppo often learns to hover on {name} instead of landing, because with its discount a crash "
            "costs more than a late landing pays. hint: use --recipe lunar-lander, or --gamma 0.999 --gae-lambda "
            "0.98 and a million steps"
        )
    if UNSCALED.get(algorithm) == name and not graph.settings["config"]["normalize_values"]:
        return (
            f"note: {algorithm} is known to learn nothing on {name} with its classical settings, because values "
            "in the thousands dominate the clipped gradients and leave almost nothing for the policy. hint: "
            "--normalize-values --norm-adv, or a3c, which has both"
        )
    if algorithm not in FAILING.get(name, ()) or _explores(name, graph.settings["config"]):
        return None
    return (
        f"note: {algorithm} is known to learn nothing on {name}, because {WITHOUT_A_SIGNAL[name]}, and random "
        f"actions hardly ever reach it. hint: use {REMEDIES[name]}; --clone FILE, a recording of a heuristic; or "
        "a reward that grows on the way to the goal, by a transform or in your own environment"
    )


def _explores(name: str, config: Mapping[str, Any]) -> bool:
    """Returns whether options of PPO let it find the goal."""
    is_normalised = config.get("normalize_observations") and config.get("normalize_rewards")
    return bool(config.get("rnd_coef") or (is_normalised and name == "MountainCar-v0"))


def _is_short_sighted(gamma: Any) -> bool:
    """False for a schedule, which may end at any discount."""
    return isinstance(gamma, float) and gamma < FAR_SIGHTED


TEMPERATURE = "losses/temperature"

MAX_GROWTH = 1000
"""Growth of the temperature, relative to its initial value, from which a note is shown. Runs with returns in the
tens of thousands can reach temperatures of some hundreds legitimately."""


class TemperatureWatch:
    """Watches the temperature of an algorithm, which keeps growing if the policy cannot reach its target entropy.

    `initial` is the temperature at the start.
    """

    def __init__(self, initial: float) -> None:
        self._limit = MAX_GROWTH * initial
        self._latest = initial
        self._is_told = False

    def seen(self, row: Mapping[str, Any]) -> str | None:
        """Returns a note for the user at the first log line in which the temperature has grown far too large, and
        None otherwise.
        """
        before, now = self._latest, row.get(TEMPERATURE)
        if now is None:
            return None
        self._latest = now
        if self._is_told or not before < now or now < self._limit:
            return None
        self._is_told = True
        return (
            f"note: the temperature has grown to {now:.3g}: the policy does not reach its target entropy and "
            "acts randomly. hint: lower target_entropy, or set learn_temperature=False (docs/algorithms/sac.md)"
        )
