"""Tree searches that step a model of the environment: the tree, and the rules that select actions."""

from rollmill.algorithms.search.gumbel import gumbel_search as gumbel_search
from rollmill.algorithms.search.puct import (
    NO_NOISE as NO_NOISE,
    RootNoise as RootNoise,
    puct_search as puct_search,
)
from rollmill.algorithms.search.tree import (
    EvaluatedPosition as EvaluatedPosition,
    Expansion as Expansion,
    SearchResult as SearchResult,
)
