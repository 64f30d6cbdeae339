"""The working state of one candidate of `moonep_megatron.kernels.rules`, in shared memory."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute
from moonep_megatron.kernels import warp

# A table over the sets of ranks is for at most so many.
EXACT_RANKS = 8
SETS = 1 << EXACT_RANKS


class State(NamedTuple):
    """One candidate in shared memory; ranks are padded to whole warps with zero surplus."""

    rows: cute.Tensor
    """[R, n+1] rows of the experts left, falling from ``head`` on."""
    expert: cute.Tensor
    """[R, n+1] their numbers 0..n-1."""
    after: cute.Tensor
    """[R, n+1] sum of ``rows`` from here on."""
    head: cute.Tensor
    """[R] first expert left."""
    cap: cute.Tensor
    surplus: cute.Tensor
    open: cute.Tensor
    """[R] 1 where the rank may still be filled or take a place in the chain."""
    received: cute.Tensor
    """[R] experts received."""
    sent: cute.Tensor
    """[R] experts given away."""
    donor: cute.Tensor
    """[R] of each transfer; so are ``receiver`` and ``moved``, its rows."""
    receiver: cute.Tensor
    moved: cute.Tensor
    scalars: cute.Tensor
    """Number of fills, of transfers, and whether the candidate exists."""
    ways: cute.Tensor
    """[sets, 8] experts that a rank passes on when it enters a set last, for the subset table."""
    cost: cute.Tensor
    """[sets], least cost of a set, also of the second pass."""
    last: cute.Tensor
    """[sets], which member enters the set last."""
    member: cute.Tensor
    """[8] ranks of the subset table, and their surplus; zero behind the last."""
    excess: cute.Tensor
    order: cute.Tensor
    """[R] ranks by falling room, for trees."""
    ranked: cute.Tensor
    """[R+1] their surplus, ascending; the largest integer behind the last."""
    held: cute.Tensor
    """[3, R] rows that they can give, see `moonep_megatron.kernels.trees`."""
    rated: cute.Tensor
    """[2, warps, 2] the best step of each warp."""


FILLS, TRANSFERS, EXISTS = range(3)


def padded(ranks: int) -> int:
    """Ranks, rounded up to whole warps."""
    return -(-ranks // warp.WARP) * warp.WARP


@cute.jit
def allocate(ranks: cutlass.Constexpr[int], homes: cutlass.Constexpr[int]) -> State:
    """Shared memory of a candidate."""
    smem = cutlass.utils.SmemAllocator()
    sizes = [ranks * (homes + 1)] * 3 + [padded(ranks)] * 9 + [4]
    sizes += [SETS * EXACT_RANKS, SETS, SETS, EXACT_RANKS, EXACT_RANKS]
    sizes += [padded(ranks) + 1, padded(ranks) + 1, 3 * padded(ranks)]
    sizes += [padded(ranks) // warp.WARP * 8]
    return State(
        *[smem.allocate_tensor(Int32, cute.make_layout(size), byte_alignment=16) for size in sizes]
    )


@cute.jit
def append(s: State, t: Int32, donor: Int32, receiver: Int32, moved: Int32) -> None:
    """Write transfer number ``t``; one thread."""
    s.donor[t] = donor
    s.receiver[t] = receiver
    s.moved[t] = moved


@cute.jit
def prepare(
    s: State,
    totals: cute.Tensor,
    ranks: cutlass.Constexpr[int],
    homes: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> Int32:
    """All threads: sort every rank's experts, and fill the state, for exact caps; all rows."""
    experts = ranks * homes
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.utils.SmemAllocator()
    rows = smem.allocate_tensor(Int32, cute.make_layout(experts), byte_alignment=16)
    sums = smem.allocate_tensor(Int32, cute.make_layout(experts + 1), byte_alignment=16)
    partial = smem.allocate_tensor(Int32, cute.make_layout(warp.WARP), byte_alignment=16)
    for e in cutlass.range(thread, experts, threads):
        rows[e] = totals[e]
    cute.arch.sync_threads()
    for e in cutlass.range(thread, experts, threads):
        d, mine, place = e // homes, rows[e], Int32(0)
        for other in cutlass.range(d * homes, d * homes + homes, unroll=8):
            theirs = rows[other]
            if theirs > mine or (theirs == mine and other < e):
                place += 1
        s.rows[d * (homes + 1) + place] = mine
        s.expert[d * (homes + 1) + place] = e - d * homes
        sums[d * homes + place] = mine
    warp.exclusive_scan(sums, partial, experts, threads)
    for e in cutlass.range(thread, experts, threads):
        d = e // homes
        s.after[e + d] = sums[d * homes + homes] - sums[e]
    share, extra = sums[experts] // ranks, sums[experts] % ranks
    for d in cutlass.range(thread, padded(ranks), threads):
        surplus, cap = Int32(0), Int32(0)
        if d < ranks:
            cap = share + Int32(d < extra)
            surplus = sums[d * homes + homes] - sums[d * homes] - cap
            s.rows[d * (homes + 1) + homes] = 0
            s.expert[d * (homes + 1) + homes] = 0
            s.after[d * (homes + 1) + homes] = 0
        s.cap[d] = cap
        s.surplus[d] = surplus
        s.open[d] = Int32(d < ranks)
        s.head[d] = 0
        s.received[d] = 0
        s.sent[d] = 0
    cute.arch.sync_threads()
    return sums[experts]
