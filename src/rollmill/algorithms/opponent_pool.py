"""Earlier weights of agents as opponents of others (fictitious self-play; Heinrich et al., ICML 2015).

A pool holds the weights of each parameter set after several iterations. In a share of the iterations, one kind of
agents acts by earlier weights from the pool, in all environments, and only the others learn. All of it is part of
the learner, so every placement draws the same opponents.

Shape letter: `K` places of the pool.
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, UInt32

from rollmill.algorithms.hyperparameters import Number
from rollmill.algorithms.sharing import ParameterSet, set_of
from rollmill.core.errors import UsageError
from rollmill.core.types import Key


class Opponents(eqx.Module):
    """Weights of the opponents in one iteration, and the agents that act by them."""

    networks: dict[str, PyTree[Array]]
    """Earlier weights of each parameter set."""
    playing: dict[str, Bool[Array, ""]]
    """Whether each kind of agents acts by the earlier weights. At most one kind does."""


class OpponentPool(eqx.Module):
    """Earlier weights, and how they are drawn."""

    networks: dict[str, PyTree[Array]]
    """Weights of each parameter set, with leaves `[K, ...]`."""
    count: Int[Array, ""]
    """Iterations so far."""
    key: UInt32[Array, "..."]
    """Data of the key of all draws."""
    played: dict[str, Bool[Array, ""]]
    """Which kinds acted by earlier weights in the iteration that is being learned from."""


def kinds_with_opponents(sets: tuple[ParameterSet, ...], frozen: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the kinds that may act by earlier weights: those that learn, if another kind learns meanwhile.

    Raises a `UsageError` if there are none.
    """
    learning = [name for group in sets if group.name not in frozen for name in group.names]
    if len(learning) < 2:
        raise UsageError(
            f"pool_size: an opponent acts by earlier weights while another kind of agents learns, and here only "
            f"{' and '.join(learning)} learns. hint: an environment with two kinds, and fewer of them in frozen."
        )
    return tuple(learning)


def start_pool(
    networks: Mapping[str, PyTree[Array]], kinds: tuple[str, ...], key: Key, *, size: int
) -> OpponentPool:
    """Returns an empty pool for `size` earlier weights. `kinds` may act by them."""
    places = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (size, *leaf.shape)), dict(networks))
    return OpponentPool(places, jnp.int32(0), jax.random.key_data(key), _nobody(kinds))


def no_opponents(networks: Mapping[str, PyTree[Array]], kinds: tuple[str, ...]) -> Opponents:
    """Returns opponents of whom none plays."""
    return Opponents(dict(networks), _nobody(kinds))


def _nobody(kinds: tuple[str, ...]) -> dict[str, Bool[Array, ""]]:
    return {name: jnp.asarray(False) for name in kinds}


def next_opponents(
    pool: OpponentPool, networks: Mapping[str, PyTree[Array]], played: Opponents, *, every: int, share: Number
) -> tuple[OpponentPool, Opponents]:
    """Returns the pool after an iteration, and the opponents of the next one.

    Args:
        pool: the pool before.
        networks: weights of the iteration.
        played: opponents of the iteration.
        every: iterations between two weights that are kept. The oldest make room for new ones.
        share: share of the iterations with an opponent.
    """
    count = pool.count + 1
    size, kept = jax.tree.leaves(pool.networks)[0].shape[0], count // every
    place, is_due = (kept - 1) % size, count % every == 0
    put = lambda places, leaf: jnp.where(is_due, places.at[place].set(leaf), places)
    places = jax.tree.map(put, pool.networks, dict(networks))
    keys = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(pool.key), count), 3)
    plays = (kept > 0) & (jax.random.uniform(keys[0]) < share)
    chosen = jax.random.randint(keys[1], (), 0, jnp.clip(kept, 1, size))
    kind = jax.random.randint(keys[2], (), 0, len(played.playing))
    playing = {name: plays & (kind == number) for number, name in enumerate(played.playing)}
    earlier = jax.tree.map(lambda leaf: leaf[chosen], places)
    return OpponentPool(places, count, pool.key, played.playing), Opponents(earlier, playing)


def networks_of_kind(
    sets: tuple[ParameterSet, ...], kind: str, networks: Mapping[str, PyTree[Array]], opponents: Opponents | None
) -> Mapping[str, Any]:
    """Returns the networks by which a kind of agents acts."""
    if opponents is None or kind not in opponents.playing:
        return networks
    name, plays = set_of(sets, kind).name, opponents.playing[kind]
    mine = jax.tree.map(lambda old, new: jnp.where(plays, old, new), opponents.networks[name], networks[name])
    return {**networks, name: mine}
