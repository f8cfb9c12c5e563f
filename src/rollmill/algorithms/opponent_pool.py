"""Lets agents play against earlier weights of other agents (fictitious self-play, Heinrich et al., ICML 2015).

A pool holds the weights that each parameter set had after several iterations. In a share of the iterations, one
kind of agents acts with weights from the pool in all environments, and only the other kinds learn. The pool is
part of the learner, so every placement draws the same opponents.

Shape letter: `K` places of the pool.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, UInt32

from rollmill.algorithms.hyperparameters import Number
from rollmill.algorithms.sharing import ParameterSet, set_of
from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import Key


class Opponents(eqx.Module):
    """The kinds of agents that act with earlier weights in one iteration, and these weights."""

    networks: dict[str, PyTree[Array]]
    """Earlier weights of each parameter set with opponents."""
    playing: dict[str, Bool[Array, ""]]
    """Whether each agent kind acts with the earlier weights. At most one kind does."""


class OpponentPool(eqx.Module):
    """Earlier weights of agents, and the counts by which opponents are drawn."""

    networks: dict[str, PyTree[Array]]
    """Weights of each parameter set with opponents, leaves `[K, ...]`."""
    kept: dict[str, Int[Array, ""]]
    """Number of weights of each set that were ever added. The pool holds the latest `K`."""
    count: Int[Array, ""]
    """Number of iterations so far."""
    key: UInt32[Array, "..."]
    """Raw data of the random key for all draws."""
    played: dict[str, Bool[Array, ""]]
    """For each kind, whether it acted with earlier weights in the latest iteration."""


class KindsWithOpponents(NamedTuple):
    """The kinds of agents that may act with earlier weights, and their parameter sets."""

    kinds: tuple[str, ...]
    sets: Mapping[str, str]
    """Parameter set of each of these kinds."""
    fixed: tuple[str, ...]
    """Parameter sets that do not learn. The pool does not store additional weights for these sets."""

    def of_sets(self, networks: Mapping[str, PyTree[Array]]) -> dict[str, PyTree[Array]]:
        """Returns the weights of the parameter sets that opponents may use."""
        names = set(self.sets.values())
        return {name: leaves for name, leaves in networks.items() if name in names}

    def nobody(self) -> dict[str, Bool[Array, ""]]:
        """Returns False for each kind, for an iteration in which no kind acts with earlier weights."""
        return {name: jnp.asarray(False) for name in self.kinds}


def kinds_with_opponents(config: Any, sets: tuple[ParameterSet, ...]) -> KindsWithOpponents | None:
    """Returns the kinds of agents that may act with earlier weights while another kind learns.

    Raises a `UsageError` if there are none.
    """
    if not config.pool_size:
        _refuse_without_pool(config)
        return None
    of_kind = {name: group.name for group in sets for name in group.names}
    learning = [name for name, group in of_kind.items() if group not in config.frozen]
    for name in config.pool_roles:
        if name not in of_kind:
            raise unknown_name("kind of agents in pool_roles", name, of_kind)
    kinds = tuple(name for name in of_kind if name in (config.pool_roles or learning))
    for name in kinds:
        if not set(learning) - {name}:
            raise _nobody_learns(config, name, list(of_kind))
    return KindsWithOpponents(kinds, {name: of_kind[name] for name in kinds}, tuple(config.frozen))


def _refuse_without_pool(config: Any) -> None:
    defaults = {field.name: field.default for field in fields(config)}
    for name in ("pool_every", "pool_share", "pool_roles"):
        if (value := getattr(config, name)) != defaults[name]:
            shown = " ".join(value) if isinstance(value, tuple) else value
            raise UsageError(
                f"{name}={shown} has no effect without pool_size, the number of earlier weights to keep. hint: "
                "add --pool-size 10 (pool_size=10 in Python)."
            )


def _nobody_learns(config: Any, kind: str, kinds: list[str]) -> UsageError:
    others = [name for name in kinds if name != kind]
    if not others:
        return UsageError(
            f"pool_size={config.pool_size} needs another kind of agents that learns while {kind} acts by earlier "
            f"weights, but {kind} is the only kind. hint: leave pool_size out."
        )
    return UsageError(
        f"no other kind of agents would learn while {kind} acts by earlier weights "
        f"(pool_size={config.pool_size}), because frozen holds {' and '.join(config.frozen)}. hint: leave frozen "
        f"out, and let {others[0]} alone act by earlier weights with --pool-roles {others[0]}; or keep it frozen "
        f"and add --pool-roles {others[0]} --pool-from RUN, which trains against checkpoints of another run."
    )


def start_pool(
    networks: Mapping[str, PyTree[Array]], kinds: KindsWithOpponents, key: Key, *, size: int
) -> OpponentPool:
    """Returns an empty pool for `size` earlier weights, with which the agents of `kinds` may act."""
    own = kinds.of_sets(networks)
    places = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (size, *leaf.shape)), own)
    kept = {name: jnp.int32(0) for name in own}
    return OpponentPool(places, kept, jnp.int32(0), jax.random.key_data(key), kinds.nobody())


def no_opponents(networks: Mapping[str, PyTree[Array]], kinds: KindsWithOpponents) -> Opponents:
    """Returns `Opponents` for an iteration in which no agents act with earlier weights."""
    return Opponents(kinds.of_sets(networks), kinds.nobody())


def next_opponents(
    pool: OpponentPool,
    networks: Mapping[str, PyTree[Array]],
    played: Opponents,
    kinds: KindsWithOpponents,
    *,
    every: int,
    share: Number,
) -> tuple[OpponentPool, Opponents]:
    """Returns the pool after an iteration, and the opponents of the next one.

    Args:
        pool: the pool before the iteration.
        networks: weights of all parameter sets after the iteration.
        played: opponents of the iteration.
        kinds: the kinds that may act with earlier weights.
        every: number of iterations between additions to the pool. New weights replace the oldest.
        share: share of the iterations with an opponent.
    """
    count = pool.count + 1
    is_due, places, kept = count % every == 0, dict(pool.networks), dict(pool.kept)
    for name in places:
        if name not in kinds.fixed:
            places[name] = _put(places[name], kept[name], networks[name], is_due)
            kept[name] = kept[name] + is_due.astype(jnp.int32)
    after = OpponentPool(places, kept, count, pool.key, played.playing)
    return after, draw_opponents(after, kinds, share=share)


def _put(places: PyTree[Array], kept: Int[Array, ""], newest: PyTree[Array], is_due: Bool[Array, ""]) -> PyTree:
    size = jax.tree.leaves(places)[0].shape[0]
    put = lambda places, leaf: jnp.where(is_due, places.at[kept % size].set(leaf), places)
    return jax.tree.map(put, places, newest)


def draw_opponents(pool: OpponentPool, kinds: KindsWithOpponents, *, share: Number) -> Opponents:
    """Draws the opponents of the next iteration: whether there are any, their kind, and their weights.

    Args:
        pool: the pool before the iteration.
        kinds: the kinds that may act with earlier weights.
        share: share of the iterations with an opponent.
    """
    keys = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(pool.key), pool.count), 3)
    is_ready = jnp.stack([pool.kept[kinds.sets[name]] > 0 for name in kinds.kinds])
    plays = jnp.any(is_ready) & (jax.random.uniform(keys[0]) < share)
    nth = jax.random.randint(keys[2], (), 0, jnp.maximum(jnp.sum(is_ready), 1))
    kind = jnp.argmax(jnp.cumsum(is_ready) > nth)  # the nth kind with weights in the pool
    playing = {name: plays & (kind == number) for number, name in enumerate(kinds.kinds)}

    def drawn(name: str, places: PyTree[Array]) -> PyTree[Array]:
        held = jnp.clip(pool.kept[name], 1, jax.tree.leaves(places)[0].shape[0])
        chosen = jax.random.randint(keys[1], (), 0, held)
        return jax.tree.map(lambda leaf: leaf[chosen], places)

    return Opponents({name: drawn(name, places) for name, places in pool.networks.items()}, playing)


def networks_of_kind(
    sets: tuple[ParameterSet, ...], kind: str, networks: Mapping[str, PyTree[Array]], opponents: Opponents | None
) -> Mapping[str, Any]:
    """Returns the networks with which a kind of agents acts: the newest networks, or an opponent's networks."""
    if opponents is None or kind not in opponents.playing:
        return networks
    name, plays = set_of(sets, kind).name, opponents.playing[kind]
    mine = jax.tree.map(lambda old, new: jnp.where(plays, old, new), opponents.networks[name], networks[name])
    return {**networks, name: mine}
