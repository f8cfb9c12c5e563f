"""The code that trainings name: modules and clusters."""

from collections.abc import Iterable
from typing import NamedTuple

from rollmill.runs.trust import cluster_name
from rollmill.training.request import TrainingRequest


class NamedCode(NamedTuple):
    """The modules and clusters that requests name."""

    modules: frozenset[str]
    """Modules to import, of distribution policies and of environments."""
    clusters: frozenset[str]
    """Clusters, as names that are trusted."""


def named_by(requests: Iterable[TrainingRequest]) -> NamedCode:
    """Returns the code that requests name."""
    modules, clusters = set[str](), set[str]()
    for request in requests:
        modules |= {*request.imports, request.environment.partition(":")[2].rpartition(":")[0]}
        policy, cluster = (request.settings.get(name) for name in ("distribution", "cluster"))
        if isinstance(policy, str) and ":" in policy:
            modules.add(policy.partition(":")[0])
        if isinstance(cluster, str) and ":" in cluster:
            clusters.add(cluster_name(cluster))
    return NamedCode(frozenset(modules - {""}), frozenset(clusters))
