"""Pull: a home rank reads the slot gradients of its experts from their holders and adds them.

One launch a wave, both projections, usually on a side stream. An element of a target becomes
``target + ((g_a + g_b) + ...)`` over the holders a < b < ... in fp32, rounded once: the same bits
whatever the number of blocks. The holder launches `grads_ready` after computing the slot gradients
of a wave, and `wait_pulled` before it overwrites them.

Who may write what: a holder overwrites slot gradients after every home has signalled PULLED for
the wave before; a home alone writes its targets, so nothing else may add to them meanwhile. The
holder counts waves by its own `grads_ready`, because its own pull runs beside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import torch
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, cute
from moonep_megatron.kernels import compile as kernel_compile
from moonep_megatron.kernels import duplicates as dup
from moonep_megatron.kernels import ptx, sync
from torch import Tensor

_DTYPES = {torch.float32: Float32, torch.bfloat16: BFloat16, torch.float16: Float16}
# fp32 gradients in a chunk, and as many elements of the target.
_WIDTH = dup.CHUNK_BYTES // 4


def pull_gradients(
    duplicates: dup.Duplicates,
    foreign_expert_Rn: Tensor,
    targets: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    wave: int,
    *,
    sms: int = 12,
    layer: int = 0,
) -> None:
    """Launch the pull of one wave on the current stream. All ranks launch it, in the same order.

    All pulls of a group must be ordered on their streams.

    Args:
        foreign_expert_Rn: int32 [R, n] on the device, the plan's.
        targets: int64 [n] on the device for FC1 and FC2, the address of each local expert's
            contiguous target (a multiple of 16), added to in place.
        dtype: of the targets: float32, bfloat16 or float16.
        sms: blocks.
        layer: what a fault record names.

    Raises:
        TypeError: for another dtype.
    """
    if dtype not in _DTYPES:
        raise TypeError(f"gradients are added in {', '.join(map(str, _DTYPES))}, not in {dtype}")
    foreign, which = duplicates.wave(foreign_expert_Rn, wave)
    kernel_compile.compiled(PullConfig(str(dtype)))(
        duplicates.memory.peers,
        foreign,
        *targets,
        dup.slots_of(duplicates.gradients),
        which,
        duplicates.group(layer),
        sms,
    )


def grads_ready(duplicates: dup.Duplicates) -> None:
    """Tell all homes, once a wave, that this rank's slot gradients of both projections are done."""
    dup.signal(duplicates, sync.GRADS_READY)


def wait_pulled(duplicates: dup.Duplicates, *, layer: int = 0) -> None:
    """Hold the current stream until all homes have pulled the last wave that was `grads_ready`."""
    kernel_compile.compiled(WaitConfig())(duplicates.memory.peers, duplicates.group(layer))


