"""Divides a batch into shuffled minibatches whose contents do not depend on placement.

The environments are divided into a fixed number of logical shards. Each shard is shuffled with its own key, and
every minibatch takes an equal part of every shard. Any placement that keeps shards whole therefore sees the same
minibatches.

Shape letters: `T` steps, `E` environments and `S` shards of this replica, `N` rows of a minibatch.
"""

import math
from abc import abstractmethod
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree, Shaped, UInt32

from rollmill.core.errors import UsageError
from rollmill.core.types import Key
from rollmill.dataflow.graph import Batch, Loops
from rollmill.dataflow.packing import PackedSamples, is_large, pack

SHUFFLE_ROUNDS = 32

FUSED_ROUNDS = 8
"""Number of rounds that XLA may fuse. The time to fuse them grows with the square of their number."""


def choose_num_shards(num_envs: int, num_steps: int, num_minibatches: int, *, by_sequence: bool) -> int:
    """Returns the largest power of two up to 64 that gives every minibatch an equal part of every shard."""
    rows_per_env = 1 if by_sequence else num_steps
    for shards in (64, 32, 16, 8, 4, 2, 1):
        if _fits(shards, num_envs, rows_per_env, num_minibatches):
            return shards
    raise _does_not_divide(num_envs * rows_per_env, num_minibatches, by_sequence=by_sequence)


def num_shards_for(loops: Loops, num_devices: int) -> int | None:
    """Returns the smallest number of shards that can be divided equally among `num_devices` devices, or None."""
    for shards in range(num_devices, loops.num_envs + 1, num_devices):
        if _fits(shards, loops.num_envs, loops.rows_per_env, loops.num_minibatches):
            return shards
    return None


def permutation(key: Key, size: int) -> UInt32[Array, " size"]:
    """Returns a pseudo-random permutation of `0 .. size - 1`, computed without sorting or memory.

    The swap-or-not shuffle (Hoang, Morris and Rogaway, "An Enciphering Scheme Based on a Card Shuffle", CRYPTO
    2012) pairs `x` with `k - x mod size` in each round, and swaps the pair if a hashed bit of it is set. Each
    round is a bijection for any size up to 2**31.
    """
    if size == 1:  # the CPU compiler of XLA (jaxlib 0.10.2) fails on the rounds below if the modulus is 1
        return jnp.zeros(1, jnp.uint32)
    offsets, salts = jax.random.bits(key, (2, SHUFFLE_ROUNDS), jnp.uint32)
    n = jnp.uint32(size)

    def swap_or_not(x, round_):
        offset, salt = round_
        difference = offset - x
        partner = jnp.minimum(difference, difference + n)  # `difference` wraps around if it is negative
        swap = _mix(jnp.maximum(x, partner) ^ salt) >= jnp.uint32(2**31)
        return jnp.where(swap, partner, x), None

    x = jnp.arange(size, dtype=jnp.uint32)
    # The barriers keep XLA from fusing all rounds, which takes seconds on GPUs, and from fusing rounds into each
    # gather, which LLVM (jaxlib 0.11 and 0.12) takes exponential time to vectorise.
    groups = jnp.stack([offsets % n, salts], axis=1).reshape(-1, FUSED_ROUNDS, 2)
    for group in groups:
        x = jax.lax.optimization_barrier(jax.lax.scan(swap_or_not, x, group, unroll=True)[0])
    return x


def _fits(shards: int, num_envs: int, rows_per_env: int, num_minibatches: int) -> bool:
    return num_envs % shards == 0 and num_envs // shards * rows_per_env % num_minibatches == 0


