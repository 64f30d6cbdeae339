"""Small collective operations of a warp or a block. Integers only, ties to the lowest index."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, cute

WARP = 32
ALL_LANES = 0xFFFFFFFF
MOST = 2**31 - 1


@cute.jit
def lane_and_warp() -> tuple[Int32, Int32]:
    """This thread's lane and warp in a one-dimensional block."""
    thread, _, _ = cute.arch.thread_idx()
    return thread % WARP, thread // WARP


@cute.jit
def ballot(flag: Boolean) -> Int32:
    """Bit l is the flag of lane l."""
    return cute.arch.vote_ballot_sync(flag)


@cute.jit
def lowest(bits: Int32) -> Int32:
    """Number of the lowest bit that is set; 32 where none is."""
    return cute.arch.popc((bits & (Int32(0) - bits)) - 1)


@cute.jit
def lowest_rank(flags: list[Int32]) -> Int32:
    """First rank whose flag is not zero, of 32 ranks a flag, one a lane; 0 where none is."""
    rank = Int32(0)
    for i in cutlass.range_constexpr(len(flags)):
        g = len(flags) - 1 - i
        who = ballot(flags[g] != 0)
        if who != 0:
            rank = g * WARP + lowest(who)
    return rank


@cute.jit
def lower_lanes() -> Int32:
    """Bits of the lanes before this one."""
    return Int32(cute.arch.lanemask_lt())


@cute.jit
def same_value(value: Int32) -> Int32:
    """Bits of the lanes that hold the same value."""
    return Int32(cute.arch.match_sync(ALL_LANES, value))


@cute.jit
def warp_sum(value: Int32) -> Int32:
    """Sum over the lanes, in every lane."""
    return cute.arch.warp_redux_sync(value, "add")


@cute.jit
def warp_min(value: Int32) -> Int32:
    """Least value of the lanes, in every lane."""
    return cute.arch.warp_redux_sync(value, "min")


@cute.jit
def warp_max(value: Int32) -> Int32:
    """Largest value of the lanes, in every lane."""
    return cute.arch.warp_redux_sync(value, "max")


@cute.jit
def inclusive_scan(value: Int32) -> Int32:
    """Sum over this lane and those before it."""
    lane, _ = lane_and_warp()
    for power in cutlass.range_constexpr(5):
        before = cute.arch.shuffle_sync_up(value, 1 << power)
        if lane >= 1 << power:
            value += before
    return value


@cute.jit
def exclusive_scan(
    values: cute.Tensor,
    sums: cute.Tensor,
    length: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    """All threads of a block: replace every value by the sum of those before it.

    Args:
        values: shared memory, ``length + 1``; the last one receives the total.
        sums: shared memory, one a warp.
    """
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = lane_and_warp()
    each = -(-length // threads)
    first = thread * each
    own = Int32(0)
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(each):
        if first + i < length:
            own += values[first + i]
    inclusive = inclusive_scan(own)
    if lane == WARP - 1:
        sums[warp] = inclusive
    cute.arch.sync_threads()
    before = Int32(0)
    if lane < warp:
        before = sums[lane]
    running = warp_sum(before) + inclusive - own
    for i in cutlass.range_constexpr(each):
        if first + i < length:
            value = values[first + i]
            values[first + i] = running
            running += value
    if thread == threads - 1:
        values[length] = running
    cute.arch.sync_threads()
