"""A note on trainings that are known to learn nothing at the defaults, before they start."""

from rollmill.dataflow import Graph

WITHOUT_A_SIGNAL = {
    "MountainCar-v0": "the reward is -1 until the goal is reached",
    "MountainCarContinuous-v0": "actions cost reward, and only the goal pays any",
}
"""Environments that random actions hardly ever solve, and the reason why nothing is learned before."""

ON_POLICY = ("ppo", "a3c", "impala")
"""Algorithms that explore by the noise of their policies alone."""


def note_on_known_failure(graph: Graph) -> str | None:
    """Returns a note if the algorithm is known to learn nothing of the environment. None otherwise."""
    algorithm = graph.settings["algorithm"]
    name = str(graph.settings["environment"]).rpartition(":")[2]
    if algorithm not in ON_POLICY or name not in WITHOUT_A_SIGNAL:
        return None
    return (
        f"note: {algorithm} is known to learn nothing of {name}, because {WITHOUT_A_SIGNAL[name]}, and random "
        "actions hardly ever reach it. hint: a reward that grows on the way, as a transform or an environment of "
        "your own"
    )