def _does_not_divide(rows: int, num_minibatches: int, *, by_sequence: bool) -> UsageError:
    small = [n for n in range(1, math.isqrt(rows) + 1) if rows % n == 0]
    divisors = sorted({*small, *(rows // n for n in small)})
    nearest = sorted(sorted(divisors, key=lambda n: abs(n - num_minibatches))[:2])
    kind = "sequences (num_envs)" if by_sequence else "samples (num_envs x num_steps)"
    return UsageError(
        f"{rows} {kind} cannot be divided into num_minibatches={num_minibatches} equal parts. Nearest "
        f"values that divide them: {' or '.join(map(str, nearest))}."
    )


def shuffled_rows(key: Key, index: Int[Array, " E"], loops: Loops) -> UInt32[Array, "num_minibatches N"]:
    """Returns the rows of each minibatch in an epoch, in random order.

    Args:
        key: random key of the epoch. The key of each shard derives from this key and the shard's global index.
        index: global indices of this replica's environments, which form whole shards.
        loops: sizes of the loops, over all replicas.
    """
    width = loops.num_envs // loops.num_shards
    shards = index[::width] // width
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, shards)
    order = jax.vmap(partial(permutation, size=loops.rows_per_env * width))(keys)
    step, column = order // jnp.uint32(width), order % jnp.uint32(width)
    first = jnp.arange(len(shards), dtype=jnp.uint32)[:, None] * jnp.uint32(width)
    rows = step * jnp.uint32(index.size) + first + column
    by_minibatch = rows.reshape(len(shards), loops.num_minibatches, -1).swapaxes(0, 1)
    return by_minibatch.reshape(loops.num_minibatches, -1)


def epoch_rows(key: Key, index: Int[Array, " E"], loops: Loops) -> UInt32[Array, "epochs num_minibatches N"]:
    """Returns the shuffled rows of all epochs. `key` is the iteration's key for learning."""
    of_epoch = lambda epoch: shuffled_rows(jax.random.fold_in(key, epoch), index, loops)
    return jax.vmap(of_epoch)(jnp.arange(loops.epochs))


class MinibatchGather(eqx.Module):
    """Samples of a batch, arranged so that rows can be gathered. Calling it returns the minibatch of some rows."""

    @abstractmethod
    def __call__(self, rows: UInt32[Array, " N"]) -> Batch:
        """Returns the minibatch of these rows."""


def minibatch_gather(batch: Batch, loops: Loops) -> MinibatchGather:
    """Returns a function that gathers the minibatch of some rows. Its arrays are leaves of a pytree."""
    if loops.minibatch_items == "samples":
        return _Samples(pack(flat_samples(batch)))
    transposed = lambda leaf: leaf if _stays(leaf) else leaf.swapaxes(0, 1)
    return _Sequences(jax.tree.map(transposed, batch.samples), batch.sequences)


class _Samples(MinibatchGather):
    packed: PackedSamples

    def __call__(self, rows: UInt32[Array, " N"]) -> Batch:
        return Batch(self.packed.take(rows))


class _Sequences(MinibatchGather):
    """Sequences of environments.

    Small leaves are transposed once. Large leaves are transposed as they are taken, since a copy would double the
    memory of a batch.
    """

    samples: PyTree[Array]
    """Leaves `[E, T, ...]`, and large ones `[T, E, ...]`."""
    sequences: PyTree[Array]

    def __call__(self, rows: UInt32[Array, " N"]) -> Batch:
        take = lambda leaf: leaf[:, rows].swapaxes(0, 1) if _stays(leaf) else leaf[rows]
        return Batch(jax.tree.map(take, self.samples), jax.tree.map(lambda leaf: leaf[rows], self.sequences))


def _stays(leaf: Shaped[Array, "T E ..."]) -> bool:
    """Returns whether a leaf is too large to be transposed."""
    return is_large(jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype))


def flat_samples(batch: Batch) -> PyTree[Array]:
    """Returns the samples of a batch with leaves `[T * E, ...]`."""
    # no -1, because the batch may be empty
    flat = lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])
    return jax.tree.map(flat, batch.samples)


def _mix(x: UInt32[Array, "*n"]) -> UInt32[Array, "*n"]:
    """Mixes bits: every input bit changes about half of the output bits (finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
