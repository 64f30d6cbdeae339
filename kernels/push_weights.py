"""Push: a home rank stores its experts' weights into the slots of the ranks that hold duplicates.

One launch a wave, both projections, usually on a side stream. Blocks work on one copy at a time,
in order of slots, so that the first slots are complete first; the last block of a copy raises the
slot's ``pushed`` flag on the holder. The holder launches `wait_slots` before the GEMMs of some
slots, and `free_slots` once when it has used all slots of the wave.

Slots may keep their copies (`moonep_megatron.kernels.tags`): then another kernel lists what to
move, and raises the flags of what is there.

Who may write what: a home writes a slot after its holder has signalled SLOTS_FREE for the wave
before. The holder counts waves by its own `free_slots`, not by pushes: its own push runs beside
`wait_slots`, and its epoch may change at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Int32, Int64, cute
from moonep_megatron.kernels import compile as kernel_compile
from moonep_megatron.kernels import duplicates as dup
from moonep_megatron.kernels import ptx, sync, tags
from torch import Tensor


def push_weights(
    duplicates: dup.Duplicates,
    foreign_expert_Rn: Tensor,
    homes: tuple[Tensor, Tensor],
    wave: int,
    *,
    backward: bool = False,
    version: int = 0,
    sms: int = 8,
    layer: int = 0,
) -> None:
    """Launch the push of one wave on the current stream. All ranks launch it, in the same order.

    Slots that keep their copies get only those that they lack.

    All pushes of a group must be ordered on their streams, and at most one be queued ahead of the
    wave in use: one more would wait behind it, and with one hardware queue
    (CUDA_DEVICE_MAX_CONNECTIONS=1) everything queued after it, `free_slots` too.

    Args:
        foreign_expert_Rn: int32 [R, n] on the device, the plan's.
        homes: int64 [n] on the device for FC1 and FC2, the address of each local expert's
            contiguous weight (a multiple of 16), in the dtype of the slots.
        backward: FC2 before FC1.
        version: of the home weights, for slots that keep their copies.
        sms: blocks.
        layer: what a fault record names.
    """
    foreign, which = duplicates.wave(foreign_expert_Rn, wave)
    kept, missing = duplicates.kept, 0
    if kept is not None:
        tags.list_missing(duplicates, foreign, which, version, layer)
        missing = kept.missing.data_ptr()
    kernel_compile.compiled(PushConfig(kept is not None))(
        duplicates.memory.peers,
        foreign,
        *homes,
        duplicates.pushed.offset,
        dup.slots_of(duplicates.weights),
        which,
        duplicates.group(layer),
        int(backward),
        sms,
        missing,
    )


def wait_slots(
    duplicates: dup.Duplicates,
    foreign_expert_Rn: Tensor,
    wave: int,
    projection: int,
    first: int,
    end: int,
    *,
    layer: int = 0,
) -> None:
    """Hold the current stream until slots [first, end) of a projection have this wave's weights.

    Slots without an expert in this wave are not waited for. Launched between the `free_slots` of
    the wave before and that of this wave.

    Args:
        projection: 0 for FC1, 1 for FC2.
    """
    foreign, which = duplicates.wave(foreign_expert_Rn, wave)
    kernel_compile.compiled(WaitConfig())(
        duplicates.memory.peers,
        foreign,
        duplicates.pushed.offset,
        which,
        duplicates.group(layer),
        projection,
        first,
        end,
    )


def free_slots(duplicates: dup.Duplicates) -> None:
    """Tell all homes, once a wave, that this rank's slots may be overwritten."""
    dup.signal(duplicates, sync.SLOTS_FREE)


