"""Monte Carlo tree search from ONE position; `vmap` searches from many positions side by side.

Textbooks walk down from the root to a leaf and back up in loops whose length depends on the tree. Under `vmap`
such loops last as long as the deepest tree needs, and each pass copies every tree. Here a simulation has no inner
loop:

- A simulation changes the statistics of the nodes on one path only. Each node stores this path, so that all of
  them are updated at once, as vectors over depth.
- A node's choice depends on its statistics alone. So each node stores its *frontier*: where a walk from it would
  end. The root's frontier is the next action to try; only nodes on the last path have to compute theirs again.

Numbers are those of a search that walks (mctx; Babuschkin et al., "The DeepMind JAX Ecosystem", 2020), but that
nodes where the episode terminated, and those at the greatest depth, are evaluated again instead of expanded.

Shape letters: `N` nodes, that is simulations and the root, `D` levels from the root to the greatest depth,
`A` actions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

ROOT = 0
NO_NODE = -1

Vector = Float[Array, "..."]


class EvaluatedPosition(NamedTuple):
    """A position that has been evaluated."""

    logits: Float[Array, " A"]
    """Prior of the actions; finite, and very low for illegal ones."""
    value: Float[Array, ""]
    """Estimated value, for the player to move."""
    state: PyTree[Array]
    """State of the model."""


class Expansion(NamedTuple):
    """An action's outcome in the model."""

    reward: Float[Array, ""]
    discount: Float[Array, ""]
    """Factor of all that comes after, negative where the turn passes to the opponent; 0 where the episode ends."""
    position: EvaluatedPosition


class Edges(NamedTuple):
    """Statistics of a node's actions, or of several nodes' with leading axes."""

    logits: Float[Array, "... A"]
    visits: Float[Array, "... A"]
    value: Float[Array, "... A"]
    """Mean return after each action; 0 without visits."""
    node_prior_value: Float[Array, "..."]
    """The node's value as the model's network estimates it."""
    node_value: Float[Array, "..."]
    """The node's value as the search estimates it."""


class SearchResult(NamedTuple):
    """The outcome of a search."""

    choice: Int[Array, ""]
    """Index of the chosen action."""
    action_weights: Float[Array, " A"]
    """Improved policy: probabilities of all actions."""
    value: Float[Array, ""]
    """Value of the root, for the player to move."""


Rule = Callable[[Edges], Int[Array, "..."]]
"""A rule that chooses an action of each node by the node's statistics."""

Model = Callable[[Int[Array, ""], PyTree[Array]], Expansion]
"""A model of the environment, which steps a state by an action's index and evaluates the next one."""


class Nodes(NamedTuple):
    """What stays as it was when a node was added."""

    reward: Float[Array, " N"]
    """Reward of the action that leads to the node."""
    discount: Float[Array, " N"]
    depth: Int[Array, " N"]
    path: Int[Array, "N D"]
    """The nodes from the root to this one; `NO_NODE` beyond it."""
    position: PyTree[Array]
    """Positions, `[N, ...]` each."""


class Tree(NamedTuple):
    """A search tree."""

    nodes: Nodes
    children: Int[Array, "N A"]
    """The node after each action, or `NO_NODE`."""
    visits: Float[Array, " N"]
    value: Float[Array, " N"]
    """Mean of the returns from each node."""
    frontier: Int[Array, " N"]
    """Where a walk from each node ends: `node * (A + 1) + action` of an action that was not tried yet; with
    `action = A` the walk ends in the node itself."""


def run_search(
    root: EvaluatedPosition, model: Model, *, root_rule: Rule, rule: Rule, num_simulations: int, max_depth: int
) -> Edges:
    """Searches from a position.

    Args:
        root: the position, with noise in its logits if any is wanted, and illegal actions very low.
        model: steps and evaluates copies of the position.
        root_rule: chooses the root's action in each simulation.
        rule: chooses in all other nodes.
        num_simulations: number of the model's steps.
        max_depth: greatest depth of a node, at least 1.

    Returns:
        The root's statistics.
    """
    tree = _first_tree(root, num_simulations + 1, min(max_depth, num_simulations) + 1)
    choice = root_rule(_edges(tree, jnp.int32(ROOT)))
    tree = tree._replace(frontier=tree.frontier.at[ROOT].set(choice))

    def simulate(node: Any, tree: Tree) -> Tree:
        tree, path, value = _expanded(tree, jnp.int32(node), model)
        tree = _backed_up(tree, path, value)
        return _with_frontiers(tree, path, root_rule, rule)

    return _edges(jax.lax.fori_loop(1, num_simulations + 1, simulate, tree), jnp.int32(ROOT))


def _first_tree(root: EvaluatedPosition, num_nodes: int, num_levels: int) -> Tree:
    def empty(leaf: Array) -> Array:
        return jnp.zeros((num_nodes, *leaf.shape), leaf.dtype).at[ROOT].set(leaf)

    nodes = Nodes(
        reward=jnp.zeros(num_nodes),
        discount=jnp.ones(num_nodes),
        depth=jnp.zeros(num_nodes, jnp.int32),
        path=jnp.full((num_nodes, num_levels), NO_NODE, jnp.int32).at[ROOT, 0].set(ROOT),
        position=jax.tree.map(empty, root),
    )
    return Tree(
        nodes,
        children=jnp.full((num_nodes, root.logits.size), NO_NODE, jnp.int32),
        visits=jnp.zeros(num_nodes).at[ROOT].set(1.0),
        value=jnp.zeros(num_nodes).at[ROOT].set(root.value),
        frontier=jnp.zeros(num_nodes, jnp.int32),
    )