@cute.jit
def _find_copies(
    peers: cute.Tensor,
    foreign: cute.Tensor,
    copies: cute.Tensor,
    wave: dup.Wave,
    group: sync.Group,
    epoch: Int32,
) -> Int32:
    """List this home's copies by expert, then holder, -1 behind the last; wait for the holders."""
    thread, _, _ = cute.arch.thread_idx()
    totals = dup.allocate_ints(dup.WARPS)
    # held[expert, holder] is the slot, or -1: a holder has an expert once.
    held = dup.allocate_ints(sync.MAX_COPIES)
    pairs = wave.homes * group.ranks
    for pair in cutlass.range(thread, pairs, dup.THREADS):
        held[pair] = Int32(-1)
    cute.arch.sync_threads()
    for entry in cutlass.range(thread, dup.entries(wave, group), dup.THREADS):
        slot = entry // group.ranks
        holder = entry % group.ranks
        expert = dup.home_expert(foreign, holder, slot, wave, group)
        if expert >= 0:
            ready = sync.flag_address(peers, group, sync.GRADS_READY, holder)
            sync.wait(ready, epoch, holder, sync.GRADS_READY, group)
            held[expert * group.ranks + holder] = slot
    # The table is complete, and what some threads acquired holds for the whole block.
    cute.arch.sync_threads()
    count = Int32(0)
    for base in cutlass.range(0, pairs, dup.THREADS):
        pair = base + thread
        copy = Int32(-1)
        if pair < pairs:
            slot = held[pair]
            if slot >= 0:
                copy = dup.pack_copy(pair // group.ranks, pair % group.ranks, slot)
        count = dup.append(copies, totals, count, copy)
    if thread == 0:
        copies[count] = Int32(-1)
    cute.arch.sync_threads()
    return count


@cute.jit
def _slot_address(
    peers: cute.Tensor, copies: cute.Tensor, copy: Int32, region: Int64, nbytes: Int64
) -> Int64:
    _, holder, slot = dup.unpack_copy(copies[copy])
    return peers[holder] + region + Int64(slot) * nbytes


def _load_target(address: Int64, dtype: type) -> list[Uint32]:
    """The words of ``_WIDTH`` elements."""
    return [*(ptx.load16(address) if dtype is Float32 else ptx.load8(address))]


def _store_target(address: Int64, values: list[Float32], dtype: type) -> None:
    """Store ``_WIDTH`` elements, each rounded once."""
    each = 1 if dtype is Float32 else 2
    words = [ptx.pack(tuple(values[i : i + each]), dtype) for i in range(0, _WIDTH, each)]
    (ptx.store16 if dtype is Float32 else ptx.store8)(address, tuple(words))


def _floats(words: list[Uint32], dtype: type) -> list[Float32]:
    return [value for word in words for value in ptx.unpack(word, dtype)]


@cute.jit
def _add(
    peers: cute.Tensor,
    copies: cute.Tensor,
    first: Int32,
    end: Int32,
    source: Int64,
    target: Int64,
    region: Int64,
    nbytes: Int64,
    chunk: Int32,
    count: cutlass.Constexpr[int],
    dtype: cutlass.Constexpr[type],
    alone: cutlass.Constexpr[bool],
) -> None:
    """``count`` chunks of one thread, a block's width apart, over the copies [first, end).

    Args:
        source: address of the first copy's slot.
        alone: there is one copy. Then nothing stands between the loads from far and from near, not
            even a loop without turns, at which the loads before it are waited for.
    """
    start = Int64(chunk) * dup.CHUNK_BYTES
    step = dup.THREADS * dup.CHUNK_BYTES
    # Elements of the target may be narrower than the fp32 gradients.
    target += Int64(chunk) * (_WIDTH * dtype.width // 8)
    target_step = dup.THREADS * (_WIDTH * dtype.width // 8)
    far = [ptx.load16(source + start + i * step) for i in range(count)]
    if cutlass.const_expr(alone):
        near = [_load_target(target + i * target_step, dtype) for i in range(count)]
    sums = cute.make_rmem_tensor(count * _WIDTH, Float32)
    for i in cutlass.range_constexpr(count):
        for k in cutlass.range_constexpr(_WIDTH):
            sums[i * _WIDTH + k] = _floats(far[i], Float32)[k]
    if cutlass.const_expr(not alone):
        for copy in cutlass.range(first + 1, end, unroll=1):
            other = _slot_address(peers, copies, copy, region, nbytes) + start
            more = [ptx.load16(other + i * step) for i in range(count)]
            for i in cutlass.range_constexpr(count):
                for k in cutlass.range_constexpr(_WIDTH):
                    sums[i * _WIDTH + k] = sums[i * _WIDTH + k] + _floats(more[i], Float32)[k]
        # Earlier would take more registers than there are.
        near = [_load_target(target + i * target_step, dtype) for i in range(count)]
    for i in cutlass.range_constexpr(count):
        old = _floats(near[i], dtype)
        new = [old[k] + sums[i * _WIDTH + k] for k in range(_WIDTH)]
        _store_target(target + i * target_step, new, dtype)


@cute.jit
def _add_tile(
    peers: cute.Tensor,
    copies: cute.Tensor,
    first: Int32,
    end: Int32,
    source: Int64,
    target: Int64,
    region: Int64,
    nbytes: Int64,
    tile: Int32,
    chunks: Int32,
    dtype: cutlass.Constexpr[type],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    chunk = tile * dup.TILE_CHUNKS + thread
    where = (peers, copies, first, end, source, target, region, nbytes)
    if (tile + 1) * dup.TILE_CHUNKS <= chunks:
        if end - first == 1:
            _add(*where, chunk, dup.UNROLL, dtype, True)
        else:
            _add(*where, chunk, dup.UNROLL, dtype, False)
    else:
        for i in cutlass.range(chunk, chunks, dup.THREADS):
            _add(*where, i, 1, dtype, False)


@cute.jit
def _pull_projection(
    peers: cute.Tensor,
    copies: cute.Tensor,
    count: Int32,
    targets: cute.Tensor,
    region: Int64,
    nbytes: Int64,
    done: Int32,
    blocks: Int32,
    dtype: cutlass.Constexpr[type],
) -> Int32:
    """Pull one projection of all listed experts.

    Args:
        done: tiles before this projection, see `duplicates.first_tile`.

    Returns:
        the tiles behind it.
    """
    block, _, _ = cute.arch.block_idx()
    chunks = Int32(nbytes // dup.CHUNK_BYTES)
    tiles = dup.tile_count(chunks)
    first = Int32(0)
    while first < count:
        expert, _, _ = dup.unpack_copy(copies[first])
        end = first + 1
        # The -1 behind the last copy ends the last expert.
        while dup.unpack_copy(copies[end])[0] == expert:
            end += 1
        source = _slot_address(peers, copies, first, region, nbytes)
        target = targets[expert]
        for tile in cutlass.range(dup.first_tile(done, block, blocks), tiles, blocks):
            _add_tile(
                peers,
                copies,
                first,
                end,
                source,
                target,
                region,
                nbytes,
                tile,
                chunks,
                dtype,
            )
        done += tiles
        first = end
    return done


@cute.kernel
def _pull(
    peers: cute.Tensor,
    foreign: cute.Tensor,
    targets1: cute.Tensor,
    targets2: cute.Tensor,
    grads: dup.Slots,
    wave: dup.Wave,
    group: sync.Group,
    blocks: Int32,
    dtype: cutlass.Constexpr[type],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    epoch = sync.next_epoch(group.control, sync.PULLED)
    copies = dup.allocate_ints(sync.MAX_COPIES + 1)
    count = _find_copies(peers, foreign, copies, wave, group, epoch)
    done = _pull_projection(
        peers, copies, count, targets1, grads.offset1, grads.bytes1, Int32(0), blocks, dtype
    )
    _pull_projection(
        peers, copies, count, targets2, grads.offset2, grads.bytes2, done, blocks, dtype
    )
    # The values that all blocks loaded have been used, so the holders may overwrite them.
    if sync.last_block(sync.arrivals(group.control, sync.PULLED), blocks):
        sync.signal_all(peers, group, sync.PULLED, epoch)
        if thread == 0:
            sync.finish_epoch(group.control, sync.PULLED, epoch)


@cute.jit
def _launch_pull(
    peers: cute.Tensor,
    foreign: cute.Tensor,
    targets1: cute.Tensor,
    targets2: cute.Tensor,
    grads: dup.Slots,
    wave: dup.Wave,
    group: sync.Group,
    blocks: Int32,
    dtype: cutlass.Constexpr[type],
    stream: Any,
) -> None:
    _pull(peers, foreign, targets1, targets2, grads, wave, group, blocks, dtype).launch(
        grid=[blocks, 1, 1], block=[dup.THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
    )


@dataclass(frozen=True)
class PullConfig:
    """The pull kernel; ``dtype`` of the targets as torch prints it."""

    dtype: str

    @property
    def moves_rows(self) -> bool:
        """Whether it also stores 16 bytes at once; narrow targets take 8 for 16 of gradients."""
        return self.dtype == str(torch.float32)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `compile.Config`."""
        dtype = next(kind for name, kind in _DTYPES.items() if str(name) == self.dtype)
        return _launch_pull, (
            dup.any_addresses(),
            dup.any_foreign(),
            dup.any_addresses(),
            dup.any_addresses(),
            kernel_compile.scalars(dup.Slots),
            kernel_compile.scalars(dup.Wave),
            kernel_compile.scalars(sync.Group),
            Int32(0),
            dtype,
            kernel_compile.stream(),
        )


@cute.kernel
def _wait_pulled(peers: cute.Tensor, group: sync.Group) -> None:
    thread, _, _ = cute.arch.thread_idx()
    epoch = sync.current_epoch(group.control, sync.GRADS_READY)
    if thread < group.ranks:
        pulled = sync.flag_address(peers, group, sync.PULLED, thread)
        sync.wait(pulled, epoch, thread, sync.PULLED, group)


@cute.jit
def _launch_wait_pulled(peers: cute.Tensor, group: sync.Group, stream: Any) -> None:
    _wait_pulled(peers, group).launch(grid=[1, 1, 1], block=[dup.SMALL_BLOCK, 1, 1], stream=stream)


@dataclass(frozen=True)
class WaitConfig:
    """The kernel of `wait_pulled`: one block."""

    signals: ClassVar[bool] = False

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `compile.Config`."""
        return _launch_wait_pulled, (
            dup.any_addresses(),
            kernel_compile.scalars(sync.Group),
            kernel_compile.stream(),
        )


def configs() -> list[PullConfig | WaitConfig]:
    """Every configuration, for the compile test."""
    return [*(PullConfig(str(dtype)) for dtype in _DTYPES), WaitConfig()]
