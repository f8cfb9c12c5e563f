"""Tree searches that step a model of the environment: the tree, and the rules that select actions."""

from rollmill.algorithms.search.gumbel import gumbel_search
from rollmill.algorithms.search.puct import NO_NOISE, RootNoise, puct_search
from rollmill.algorithms.search.tree import EvaluatedPosition, Expansion, SearchResult

__all__ = [
    "NO_NOISE",
    "EvaluatedPosition",
    "Expansion",
    "RootNoise",
    "SearchResult",
    "gumbel_search",
    "puct_search",
]
