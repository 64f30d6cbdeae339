"""Exchange of the counts: afterwards every rank knows what every rank routes to every expert.

Letters: E experts, R ranks, C chunks of tokens (see `moonep_megatron.kernels.counting`).

Each block owns ``COLUMNS`` columns of the counts. It adds its columns over the chunks, stores the
sums into every peer's ``counts[parity, me]``, and the last block to have done so signals. While the
others do the same, it writes the running sums over the chunks. Then it waits for all ranks and adds
its columns over them. No rank is more than one exchange ahead of another, so two halves by the
epoch's parity are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import Int32, Int64, cute
from moonep_megatron.kernels import compile as kc
from moonep_megatron.kernels import ptx, sync, warp
from moonep_megatron.kernels.counting import BAD, EXCESS, HEADER, TOKENS, chunks
from torch import Tensor

COLUMNS = warp.WARP
# First field of a fault record that tells of bad input, beside 1 for a wait that ran out. ``peer``
# is the rank that brought it, ``seen`` how many, ``expected`` the most allowed.
BAD_IDS, EXCESS_CHOICES, TOO_MANY_TOKENS = 2, 3, 4

_THREADS = 512
_WARPS = _THREADS // warp.WARP
_BATCH = 8


@dataclass(frozen=True)
class ExchangeConfig:
    """Compile-time constants of the exchange."""

    ranks: int
    experts: int

    starts_early = True

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `moonep_megatron.kernels.compile.Config`."""
        ranks, experts = self.ranks, self.experts
        blocks = -(-(experts + HEADER) // COLUMNS)

        @cute.kernel
        def kernel(peers: cute.Tensor, group: sync.Group, args: _Arguments) -> None:
            cute.arch.griddepcontrol_wait()
            pitch = experts + HEADER
            block, _, _ = cute.arch.block_idx()
            column = block * COLUMNS + warp.lane_and_warp()[0]
            smem = cutlass.utils.SmemAllocator()
            sums = smem.allocate_tensor(
                Int32, cute.make_layout(2 * (_WARPS + 1) * COLUMNS), byte_alignment=16
            )
            epoch = sync.next_epoch(group.control, sync.EXCHANGED)
            half = args.counts_offset + Int64(epoch & 1) * (ranks * pitch * 4)
            before = _add_chunks(sums, args.chunk_counts, args.chunks, column, pitch)
            mine = half + Int64(group.rank) * (pitch * 4)
            _store_to_peers(sums, peers, mine, block, ranks, pitch)
            last = sync.last_block(sync.arrivals(group.control, sync.EXCHANGED), Int32(blocks))
            if last:
                sync.signal_all(peers, group, sync.EXCHANGED, epoch)
            _write_first(args.chunk_counts, args.chunk_first, before, args.chunks, column, pitch)
            arrived = peers[group.rank] + half
            sync.wait_all(peers, group, sync.EXCHANGED, epoch)
            # Not before: the plan's blocks would hold their SMs for as long as a peer is late.
            cute.arch.griddepcontrol_launch_dependents()
            if last:
                _refuse_bad_input(arrived, group, args.max_tokens, ranks, experts)
                thread, _, _ = cute.arch.thread_idx()
                if thread == 0:
                    sync.finish_epoch(group.control, sync.EXCHANGED, epoch)
            _add_ranks(sums, arrived, args, group.rank, column, ranks, experts)

        @cute.jit
        def launch(peers: cute.Tensor, group: sync.Group, args: _Arguments, stream: Any) -> None:
            kernel(peers, group, args).launch(
                grid=[blocks, 1, 1], block=[_THREADS, 1, 1], use_pdl=True, stream=stream
            )

        scalars = kc.scalars(sync.Group), kc.scalars(_Arguments)
        return launch, (kc.vector(Int64), *scalars, kc.stream())


class _Arguments(NamedTuple):
    """Addresses of this rank's tensors, and sizes."""

    counts_offset: Int64
    """Offset of ``counts[2, R, E + HEADER]`` in the allocation of every rank."""
    max_tokens: Int32
    """S."""
    chunk_counts: Int64
    """Address of ``counts_CE``."""
    chunks: Int32
    """C."""
    chunk_first: Int64
    """Address of ``first_CE``; so are the next of ``counts_RE`` and ``totals_2E``."""
    all_counts: Int64
    totals: Int64


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchanged:
    """What an exchange leaves on every rank, int32 on the device."""

    first_CE: Tensor
    """[C, E + HEADER], entries of each expert in the chunks before each chunk of this rank."""
    counts_RE: Tensor
    """[R, E], T[r,e]."""
    totals_2E: Tensor
    """[2, E], the sum of T over all ranks, and over the ranks before this one."""


def exchange(
    peers: Tensor,
    counts_CE: Tensor,
    *,
    tokens: int,
    max_tokens: int,
    rank: int,
    layer: int,
    counts_offset: int,
    flags_offset: int,
    control: Tensor,
    fault: Tensor,
    timeout_ns: int,
) -> Exchanged:
    """Tell all ranks this rank's counts, and wait for theirs. Collective.

    Bad input of any rank (see ``BAD_IDS`` and its kin) ends the kernel of every rank in a trap,
    with a fault record of the lowest such rank.

    Args:
        peers: int64 [R], addresses of all ranks' symmetric allocations.
        counts_CE: from `moonep_megatron.kernels.counting`.
        tokens, max_tokens: s and S.
        counts_offset: of int32 ``counts[2, R, E + HEADER]`` in the allocation.
        flags_offset: of int32 ``flags[STAGES, R]`` in the allocation.
        control, fault: this rank's control block and pinned fault record.
    """
    ranks, experts = peers.numel(), counts_CE.shape[1] - HEADER
    exchanged = Exchanged(
        first_CE=torch.empty_like(counts_CE),
        counts_RE=counts_CE.new_empty(ranks, experts),
        totals_2E=counts_CE.new_empty(2, experts),
    )
    kc.compiled(ExchangeConfig(ranks, experts))(
        peers,
        sync.Group(
            flags_offset, control.data_ptr(), fault.data_ptr(), timeout_ns, rank, ranks, layer
        ),
        _Arguments(
            counts_offset,
            max_tokens,
            counts_CE.data_ptr(),
            chunks(tokens),
            exchanged.first_CE.data_ptr(),
            exchanged.counts_RE.data_ptr(),
            exchanged.totals_2E.data_ptr(),
        ),
    )
    return exchanged


def configs() -> list[ExchangeConfig]:
    """Configurations that the tests compile."""
    return [ExchangeConfig(8, 896), ExchangeConfig(1, 7), ExchangeConfig(128, 1024)]


@cute.jit
def _spread(sums: cute.Tensor, which: cutlass.Constexpr[int], value: Int32) -> Int32:
    """All threads: this warp's sum over the warps before it, by lane; the total stands last."""
    lane, own = warp.lane_and_warp()
    start = which * (_WARPS + 1) * COLUMNS
    sums[start + own * COLUMNS + lane] = value
    cute.arch.sync_threads()
    before, total = Int32(0), Int32(0)
    for w in cutlass.range_constexpr(_WARPS):
        part = sums[start + w * COLUMNS + lane]
        total += part
        if w < own:
            before += part
    if own == 0:
        sums[start + _WARPS * COLUMNS + lane] = total
    cute.arch.sync_threads()
    return before


@cute.jit
def _own_chunks(chunks: Int32) -> tuple[Int32, Int32]:
    """This warp's first chunk, and the one behind its last."""
    _, own = warp.lane_and_warp()
    each = (chunks + _WARPS - 1) // _WARPS
    first = cutlass.min(own * each, chunks)
    return first, cutlass.min(first + each, chunks)


@cute.jit
def _add_chunks(
    sums: cute.Tensor,
    chunk_counts: Int64,
    chunks: Int32,
    column: Int32,
    pitch: cutlass.Constexpr[int],
) -> Int32:
    """Sum of this block's columns over the chunks, into ``sums``; returns that before this warp."""
    first, last = _own_chunks(chunks)
    mine = Int32(0)
    if column < pitch:
        for chunk in cutlass.range(first, last, unroll=8):
            mine += ptx.load(chunk_counts + (Int64(chunk) * pitch + column) * 4, "s32")
    return _spread(sums, 0, mine)


@cute.jit
def _write_first(
    chunk_counts: Int64,
    chunk_first: Int64,
    before: Int32,
    chunks: Int32,
    column: Int32,
    pitch: cutlass.Constexpr[int],
) -> None:
    """Running sums of this block's columns over this warp's chunks."""
    first, last = _own_chunks(chunks)
    running = before
    if column < pitch:
        for start in cutlass.range(first, last, _BATCH):
            # Loads before stores: the compiler cannot know that they never meet.
            counts = []
            for i in cutlass.range_constexpr(_BATCH):
                chunk = cutlass.min(start + i, last - 1)
                counts.append(ptx.load(chunk_counts + (Int64(chunk) * pitch + column) * 4, "s32"))
            for i in cutlass.range_constexpr(_BATCH):
                if start + i < last:
                    at = (Int64(start + i) * pitch + column) * 4
                    ptx.store(chunk_first + at, running, "s32")
                    running += counts[i]


@cute.jit
def _store_to_peers(
    sums: cute.Tensor,
    peers: cute.Tensor,
    row: Int64,
    block: Int32,
    ranks: cutlass.Constexpr[int],
    pitch: cutlass.Constexpr[int],
) -> None:
    lane, own = warp.lane_and_warp()
    column = block * COLUMNS + lane
    value = sums[_WARPS * COLUMNS + lane]
    if column < pitch:
        for peer in cutlass.range(own, ranks, _WARPS):
            ptx.store(peers[peer] + row + Int64(column) * 4, value, "s32")


@cute.jit
def _add_ranks(
    sums: cute.Tensor,
    counts: Int64,
    args: _Arguments,
    rank: Int32,
    column: Int32,
    ranks: cutlass.Constexpr[int],
    experts: cutlass.Constexpr[int],
) -> None:
    """Copy this block's columns of all ranks' counts, and add them over the ranks."""
    lane, own = warp.lane_and_warp()
    total, below = Int32(0), Int32(0)
    if column < experts:
        for r in cutlass.range(own, ranks, _WARPS):
            value = ptx.load(counts + (r * (experts + HEADER) + column) * 4, "s32")
            ptx.store(args.all_counts + (r * experts + column) * 4, value, "s32")
            total += value
            if r < rank:
                below += value
    _spread(sums, 0, total)
    _spread(sums, 1, below)
    if own < 2 and column < experts:
        start = own * (_WARPS + 1) * COLUMNS + _WARPS * COLUMNS
        ptx.store(args.totals + (own * experts + column) * 4, sums[start + lane], "s32")


@cute.jit
def _refuse_bad_input(
    counts: Int64,
    group: sync.Group,
    max_tokens: Int32,
    ranks: cutlass.Constexpr[int],
    experts: cutlass.Constexpr[int],
) -> None:
    """Trap with a fault record where a rank's header tells of bad input; one warp's work."""
    lane, own = warp.lane_and_warp()
    if own == 0:
        found = Int32(0)
        for start in cutlass.range(0, ranks, warp.WARP):
            peer = start + lane
            kind, seen, most = Int32(0), Int32(0), Int32(0)
            if peer < ranks:
                header = counts + (peer * (experts + HEADER) + experts) * 4
                brought = ptx.load(header + TOKENS * 4, "s32")
                bad = ptx.load(header + BAD * 4, "s32")
                excess = ptx.load(header + EXCESS * 4, "s32")
                if brought > max_tokens:
                    kind, seen, most = Int32(TOO_MANY_TOKENS), brought, max_tokens
                if excess > 0:
                    kind, seen, most = Int32(EXCESS_CHOICES), excess, Int32(0)
                if bad > 0:
                    kind, seen, most = Int32(BAD_IDS), bad, Int32(0)
            who = warp.ballot(kind != 0)
            if who != 0 and found == 0:
                found = Int32(1)
                if lane == warp.lowest(who):
                    sync.fail(group, kind, peer, sync.EXCHANGED, most, seen)
