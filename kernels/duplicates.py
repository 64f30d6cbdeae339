"""What the kernels of duplicates share: where their memory lies, and which copies a wave has.

A *copy* is one home expert on one other rank (its *holder*) in one wave; its *slot* is the place
there. Letters: R ranks, E experts, n = E/R home experts of a rank, B slots of a rank, F1 and F the
widths of FC1 and FC2, H the row width. Slot j mod B of wave j div B has a rank's foreign expert j.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from moonep_megatron.kernels import compile as kernel_compile
from moonep_megatron.kernels import sync

from moonep_megatron.backends.memory import Region

if TYPE_CHECKING:
    from torch import Tensor

    from moonep_megatron.backends.memory import SymmetricMemory

THREADS = 512
WARPS = THREADS // 32
# One thread has 8 chunks of 16 bytes in flight: with fewer, 8 SMs do not fill the link.
UNROLL = 8
CHUNK_BYTES = 16
TILE_CHUNKS = THREADS * UNROLL
# Blocks of the kernels that move no data; at least the most ranks.
SMALL_BLOCK = 128
# A copy in one int: expert << 20 | holder << 10 | slot, each below 1024; -1 is none.
_EXPERT_SHIFT = 20
_HOLDER_SHIFT = 10
_MASK = 1023


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What slots that keep their copies have beside them, see `moonep_megatron.kernels.tags`.

    Attributes:
        tags: int32 [2, B, 4] in every rank's symmetric memory, -1 at first.
        held_RB: int32 [R, B] on the device, the expert last pushed into each slot of each rank, -1
            for none; the same on all ranks.
        missing: int32 on the device, the copies that the next push moves.
    """

    tags: Region
    held_RB: Tensor
    missing: Tensor


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """The symmetric memory of one group's duplicates, as one rank sees it.

    Attributes:
        flags: int32 [STAGES, R].
        pushed: int32 [2, B], epoch at which a slot of a projection was filled.
        weights: slots [B, F1, H] and [B, H, F], any dtype.
        gradients: fp32 slots of the same shapes, or none where other memory has them.
        kept: where copies stay until others are pushed into their slots.
        timeout_ns: bound on every wait.
    """

    memory: SymmetricMemory
    flags: Region
    pushed: Region
    weights: tuple[Region, Region]
    gradients: tuple[Region, Region] | tuple[()]
    kept: Kept | None = None
    rank: int
    ranks: int
    timeout_ns: int

    def __post_init__(self) -> None:
        for region in (*self.weights, *self.gradients):
            if expert_bytes(region) % CHUNK_BYTES:
                raise ValueError(
                    f"an expert's weight of shape {list(region.shape[1:])} is not a multiple of "
                    f"{CHUNK_BYTES} bytes; the hidden size must be a multiple of 8"
                )

    @property
    def slots(self) -> int:
        """B."""
        return self.pushed.shape[1]

    def only(self, projections: Container[int]) -> Duplicates:
        """The same slots, of which a push sees the given projections and no bytes of the others."""
        first, second = (
            region if p in projections else Region(region.offset, (self.slots, 0, 0), region.dtype)
            for p, region in enumerate(self.weights)
        )
        return replace(self, weights=(first, second))

    def group(self, layer: int) -> sync.Group:
        """An argument of every kernel here."""
        memory = self.memory
        return sync.Group(
            self.flags.offset,
            memory.control.data_ptr(),
            memory.fault.data_ptr(),
            self.timeout_ns,
            self.rank,
            self.ranks,
            layer,
        )

    def wave(self, foreign_expert_Rn: Tensor, wave: int) -> tuple[Tensor, Wave]:
        """The table of foreign experts as the kernels take it, and the wave.

        Raises:
            ValueError: when the table is not this group's, or larger than the kernels' lists.
        """
        rows, homes = foreign_expert_Rn.shape
        if rows != self.ranks or rows * homes > sync.MAX_COPIES or rows > SMALL_BLOCK:
            raise ValueError(
                f"foreign_expert_Rn of shape {[rows, homes]} with {self.ranks} ranks: the "
                f"symmetric backend takes at most {sync.MAX_COPIES} experts on {SMALL_BLOCK} "
                "ranks; use --moe-moonep-backend collective"
            )
        return foreign_expert_Rn.view(-1), Wave(wave, self.slots, homes)


class Wave(NamedTuple):
    """Kernel argument: number of the wave, B and n."""

    index: Int32
    slots: Int32
    homes: Int32


class Slots(NamedTuple):
    """Kernel argument: offsets of the slots of both projections, and bytes of one slot."""

    offset1: Int64
    offset2: Int64
    bytes1: Int64
    bytes2: Int64


def any_addresses() -> Any:
    """An example of a device table of addresses."""
    return kernel_compile.vector(Int64, align=8)


def any_foreign() -> Any:
    """An example of a device table of experts."""
    return kernel_compile.vector(Int32, align=4)


def expert_bytes(region: Region) -> int:
    """Bytes of one slot of a region."""
    rows, columns = region.shape[1:]
    return rows * columns * region.dtype.itemsize


