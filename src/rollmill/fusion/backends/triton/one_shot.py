"""One-shot all-reduce: a kernel that averages a vector over the GPUs of a host.

Each GPU reads the vectors of all others directly, so no GPU waits for more than one exchange of messages. This is
fastest for small vectors, for which latency matters more than bandwidth.

A vector is divided into lanes, each with a part of the memory that the GPUs share (`rollmill.programs`). A program
of the grid copies its lane there, sets a flag in the memory of every other GPU, and waits for the flags in its
own. Then it sums the lanes of all GPUs in the order of ranks, so that all get bitwise equal results. Flags hold
the number of the exchange. Lanes are double-buffered: no GPU begins exchange n + 2 before all others have
announced exchange n + 1, and so have finished reading exchange n.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from rollmill.fusion.backends.triton.compile import Kernel, call, capability_here, compile_for, entry

LANE = 1024
"""Number of vector elements in a lane."""
FLAG_BYTES = 256
"""Bytes at the beginning of a lane, which hold the number of its last exchange and a flag for each rank."""
LANE_BYTES = FLAG_BYTES + 2 * 4 * LANE
MAX_RANKS = FLAG_BYTES // 4 - 1

SOURCE = """
@triton.jit
def address_of(addresses, rank):
    low = tl.load(addresses + 2 * rank).to(tl.int64)
    return low | (tl.load(addresses + 2 * rank + 1).to(tl.int64) << 32)


@triton.jit
def one_shot_mean(
    vector, addresses, result,
    SIZE: tl.constexpr, RANKS: tl.constexpr, FIRST: tl.constexpr,
    LANE: tl.constexpr, LANE_BYTES: tl.constexpr, FLAG_BYTES: tl.constexpr,
):
    part = tl.program_id(0)
    column = tl.arange(0, LANE)
    place = part * LANE + column
    inside = place < SIZE
    lane = (FIRST + part).to(tl.int64) * LANE_BYTES
    rank = tl.load(addresses + 2 * RANKS).to(tl.int32)
    own = address_of(addresses, rank) + lane
    count = own.to(tl.pointer_type(tl.int32))
    # The first number of a lane counts its exchanges; the flags of all ranks follow it.
    exchange = tl.load(count) + 1
    half = FLAG_BYTES + (exchange & 1) * (4 * LANE)
    mine = (own + half).to(tl.pointer_type(tl.float32)) + column
    tl.store(mine, tl.load(vector + place, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()  # all threads have stored before one of them releases
    for peer in tl.static_range(RANKS):
        flag = (address_of(addresses, peer) + lane).to(tl.pointer_type(tl.int32)) + 1 + rank
        tl.atomic_xchg(flag, exchange, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        seen = tl.atomic_add(count + 1 + peer, 0, sem="acquire", scope="sys")
        while seen - exchange < 0:  # also right once the count has wrapped around
            seen = tl.atomic_add(count + 1 + peer, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    total = tl.zeros([LANE], tl.float32)
    for peer in tl.static_range(RANKS):
        theirs = (address_of(addresses, peer) + lane + half).to(tl.pointer_type(tl.float32)) + column
        total += tl.load(theirs, mask=inside, other=0.0, volatile=True)
    tl.store(result + place, tl.div_rn(total, tl.full([LANE], RANKS, tl.float32)), mask=inside)
    tl.store(count, exchange)
"""


def num_lanes(size: int) -> int:
    """Returns the number of lanes, of `LANE` elements each, that hold `size` elements."""
    return -(-size // LANE)


def one_shot_mean(
    vector: Float[Array, " N"], addresses: UInt32[Array, " A"], *, ranks: int, first_lane: int
) -> Float[Array, " N"]:
    """Returns the mean of a float32 vector over all GPUs, inside a traced function.

    All `ranks` GPUs (at most `MAX_RANKS`) must take their means in the same order. `addresses` holds the address
    of the shared memory on each GPU, as low and high 32 bits, followed by this GPU's rank. The lanes from
    `first_lane` on must not be used by another mean at the same time.
    """
    return call(mean_kernel(vector.size, ranks, first_lane), [vector, addresses])[0]


def compile_one_shot_mean(size: int, ranks: int) -> None:
    """Compiles the one-shot all-reduce for this machine's GPU. Raises `CannotFuse` if it does not compile."""
    arrays = [jax.ShapeDtypeStruct((size,), jnp.float32), jax.ShapeDtypeStruct((2 * ranks + 1,), jnp.uint32)]
    compile_for(mean_kernel(size, ranks, 0), arrays, capability_here())


def mean_kernel(size: int, ranks: int, first_lane: int) -> Kernel:
    """Returns the one-shot all-reduce kernel for a vector of `size` elements."""
    constants = {"SIZE": size, "RANKS": ranks, "FIRST": first_lane}
    return Kernel(
        SOURCE + entry("one_shot_mean"),
        programs=num_lanes(size),
        outputs=(jax.ShapeDtypeStruct((size,), jnp.float32),),
        constants=constants | {"LANE": LANE, "LANE_BYTES": LANE_BYTES, "FLAG_BYTES": FLAG_BYTES},
        num_warps=4,
        uniforms=2,
    )
