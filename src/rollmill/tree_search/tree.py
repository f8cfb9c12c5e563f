"""Monte Carlo tree search from ONE position. `vmap` searches from many positions in parallel.

Usually, a simulation walks from the root to a leaf and back, one node at a time. This implementation avoids the
walk:

- A simulation changes only the statistics of the nodes on one path. Each node stores its ancestors, so that
  several levels of a path are updated at once, as vectors.
- A node's choice depends only on its statistics. Each node therefore stores its *frontier*: the node and action at
  which a walk from it would end. The root's frontier is the next action to try. Only nodes on the last path
  recompute their frontiers.

No loop's length depends on the data of one tree, so that `vmap` needs no copies of trees.

The results equal those of mctx (Babuschkin et al., "The DeepMind JAX Ecosystem", 2020), except that terminal nodes
and nodes at the maximum depth are evaluated again instead of expanded.

Shape letters: `N` nodes, which are the simulations and the root, `D` levels from the root to the greatest depth,
`L` levels that are updated at once, `A` actions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

ROOT = 0
NO_NODE = -1

LEVELS_AT_ONCE = 1
"""Number of levels of a path that are updated at once on a CPU. On a GPU, where loops cost more, it is all
levels."""


Vector = Float[Array, "..."]


class EvaluatedPosition(NamedTuple):
    """A position with the network's logits and value."""

    logits: Float[Array, " A"]
    """Finite logits of the prior, which are very low for illegal actions."""
    value: Float[Array, ""]
    """Estimated value, for the player to move."""
    state: PyTree[Array]
    """State of the model at the position, from which it predicts the results of actions."""


class Expansion(NamedTuple):
    """Result of taking an action in the model of a tree search."""

    reward: Float[Array, ""]
    discount: Float[Array, ""]
    """Discount of all later rewards: negative if the turn passes to the opponent, and 0 if the episode ends."""
    position: EvaluatedPosition


class Edges(NamedTuple):
    """Statistics of the actions of one node of a search tree, or of several nodes with leading axes."""

    logits: Float[Array, "... A"]
    prior: Float[Array, "... A"]
    """Probability of each action under the network, the softmax of `logits`."""
    visits: Float[Array, "... A"]
    value: Float[Array, "... A"]
    """Mean return after each action, or 0 for an action without visits."""


class Statistics(NamedTuple):
    """Statistics of one node of a search tree, or of several nodes with leading axes."""

    edges: Edges
    prior_value: Float[Array, "..."]
    """Value estimated by the model."""
    value: Float[Array, "..."]
    """Value estimated by the search: the mean of returns."""


class SearchResult(NamedTuple):
    """Result of a tree search: the statistics of the root."""

    choice: Int[Array, ""]
    """Index of the action that the search chose."""
    action_weights: Float[Array, " A"]
    """Improved policy: probabilities of all actions."""
    value: Float[Array, ""]
    """Value of the root, for the player to move."""


Rule = Callable[[Statistics], Int[Array, "..."]]
"""A rule that chooses an action for each node from its statistics."""

Model = Callable[[Int[Array, ""], PyTree[Array]], Expansion]
"""A model of the environment, which steps a state by the action with an index and evaluates the next state."""


class Tree(NamedTuple):
    """A search tree. Adding a node changes `children`, `statistics` and `frontier` of the nodes above it."""

    reward: Float[Array, " N"]
    """Reward of the action that leads to each node."""
    discount: Float[Array, " N"]
    choice: Int[Array, " N"]
    """Index of the action that leads to each node."""
    depth: Int[Array, " N"]
    lineage: Int[Array, "N D"]
    """Each node, its parent, and so on up to the root, followed by `NO_NODE`."""
    state: PyTree[Array]
    """States of the model, `[N, ...]` each."""
    children: Int[Array, "N A"]
    """The node after each action, or `NO_NODE`."""
    statistics: Statistics
    frontier: Int[Array, " N"]
    """End of a walk from each node: `node * (A + 1) + action` for an action that has not been tried yet. With
    `action = A`, the walk ends in the node itself."""


class Below(NamedTuple):
    """The most recently updated node of a path in a search tree. The nodes above it are updated next."""

    node: Int[Array, ""]
    returned: Float[Array, ""]
    """Return received from this node on."""
    value: Float[Array, ""]
    """Mean of the node's returns."""
    frontier: Int[Array, ""]


class Levels(NamedTuple):
    """Some nodes of a path in a search tree, from the lowest up, with the steps between them."""

    node: Int[Array, " L"]
    """Node of each level, or the root if there is none."""
    child: Int[Array, " L"]
    """Next lower node of the path, or `NO_NODE` for the leaf."""
    is_leaf: Bool[Array, " L"]
    choice: Int[Array, " L"]
    reward: Float[Array, " L"]
    discount: Float[Array, " L"]


