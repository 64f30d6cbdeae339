"""Slots that keep their copies: which copies of a push their holders lack, by the slots' tags.

A *tag* says what a slot of one projection holds, or will when its ``pushed`` flag shows the epoch
of the push that wrote the tag: (layer, expert, version of the home's weights). It stands in the
memory of the slot's holder. A copy whose tag is there is not moved: its flag is raised at once.

Who may write what: a home writes the tags of the slots it is about to fill, after the holder has
signalled SLOTS_FREE for the wave before. Only homes read tags, at the same place: the holder has
waited for every earlier copy before it signalled, so tag and copy are both there. A kernel of its
own decides for all blocks of the push, whose first blocks might else write what the last read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from moonep_megatron.kernels import compile as kernel_compile
from moonep_megatron.kernels import duplicates as dup
from moonep_megatron.kernels import ptx, sync

TAG_INTS = 4
TAG_BYTES = 4 * TAG_INTS
# Copies to move: a list for each projection, then the length of each.
MISSING_INTS = 2 * sync.MAX_COPIES + 2


def list_missing(
    duplicates: dup.Duplicates, foreign: Any, wave: dup.Wave, version: int, layer: int
) -> None:
    """Launch the choice of the copies that the next push of a wave moves, on the current stream.

    Args:
        foreign, wave: see `Duplicates.wave`.
        version: of this rank's weights, 31 bits.
    """
    kept = duplicates.kept
    assert kept is not None
    kernel_compile.compiled(MissingConfig())(
        duplicates.memory.peers,
        foreign,
        duplicates.pushed.offset,
        dup.slots_of(duplicates.weights),
        wave,
        duplicates.group(layer),
        _Tags(kept.tags.offset, kept.held_RB.data_ptr(), kept.missing.data_ptr(), version),
    )


class _Tags(NamedTuple):
    """Kernel argument: where tags, table and lists of `Kept` are, and this rank's version."""

    tags: Int64
    """Offset in the allocation of every rank; the others are addresses."""
    held: Int64
    missing: Int64
    version: Int32


@cute.jit
def read_missing(copies: cute.Tensor, missing: Int64, backward: Int32) -> tuple[Int32, Int32]:
    """All threads of a block of the push: its copies in shared memory, FC1's first or FC2's.

    Returns:
        how many are of the projection that comes first, and how many in all.
    """
    thread, _, _ = cute.arch.thread_idx()
    counts = missing + 2 * sync.MAX_COPIES * 4
    first = ptx.load(counts + Int64(backward) * 4, "s32")
    total = first + ptx.load(counts + Int64(1 - backward) * 4, "s32")
    for item in cutlass.range(thread, total, dup.THREADS):
        projection, place = backward, item
        if item >= first:
            projection, place = 1 - backward, item - first
        at = projection * sync.MAX_COPIES + place
        copies[item] = ptx.load(missing + Int64(at) * 4, "s32")
    cute.arch.sync_threads()
    return first, total


@cute.jit
def _lacks(
    peers: cute.Tensor,
    holder: Int32,
    place: Int32,
    expert: Int32,
    epoch: Int32,
    pushed: Int64,
    kept: _Tags,
    layer: Int32,
) -> Int32:
    """Whether a slot lacks the expert; then its tag says that it will hold it, else its flag.

    Args:
        place: of the projection's slot among all of both, as in ``pushed``.
        expert: its number among all.
    """
    at = peers[holder] + kept.tags + Int64(place) * TAG_BYTES
    wanted = (Uint32(layer), Uint32(expert), Uint32(kept.version), Uint32(0))
    there = ptx.load16(at)
    lacking = Int32(1)
    if there[0] == wanted[0] and there[1] == wanted[1] and there[2] == wanted[2]:
        lacking = Int32(0)
    if lacking != 0:
        ptx.store16(at, wanted)
    else:
        ptx.store_release_sys(peers[holder] + pushed + Int64(place) * 4, epoch)
    return lacking


@cute.kernel
def _list_missing(
    peers: cute.Tensor,
    foreign: cute.Tensor,
    pushed: Int64,
    slots: dup.Slots,
    wave: dup.Wave,
    group: sync.Group,
    kept: _Tags,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    epoch = sync.next_epoch(group.control, sync.PUSHED)
    copies = dup.allocate_ints(sync.MAX_COPIES)
    totals = dup.allocate_ints(dup.WARPS)
    entries = dup.entries(wave, group)
    for projection in cutlass.range_constexpr(2):
        nbytes = slots.bytes1 if projection == 0 else slots.bytes2
        count = Int32(0)
        for base in cutlass.range(0, entries, dup.THREADS):
            entry = base + thread
            copy = Int32(-1)
            if entry < entries:
                slot = entry // group.ranks
                holder = (group.rank + 1 + entry % group.ranks) % group.ranks
                expert = dup.home_expert(foreign, holder, slot, wave, group)
                if expert >= 0 and nbytes > 0:
                    free = sync.flag_address(peers, group, sync.SLOTS_FREE, holder)
                    sync.wait(free, epoch - 1, holder, sync.SLOTS_FREE, group)
                    place = projection * wave.slots + slot
                    number = group.rank * wave.homes + expert
                    lacks = _lacks(peers, holder, place, number, epoch, pushed, kept, group.layer)
                    if lacks != 0:
                        copy = dup.pack_copy(expert, holder, slot)
            count = dup.append(copies, totals, count, copy)
        cute.arch.sync_threads()
        for i in cutlass.range(thread, count, dup.THREADS):
            ptx.store(kept.missing + Int64(projection * sync.MAX_COPIES + i) * 4, copies[i], "s32")
        if thread == 0:
            ptx.store(kept.missing + Int64(2 * sync.MAX_COPIES + projection) * 4, count, "s32")
        # The list is written before it becomes the other projection's.
        cute.arch.sync_threads()
    _note_held(foreign, wave, group, kept.held)


@cute.jit
def _note_held(foreign: cute.Tensor, wave: dup.Wave, group: sync.Group, held: Int64) -> None:
    """What every rank's slots hold after this push, for the order of the next plan's experts."""
    thread, _, _ = cute.arch.thread_idx()
    for entry in cutlass.range(thread, dup.entries(wave, group), dup.THREADS):
        slot, holder = entry // group.ranks, entry % group.ranks
        expert = foreign[holder * wave.homes + wave.index * wave.slots + slot]
        if expert >= 0:
            ptx.store(held + Int64(holder * wave.slots + slot) * 4, expert, "s32")


@cute.jit
def _launch(
    peers: cute.Tensor,
    foreign: cute.Tensor,
    pushed: Int64,
    slots: dup.Slots,
    wave: dup.Wave,
    group: sync.Group,
    kept: _Tags,
    stream: Any,
) -> None:
    _list_missing(peers, foreign, pushed, slots, wave, group, kept).launch(
        grid=[1, 1, 1], block=[dup.THREADS, 1, 1], stream=stream
    )


@dataclass(frozen=True)
class MissingConfig:
    """The kernel of `list_missing`: one block."""

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `compile.Config`."""
        return _launch, (
            dup.any_addresses(),
            dup.any_foreign(),
            Int64(0),
            kernel_compile.scalars(dup.Slots),
            kernel_compile.scalars(dup.Wave),
            kernel_compile.scalars(sync.Group),
            kernel_compile.scalars(_Tags),
            kernel_compile.stream(),
        )


def configs() -> list[MissingConfig]:
    """Every configuration, for the compile test."""
    return [MissingConfig()]
