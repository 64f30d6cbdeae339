"""Foreign experts in the slots that hold them already, as `moonep_megatron.reuse.Held.placed`.

Letters: E experts, R ranks, n = E/R home experts of a rank, B slots of a rank.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from moonep_megatron.kernels import ptx, warp


class Slots(NamedTuple):
    """What every rank's slots hold: [E] in shared memory by rank and slot, n places a rank."""

    expert: cute.Tensor
    """-1 for none."""
    stays: cute.Tensor
    """1 where the expert is one of the rank's foreign ones again."""


@cute.jit
def find_places(
    piece: cute.Tensor,
    received: cute.Tensor,
    places: cute.Tensor,
    held: Int64,
    slots: Int32,
    ranks: cutlass.Constexpr[int],
    experts: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    """All threads of one block: where each piece's expert stands among its rank's foreign ones.

    Those held stay where they are; the others, ascending, take slots that hold nothing, then the
    first free ones. With more pieces than slots all stand ascending.

    Args:
        piece: [E] experts by (rank, arrival), ``warp.MOST`` for none.
        received: [R] pieces of each rank.
        places: [E] by (rank, arrival), written. All three are in shared memory.
        held: address of int32 [R, B], see `moonep_megatron.kernels.duplicates.Kept`.
    """
    thread, _, _ = cute.arch.thread_idx()
    homes = experts // ranks
    here, stays, kept = (_allocate(experts) for _ in range(3))
    for i in cutlass.range(thread, experts, threads):
        d, slot, expert = i // homes, i % homes, Int32(-1)
        if slot < slots:
            expert = ptx.load(held + Int64(d * slots + slot) * 4, "s32")
        here[i] = expert
        stays[i] = 0
    cute.arch.sync_threads()
    for i in cutlass.range(thread, experts, threads):
        d, mine, slot = i // homes, piece[i], Int32(-1)
        if mine != warp.MOST and received[d] <= slots:
            # Backwards, since the first slot of several counts.
            for back in cutlass.range(1, slots + 1):
                if here[d * homes + slots - back] == mine:
                    slot = slots - back
            if slot >= 0:
                stays[d * homes + slot] = 1
        kept[i] = slot
    cute.arch.sync_threads()
    for i in cutlass.range(thread, experts, threads):
        d, mine, place = i // homes, piece[i], kept[i]
        if mine != warp.MOST and place < 0:
            place = Int32(0)
            for other in cutlass.range(d * homes, d * homes + received[d]):
                if kept[other] < 0 and piece[other] < mine:
                    place += 1
            if received[d] <= slots:
                place = _free_slot(Slots(here, stays), d * homes, slots, place)
        places[i] = place
    cute.arch.sync_threads()


def _allocate(count: int) -> cute.Tensor:
    return cutlass.utils.SmemAllocator().allocate_tensor(
        Int32, cute.make_layout(count), byte_alignment=16
    )


@cute.jit
def _free_slot(s: Slots, first: Int32, slots: Int32, number: Int32) -> Int32:
    """The slot of a rank with so many free ones before it, where those that hold nothing are first.

    Args:
        first: of the rank's places.
    """
    left, found = number, Int32(-1)
    for holds in cutlass.range_constexpr(2):
        for slot in cutlass.range(slots):
            if s.stays[first + slot] == 0 and Int32(s.expert[first + slot] >= 0) == holds:
                if left == 0:
                    found = slot
                left -= 1
    return found