def best_action(scores: Float[Array, "... A"]) -> Int[Array, "..."]:
    """Returns the index of the action with the highest score. If several are equal, it is the first."""
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def run_search(
    root: EvaluatedPosition, model: Model, *, root_rule: Rule, rule: Rule, num_simulations: int, max_depth: int
) -> Statistics:
    """Runs a tree search from a position, and returns the root's statistics.

    The logits of the root include noise, if any, and are very low for illegal actions. The model steps and
    evaluates copies of the position. In each simulation, `root_rule` chooses the action at the root, and `rule`
    chooses the actions at all other nodes, up to `max_depth`.
    """
    tree = _first_tree(root, num_simulations + 1, min(max_depth, num_simulations) + 1)
    choice = root_rule(_at(tree.statistics, jnp.int32(ROOT)))
    tree = tree._replace(frontier=tree.frontier.at[ROOT].set(choice))

    def simulate(node: Any, tree: Tree) -> Tree:
        tree, leaf, value = _expand(tree, jnp.int32(node), model)
        return _back_up(tree, leaf, value, root_rule, rule)

    return _at(jax.lax.fori_loop(1, num_simulations + 1, simulate, tree).statistics, jnp.int32(ROOT))


def _first_tree(root: EvaluatedPosition, num_nodes: int, num_levels: int) -> Tree:
    def nodes(leaf: Array) -> Array:
        return jnp.zeros((num_nodes, *leaf.shape), leaf.dtype).at[ROOT].set(leaf)

    lineage = jnp.full(num_levels, NO_NODE, jnp.int32).at[0].set(ROOT)
    return Tree(
        reward=jnp.zeros(num_nodes),
        discount=jnp.ones(num_nodes),
        choice=jnp.zeros(num_nodes, jnp.int32),
        depth=jnp.zeros(num_nodes, jnp.int32),
        lineage=nodes(lineage),
        state=jax.tree.map(nodes, root.state),
        children=jnp.full((num_nodes, root.logits.size), NO_NODE, jnp.int32),
        statistics=jax.tree.map(nodes, _first_statistics(root)._replace(value=root.value)),
        frontier=jnp.zeros(num_nodes, jnp.int32),
    )


def _first_statistics(position: EvaluatedPosition) -> Statistics:
    """Returns the statistics of a node without visits."""
    zeros = jnp.zeros_like(position.logits)
    edges = Edges(position.logits, jax.nn.softmax(position.logits), visits=zeros, value=zeros)
    return Statistics(edges, prior_value=position.value, value=jnp.zeros_like(position.value))


# --- one simulation -----------------------------------------------------------------------------------


def _expand(tree: Tree, node: Int[Array, ""], model: Model) -> tuple[Tree, Int[Array, ""], Float[Array, ""]]:
    """Adds a node at the root's frontier. Returns the tree, the end of the simulation's path, and the value there.

    If the walk ends in a node that is never expanded, the path ends there, and no action leads to the added node.
    """
    num_nodes, num_actions = tree.children.shape
    parent, choice = jnp.divmod(tree.frontier[ROOT], num_actions + 1)
    expands = choice < num_actions
    choice = jnp.minimum(choice, num_actions - 1)
    reward, discount, position = model(choice, jax.tree.map(lambda leaf: leaf[parent], tree.state))
    lineage = jnp.append(node, tree.lineage[parent, :-1])
    depth = tree.depth[parent] + 1
    set_row = lambda leaf, row: jax.lax.dynamic_update_index_in_dim(leaf, row, node, axis=0)
    # If nothing is expanded, the index lies beyond the last node, and nothing is written.
    children = tree.children.at[jnp.where(expands, parent, num_nodes), choice].set(node, mode="drop")
    tree = Tree(
        *map(set_row, tree[:5], (reward, discount, choice, depth, lineage)),
        state=jax.tree.map(set_row, tree.state, position.state),
        children=children,
        statistics=jax.tree.map(set_row, tree.statistics, _first_statistics(position)),
        frontier=tree.frontier,
    )
    leaf = jnp.where(expands, node, parent)
    return tree, leaf, tree.statistics.prior_value[leaf]