@cute.jit
def _find_copies(
    peers: cute.Tensor,
    foreign: cute.Tensor,
    copies: cute.Tensor,
    wave: dup.Wave,
    group: sync.Group,
    epoch: Int32,
) -> Int32:
    """List this home's copies by slot, then rank from the next one on; wait for their holders.

    Homes begin with different ranks, so that they do not all store to one.
    """
    thread, _, _ = cute.arch.thread_idx()
    totals = dup.allocate_ints(dup.WARPS)
    count = Int32(0)
    entries = dup.entries(wave, group)
    for base in cutlass.range(0, entries, dup.THREADS):
        entry = base + thread
        copy = Int32(-1)
        if entry < entries:
            slot = entry // group.ranks
            holder = (group.rank + 1 + entry % group.ranks) % group.ranks
            expert = dup.home_expert(foreign, holder, slot, wave, group)
            if expert >= 0:
                free = sync.flag_address(peers, group, sync.SLOTS_FREE, holder)
                sync.wait(free, epoch - 1, holder, sync.SLOTS_FREE, group)
                copy = dup.pack_copy(expert, holder, slot)
        count = dup.append(copies, totals, count, copy)
    # The list is complete, and what some threads acquired holds for the whole block.
    cute.arch.sync_threads()
    return count


@cute.jit
def _move(source: Int64, target: Int64, chunk: Int32, count: cutlass.Constexpr[int]) -> None:
    """``count`` chunks of one thread, a block's width apart; all loads before the first store."""
    start = Int64(chunk) * dup.CHUNK_BYTES
    step = dup.THREADS * dup.CHUNK_BYTES
    words = [ptx.load16(source + start + i * step) for i in range(count)]
    for i in cutlass.range_constexpr(count):
        ptx.store16(target + start + i * step, words[i])


@cute.jit
def _move_tile(source: Int64, target: Int64, tile: Int32, chunks: Int32) -> None:
    thread, _, _ = cute.arch.thread_idx()
    chunk = tile * dup.TILE_CHUNKS + thread
    if (tile + 1) * dup.TILE_CHUNKS <= chunks:
        _move(source, target, chunk, dup.UNROLL)
    else:
        for i in cutlass.range(chunk, chunks, dup.THREADS):
            _move(source, target, i, 1)