def slots_of(regions: tuple[Region, Region]) -> Slots:
    """Both projections as a kernel argument."""
    first, second = regions
    return Slots(first.offset, second.offset, expert_bytes(first), expert_bytes(second))


@cute.jit
def entries(wave: Wave, group: sync.Group) -> Int32:
    """Number of (slot, holder) pairs of a wave; the last wave may have fewer slots."""
    return cutlass.min(wave.slots, wave.homes - wave.index * wave.slots) * group.ranks


@cute.jit
def home_expert(
    foreign: cute.Tensor, holder: Int32, slot: Int32, wave: Wave, group: sync.Group
) -> Int32:
    """Local index of the expert in a slot of a holder, -1 unless this rank is its home."""
    place = wave.index * wave.slots + slot
    expert = foreign[holder * wave.homes + place] - group.rank * wave.homes
    if expert < 0 or expert >= wave.homes:
        expert = Int32(-1)
    return expert


def pack_copy(expert: Int32, holder: Int32, slot: Int32) -> Int32:
    """A copy as one int that is not negative."""
    return (expert << _EXPERT_SHIFT) | (holder << _HOLDER_SHIFT) | slot


def unpack_copy(copy: Int32) -> tuple[Int32, Int32, Int32]:
    """Local expert, holder and slot. The expert of -1 is -1."""
    return copy >> _EXPERT_SHIFT, (copy >> _HOLDER_SHIFT) & _MASK, copy & _MASK


def allocate_ints(count: int) -> cute.Tensor:
    """Ints in shared memory."""
    return cutlass.utils.SmemAllocator().allocate_tensor(
        Int32, cute.make_layout(count), byte_alignment=16
    )


@cute.jit
def append(copies: cute.Tensor, totals: cute.Tensor, count: Int32, copy: Int32) -> Int32:
    """Append every thread's copy (-1 for none) to a list in shared memory, in order of threads.

    All threads of the block call this. The list may be read after the next barrier.

    Args:
        totals: shared int32 [WARPS], scratch.
        count: length so far.

    Returns:
        the new length.
    """
    thread, _, _ = cute.arch.thread_idx()
    keep = copy >= 0
    mask = cute.arch.vote_ballot_sync(keep)
    below = cute.arch.popc(Int32(mask) & Int32(cute.arch.lanemask_lt()))
    # The totals of an earlier call have been read by all.
    cute.arch.sync_threads()
    if thread % 32 == 0:
        totals[thread // 32] = cute.arch.popc(Int32(mask))
    cute.arch.sync_threads()
    place = count + below
    for warp in cutlass.range_constexpr(WARPS):
        if warp < thread // 32:
            place += totals[warp]
        count += totals[warp]
    if keep:
        copies[place] = copy
    return count


@cute.jit
def tile_count(chunks: Int32) -> Int32:
    """Tiles of so many chunks, the last one perhaps not full."""
    return (chunks + TILE_CHUNKS - 1) // TILE_CHUNKS


@cute.jit
def first_tile(done: Int32, block: Int32, blocks: Int32) -> Int32:
    """First tile of a block in the next copy when tiles go round all blocks over all copies.

    So blocks differ by one tile in the whole launch, not by one a copy.

    Args:
        done: tiles of all earlier copies.
    """
    return (block + blocks - done % blocks) % blocks


@cute.kernel
def _signal(peers: cute.Tensor, group: sync.Group, stage: cutlass.Constexpr[int]) -> None:
    thread, _, _ = cute.arch.thread_idx()
    epoch = sync.next_epoch(group.control, stage)
    # The kernels before this one on the stream have ended, so their reads and writes are ordered
    # before these stores with release.
    sync.signal_all(peers, group, stage, epoch)
    cute.arch.sync_threads()
    if thread == 0:
        sync.finish_epoch(group.control, stage, epoch)


@cute.jit
def _launch_signal(
    peers: cute.Tensor, group: sync.Group, stage: cutlass.Constexpr[int], stream: Any
) -> None:
    _signal(peers, group, stage).launch(grid=[1, 1, 1], block=[SMALL_BLOCK, 1, 1], stream=stream)


@dataclass(frozen=True)
class SignalConfig:
    """A kernel that tells all ranks the next epoch of a stage: all work before it has ended."""

    stage: int
    waits: ClassVar[bool] = False

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `compile.Config`."""
        return _launch_signal, (
            any_addresses(),
            kernel_compile.scalars(sync.Group),
            self.stage,
            kernel_compile.stream(),
        )


def signal(duplicates: Duplicates, stage: int) -> None:
    """Launch `SignalConfig`'s kernel on the current stream."""
    kernel_compile.compiled(SignalConfig(stage))(duplicates.memory.peers, duplicates.group(0))


def configs() -> list[SignalConfig]:
    """Every configuration, for the compile test."""
    return [SignalConfig(sync.SLOTS_FREE), SignalConfig(sync.GRADS_READY)]