# --- one simulation -----------------------------------------------------------------------------------


def _expanded(tree: Tree, node: Int[Array, ""], model: Model) -> tuple[Tree, Int[Array, " D"], Float[Array, ""]]:
    """The tree with a node at the root's frontier; the path to it, and its value.

    Where the walk ends in a node that is never expanded, the path leads to that one, and nothing leads to the
    node that was added.
    """
    nodes, num_actions = tree.nodes, tree.children.shape[1]
    parent, choice = jnp.divmod(tree.frontier[ROOT], num_actions + 1)
    expands = choice < num_actions
    above: EvaluatedPosition = jax.tree.map(lambda leaf: leaf[parent], nodes.position)
    reward, discount, position = model(jnp.minimum(choice, num_actions - 1), above.state)
    depth = nodes.depth[parent] + 1
    path = nodes.path[parent]
    path = jnp.where(expands & (jnp.arange(path.size) == depth), node, path)
    added = Nodes(reward, discount, depth, path, position)
    nodes = jax.tree.map(lambda leaf, row: leaf.at[node].set(row), nodes, added)
    row = jnp.where(expands, parent, tree.children.shape[0])  # beyond the last row nothing is written
    children = tree.children.at[row, choice].set(node, mode="drop")
    value = jnp.where(expands, position.value, above.value)
    return tree._replace(nodes=nodes, children=children), path, value


def _backed_up(tree: Tree, path: Int[Array, " D"], value: Float[Array, ""]) -> Tree:
    """The tree with the means of the path's nodes updated by the return from each of them."""
    nodes = tree.nodes
    below = (path != NO_NODE) & (jnp.arange(path.size) > 0)
    at = jnp.maximum(path, ROOT)
    reward = jnp.where(below, nodes.reward[at], 0.0)
    discount = jnp.where(below, nodes.discount[at], 1.0)
    # The return from a node is `reward + discount * value`, of all steps below it taken together.
    reward, discount = jax.lax.associative_scan(_after, (reward, discount), reverse=True)
    returns = jnp.append(reward[1:], 0.0) + jnp.append(discount[1:], 1.0) * value
    on_path, own_return = path[nodes.depth] == jnp.arange(nodes.depth.size), returns[nodes.depth]
    visits = tree.visits + on_path.astype(jnp.float32)
    step = jnp.where(on_path, (own_return - tree.value) / jnp.maximum(visits, 1.0), 0.0)
    return tree._replace(visits=visits, value=tree.value + step)


def _after(deeper: tuple[Vector, Vector], higher: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
    """Reward and discount of steps higher up and of those below them, taken together."""
    return higher[0] + higher[1] * deeper[0], higher[1] * deeper[1]


def _with_frontiers(tree: Tree, path: Int[Array, " D"], root_rule: Rule, rule: Rule) -> Tree:
    """The tree with the frontiers of the path's nodes; those of other nodes are as they were."""
    nodes, num_actions = tree.nodes, tree.children.shape[1]
    level, at = jnp.arange(path.size), jnp.maximum(path, ROOT)
    edges = _edges(tree, at)
    choice = jnp.where(level == 0, root_rule(jax.tree.map(lambda leaf: leaf[0], edges)), rule(edges))
    child = jnp.take_along_axis(tree.children[at], choice[:, None], axis=1)[:, 0]
    ends = _never_expanded(nodes)[at]
    here = at * (num_actions + 1) + jnp.where(ends, num_actions, choice)
    elsewhere = jnp.where(child == NO_NODE, here, tree.frontier[jnp.maximum(child, ROOT)])
    # A walk follows the path down to the first node that now chooses another action.
    follows = (child != NO_NODE) & (child == jnp.append(path[1:], NO_NODE))
    leaves = jax.lax.cummin(jnp.where(follows, path.size - 1, level), reverse=True)
    frontier = elsewhere[leaves]
    on_path = path[nodes.depth] == jnp.arange(nodes.depth.size)
    return tree._replace(frontier=jnp.where(on_path, frontier[nodes.depth], tree.frontier))


def _never_expanded(nodes: Nodes) -> Bool[Array, " N"]:
    return (nodes.discount == 0) | (nodes.depth == nodes.path.shape[1] - 1)


def _edges(tree: Tree, at: Int[Array, "..."]) -> Edges:
    """Statistics of nodes, by the statistics of the nodes after their actions."""
    nodes, children = tree.nodes, tree.children[at]
    visited, child = children != NO_NODE, jnp.maximum(children, ROOT)
    value = nodes.reward[child] + nodes.discount[child] * tree.value[child]
    position: EvaluatedPosition = nodes.position
    return Edges(
        logits=position.logits[at],
        visits=jnp.where(visited, tree.visits[child], 0.0),
        value=jnp.where(visited, value, 0.0),
        node_prior_value=position.value[at],
        node_value=tree.value[at],
    )