@cute.kernel
def _push(
    peers: cute.Tensor,
    foreign: cute.Tensor,
    homes1: cute.Tensor,
    homes2: cute.Tensor,
    pushed: Int64,
    slots: dup.Slots,
    wave: dup.Wave,
    group: sync.Group,
    backward: Int32,
    blocks: Int32,
    missing: Int64,
    kept: cutlass.Constexpr[bool],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    epoch = sync.next_epoch(group.control, sync.PUSHED)
    copies = dup.allocate_ints(sync.MAX_COPIES * (2 if kept else 1))
    # Copies of the projection that comes first, and of both: a list for each, or one for both.
    if cutlass.const_expr(kept):
        count, total = tags.read_missing(copies, missing, backward)
    else:
        count = _find_copies(peers, foreign, copies, wave, group, epoch)
        total = 2 * count
    done = Int32(0)
    for item in cutlass.range(total):
        projection = backward
        copy = item
        if item >= count:
            projection = 1 - backward
            if cutlass.const_expr(not kept):
                copy = item - count
        expert, holder, slot = dup.unpack_copy(copies[copy])
        source = homes1[expert]
        region = slots.offset1
        nbytes = slots.bytes1
        if projection == 1:
            source = homes2[expert]
            region = slots.offset2
            nbytes = slots.bytes2
        target = peers[holder] + region + Int64(slot) * nbytes
        chunks = Int32(nbytes // dup.CHUNK_BYTES)
        tiles = dup.tile_count(chunks)
        first = dup.first_tile(done, block, blocks)
        for tile in cutlass.range(first, tiles, blocks):
            _move_tile(source, target, tile, chunks)
        # Only blocks that had a tile arrive, so a small copy waits for few of them.
        if first < tiles:
            counter = sync.copy_arrivals(group.control, item)
            last = sync.last_block(counter, cutlass.min(tiles, blocks))
            if last and thread == 0:
                # The stores of all blocks are ordered before this one (last_block).
                flag = peers[holder] + pushed + Int64(projection * wave.slots + slot) * 4
                ptx.store_release_sys(flag, epoch)
        done += tiles
    # Never called inside an `and`: the DSL evaluates its first operand twice.
    last = sync.last_block(sync.arrivals(group.control, sync.PUSHED), blocks)
    if last and thread == 0:
        sync.finish_epoch(group.control, sync.PUSHED, epoch)


@cute.jit
def _launch_push(
    peers: cute.Tensor,
    foreign: cute.Tensor,
    homes1: cute.Tensor,
    homes2: cute.Tensor,
    pushed: Int64,
    slots: dup.Slots,
    wave: dup.Wave,
    group: sync.Group,
    backward: Int32,
    blocks: Int32,
    missing: Int64,
    kept: cutlass.Constexpr[bool],
    stream: Any,
) -> None:
    _push(
        peers, foreign, homes1, homes2, pushed, slots, wave, group, backward, blocks, missing, kept
    ).launch(grid=[blocks, 1, 1], block=[dup.THREADS, 1, 1], min_blocks_per_mp=1, stream=stream)


@dataclass(frozen=True)
class PushConfig:
    """The push kernel; weights are bytes to it, so one form serves every dtype and shape."""

    kept: bool = False

    moves_rows: ClassVar[bool] = True

    @property
    def waits(self) -> bool:
        """Where slots keep their copies, the kernel before has waited."""
        return not self.kept

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `compile.Config`."""
        return _launch_push, (
            dup.any_addresses(),
            dup.any_foreign(),
            dup.any_addresses(),
            dup.any_addresses(),
            Int64(0),
            kernel_compile.scalars(dup.Slots),
            kernel_compile.scalars(dup.Wave),
            kernel_compile.scalars(sync.Group),
            Int32(0),
            Int32(0),
            Int64(0),
            self.kept,
            kernel_compile.stream(),
        )


@cute.kernel
def _wait_slots(
    peers: cute.Tensor,
    foreign: cute.Tensor,
    pushed: Int64,
    wave: dup.Wave,
    group: sync.Group,
    projection: Int32,
    first: Int32,
    end: Int32,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    epoch = sync.next_epoch(group.control, sync.SLOTS_FREE)
    for slot in cutlass.range(first + thread, end, dup.SMALL_BLOCK):
        place = wave.index * wave.slots + slot
        if place < wave.homes:
            expert = foreign[group.rank * wave.homes + place]
            if expert >= 0:
                flag = peers[group.rank] + pushed + Int64(projection * wave.slots + slot) * 4
                sync.wait(flag, epoch, expert // wave.homes, sync.PUSHED, group)


@cute.jit
def _launch_wait_slots(
    peers: cute.Tensor,
    foreign: cute.Tensor,
    pushed: Int64,
    wave: dup.Wave,
    group: sync.Group,
    projection: Int32,
    first: Int32,
    end: Int32,
    stream: Any,
) -> None:
    _wait_slots(peers, foreign, pushed, wave, group, projection, first, end).launch(
        grid=[1, 1, 1], block=[dup.SMALL_BLOCK, 1, 1], stream=stream
    )


@dataclass(frozen=True)
class WaitConfig:
    """The kernel of `wait_slots`: one block."""

    signals: ClassVar[bool] = False

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `compile.Config`."""
        return _launch_wait_slots, (
            dup.any_addresses(),
            dup.any_foreign(),
            Int64(0),
            kernel_compile.scalars(dup.Wave),
            kernel_compile.scalars(sync.Group),
            *[Int32(0)] * 3,
            kernel_compile.stream(),
        )


def configs() -> list[PushConfig | WaitConfig]:
    """Every configuration, for the compile test."""
    return [PushConfig(), PushConfig(kept=True), WaitConfig()]