def _back_up(tree: Tree, leaf: Int[Array, ""], value: Float[Array, ""], root_rule: Rule, rule: Rule) -> Tree:
    """Returns the tree with updated statistics and frontiers of all nodes on the path to a leaf."""
    lineage = tree.lineage[leaf]
    num_levels = lineage.size
    at_once = LEVELS_AT_ONCE if jax.default_backend() == "cpu" else num_levels
    blocks = -(-num_levels // at_once)
    lineage = jnp.pad(lineage, (0, blocks * at_once - num_levels), constant_values=NO_NODE)
    below = Below(jnp.int32(NO_NODE), returned=value, value=value, frontier=jnp.int32(NO_NODE))
    depth = tree.depth[leaf]
    update = partial(_with_levels_updated, root_rule=root_rule, rule=rule)
    if blocks == 1:
        return update(tree, lineage, below, depth)[0]

    def one_block(block: Any, state: tuple[Tree, Below]) -> tuple[Tree, Below]:
        (tree, below), first = state, block * at_once
        path = jax.lax.dynamic_slice_in_dim(lineage, first, at_once)
        return update(tree, path, below, depth - first)

    needed = _largest(depth) // at_once + 1
    return jax.lax.fori_loop(0, needed, one_block, (tree, below))[0]


def _with_levels_updated(
    tree: Tree, path: Int[Array, " L"], below: Below, root_level: Int[Array, ""], *, root_rule: Rule, rule: Rule
) -> tuple[Tree, Below]:
    """Updates nodes of a path from the lowest level up, and returns the tree and the highest updated node.

    The root is the node at `root_level`, if there is one.
    """
    levels = _levels_of(tree, path, below)
    # The return from each node is `sum + factor * below.returned`, combining all steps below it.
    sums, factors = jax.lax.associative_scan(_then, (levels.reward, levels.discount))
    returned = sums + factors * below.returned
    statistics = _with_returns(_at(tree.statistics, levels.node), levels, returned, below)
    roots_choice = root_rule(_at(statistics, jnp.clip(root_level, 0, path.size - 1)))
    choice = jnp.where(path == ROOT, roots_choice, rule(statistics))
    frontier = _frontiers(tree, levels, choice, below)
    tree = _write_path(tree, path, statistics, frontier)
    return tree, Below(path[-1], returned[-1], statistics.value[-1], frontier[-1])


def _levels_of(tree: Tree, path: Int[Array, " L"], below: Below) -> Levels:
    child = jnp.append(below.node, path[:-1])
    is_leaf, at = child == NO_NODE, jnp.maximum(child, ROOT)
    return Levels(
        node=jnp.maximum(path, ROOT),
        child=child,
        is_leaf=is_leaf,
        choice=tree.choice[at],
        reward=jnp.where(is_leaf, 0.0, tree.reward[at]),
        discount=jnp.where(is_leaf, 1.0, tree.discount[at]),
    )


def _with_returns(before: Statistics, levels: Levels, returned: Float[Array, " L"], below: Below) -> Statistics:
    """Returns the statistics of a path's nodes after one more return."""
    visits = 1.0 + jnp.sum(before.edges.visits, axis=-1)
    mean = before.value + (returned - before.value) / (visits + 1.0)
    value = jnp.where(levels.is_leaf, returned, mean)
    action_value = levels.reward + levels.discount * jnp.append(below.value, value[:-1])
    num_actions = before.edges.visits.shape[-1]
    taken = jax.nn.one_hot(jnp.where(levels.is_leaf, NO_NODE, levels.choice), num_actions, dtype=bool)
    edges = before.edges._replace(
        visits=before.edges.visits + taken.astype(jnp.float32),
        value=jnp.where(taken, action_value[:, None], before.edges.value),
    )
    return before._replace(edges=edges, value=value)


def _frontiers(tree: Tree, levels: Levels, choice: Int[Array, " L"], below: Below) -> Int[Array, " L"]:
    """Returns the frontiers of a path's nodes, which now choose the actions in `choice`."""
    at, num_actions = levels.node, tree.children.shape[1]
    chosen = tree.children[at, choice]
    ends = (tree.discount[at] == 0) | (tree.depth[at] == tree.lineage.shape[1] - 1)
    here = at * (num_actions + 1) + jnp.where(ends, num_actions, choice)
    elsewhere = jnp.where(chosen == NO_NODE, here, tree.frontier[jnp.maximum(chosen, ROOT)])
    # A walk follows the path down to the first node that now chooses another action.
    follows = (chosen != NO_NODE) & (chosen == levels.child)
    turn = jax.lax.cummax(jnp.where(follows, NO_NODE, jnp.arange(at.size)))
    return jnp.where(turn == NO_NODE, below.frontier, elsewhere[jnp.maximum(turn, 0)])


def _write_path(tree: Tree, path: Int[Array, " L"], statistics: Statistics, frontier: Int[Array, " L"]) -> Tree:
    """Returns the tree with these statistics and frontiers at the nodes of a path."""
    # `NO_NODE` becomes an index beyond the last node, so that nothing is written.
    row = jnp.where(path == NO_NODE, tree.children.shape[0], path)
    put = lambda leaf, values: leaf.at[row].set(values, mode="drop")
    old, new = tree.statistics, statistics
    edges = old.edges._replace(
        visits=put(old.edges.visits, new.edges.visits), value=put(old.edges.value, new.edges.value)
    )
    return tree._replace(
        statistics=old._replace(edges=edges, value=put(old.value, new.value)),
        frontier=put(tree.frontier, frontier),
    )


def _then(lower: tuple[Vector, Vector], higher: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
    """Combines the reward and the discount of some steps with those of the steps above them."""
    return higher[0] + higher[1] * lower[0], higher[1] * lower[1]


def _at(statistics: Statistics, node: Int[Array, "..."]) -> Statistics:
    return jax.tree.map(lambda leaf: leaf[node], statistics)


@jax.custom_batching.custom_vmap
def _largest(number: Int[Array, ""]) -> Int[Array, ""]:
    """Returns the maximum over all trees searched side by side, so that one loop length serves all."""
    return number


@_largest.def_vmap
def _largest_of_batch(size: int, batched: list[bool], number: Int[Array, " batch"]) -> tuple[Int[Array, ""], bool]:
    return _largest(jnp.max(number)), False
