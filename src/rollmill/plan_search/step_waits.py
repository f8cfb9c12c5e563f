"""Measures whether the steps of host environments compute or wait, for example for a simulator, a network or a
robot.
"""

import time
from pathlib import Path

import jax
import numpy as np
from gymnasium.vector.utils import batch_space

from rollmill.core.errors import RollmillError
from rollmill.core.types import HostVector
from rollmill.dataflow import Graph
from rollmill.envs.host import replace_illegal_actions

WARM_STEPS, MIN_STEPS = 3, 10
MAX_SECONDS = 1.0
"""Seconds for which steps are repeated after the first steps, unless `MIN_STEPS` steps take longer."""
SCHEDULING = Path("/proc/thread-self/schedstat")
"""File in which Linux reports on the scheduling of a thread. Its second number is the nanoseconds spent ready
without a core.
"""


def waiting_share(graph: Graph) -> float:
    """Measures the share of a step in which an environment waits instead of computing, from 0 to 1.

    One environment takes random steps in this process. The processor time of all threads counts as computing, and
    time spent waiting for a free core does not count. Returns 0 for JAX environments, and for environments that
    fail, since training will report the failure.
    """
    if graph.host is None:
        return 0.0
    try:
        vector = graph.host([0], seed=0)
    except RollmillError:
        return 0.0
    try:
        return _measure(graph, vector)
    except RollmillError:
        return 0.0
    finally:
        vector.close()


def _measure(graph: Graph, vector: HostVector) -> float:
    rng, actions = np.random.default_rng(0), batch_space(graph.action_space, 1)
    actions.seed(0)
    now, steps, ends_at = vector.reset(), 0, float("inf")
    began = _Clocks()
    while steps < MIN_STEPS or time.perf_counter() < ends_at:
        if steps == WARM_STEPS:
            began, ends_at = _Clocks(), time.perf_counter() + MAX_SECONDS
        drawn = replace_illegal_actions(graph.action_space, actions.sample(), now.info.get("action_mask"), rng)
        now = vector.step(jax.tree.map(np.asarray, drawn))
        steps += 1
    return began.waited_since()


class _Clocks:
    """The clocks of this moment."""

    def __init__(self) -> None:
        self._wall, self._computing, self._without_core = time.perf_counter(), time.process_time(), _without_core()

    def waited_since(self) -> float:
        """Returns the share of the time since this object was created in which the process neither computed nor
        lacked a core, from 0 to 1.
        """
        served = time.perf_counter() - self._wall - (_without_core() - self._without_core)
        computing = time.process_time() - self._computing
        return min(max(1 - computing / max(served, 1e-9), 0.0), 1.0)


def _without_core() -> float:
    """Returns the seconds that this thread was ready and had no core, or 0 where the system does not tell."""
    try:
        return int(SCHEDULING.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
