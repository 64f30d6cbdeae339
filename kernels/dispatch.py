"""Dispatch: each token row once to every rank that computes one of its entries.

The owner of a token stores its row at the receive row of each destination, and, in the form with
probabilities, what the destination needs to find its way back: ``rows_of``, ``source_row`` and
``probs``. Backward dispatches the output gradient alone: the rest is there from forward.

A row is cut into equal stretches of at most 16 chunks of 16 bytes a thread, and a warp takes one
stretch at a time, so that all warps end together. It loads the stretch once and stores it to one
destination after the other, to its own rank last: the links are what there is too little of. The
tables of a token are stored while one of its stretches loads, and the entries of the warp's next
stretch are loaded before this one moves. Warps begin at different destinations, so that no link is
crowded.

Ordering: no store before every rank has said that its receive rows are free; the last block says
that this rank's rows have arrived, then waits until all have, so that whatever follows on the
stream may read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import torch
from cutlass import Int32, Int64, Uint32, cute
from moonep_megatron.kernels import compile as kernel_compile
from moonep_megatron.kernels import ptx, rows, sync

if TYPE_CHECKING:
    from torch import Tensor

# Chunks that a thread loads before it stores the first: 64 of its 128 registers.
UNROLL = 16


def dispatch(
    memory: rows.RowMemory,
    x_sH: Tensor,
    rank_sK: Tensor,
    row_sK: Tensor,
    probs_sK: Tensor | None = None,
    *,
    sms: int,
    layer: int = 0,
) -> None:
    """Send rows to their receive rows on every rank; collective, on the current stream.

    Args:
        x_sH: [s, H], bf16, fp16 or fp32, rows dense and 16-byte aligned, any row stride.
        rank_sK: int32 [s, K], destination rank of each entry, -1 for none.
        row_sK: int32 [s, K], its grouped row there.
        probs_sK: fp32 [s, K], which travel with ``rows_of`` and ``source_row``; none: rows alone.
        sms: blocks of the launch, one an SM.
        layer: named in a fault record.

    Afterwards, on this rank: the receive rows of all ranks' tokens; with probabilities also
    ``rows_of`` (with R <= K of all M rows; else only of the rows m with ``source_row[m] == m``),
    and ``source_row`` and ``probs`` of the rows that the plan gave this rank.
    """
    memory.check_tokens(x_sH, rank_sK, row_sK)
    tokens, topk = rank_sK.shape
    if probs_sK is not None:
        rows.check_dense("probs_sK", probs_sK, torch.float32, (tokens, topk))
    config = Dispatch(topk=topk, by_token=memory.ranks <= topk, metadata=probs_sK is not None)
    kernel_compile.compiled(config)(
        memory.memory.peers,
        memory.group(layer),
        _Arguments(
            x_sH.data_ptr(),
            x_sH.stride(0) * x_sH.element_size(),
            rank_sK.data_ptr(),
            row_sK.data_ptr(),
            0 if probs_sK is None else probs_sK.data_ptr(),
            memory.receive.offset,
            memory.rows_of.offset,
            memory.source_row.offset,
            memory.probs.offset,
            tokens,
            memory.max_tokens,
            memory.chunks(x_sH),
            sms,
        ),
    )


def free_receive(memory: rows.RowMemory) -> None:
    """Tell every rank that this one is done with the receive rows of the last dispatch.

    Launch it once between two dispatches, behind the last reader of the receive rows, ``rows_of``,
    ``source_row`` and ``probs``.
    """
    kernel_compile.compiled(FreeReceive())(memory.memory.peers, memory.group(0))


class _Arguments(NamedTuple):
    """Addresses of a rank's own tensors, offsets in every rank's symmetric memory, and sizes."""

    x: Int64
    """Address of the tokens' rows."""
    x_stride: Int64
    """Bytes from one of them to the next."""
    rank_sK: Int64
    """Address; so is ``row_sK``."""
    row_sK: Int64
    probs_sK: Int64
    """Address, 0 for rows alone."""
    receive: Int64
    """Offset; so are ``rows_of``, ``source_row`` and ``probs``."""
    rows_of: Int64
    source_row: Int64
    probs: Int64
    tokens: Int32
    """s."""
    max_tokens: Int32
    """S."""
    chunks: Int32
    """Of 16 bytes, in a row."""
    sms: Int32
    """Blocks of the launch."""


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Compile-time constants of dispatch; the dtype is not one, for it moves bytes.

    Attributes:
        topk: K.
        by_token: R <= K, so token t of rank r has receive row r*S + t.
        metadata: send probabilities, ``rows_of`` and ``source_row`` too.
    """

    topk: int
    by_token: bool
    metadata: bool
    moves_rows: ClassVar[bool] = True

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `compile.Config`."""
        return _launch, (
            kernel_compile.vector(Int64),
            self,
            kernel_compile.scalars(sync.Group),
            kernel_compile.scalars(_Arguments),
            kernel_compile.stream(),
        )


@dataclass(frozen=True)
class FreeReceive:
    """`free_receive` has no constants."""

    waits: ClassVar[bool] = False

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `compile.Config`."""
        return _launch_free, (
            kernel_compile.vector(Int64),
            kernel_compile.scalars(sync.Group),
            kernel_compile.stream(),
        )


def configs() -> list[Dispatch | FreeReceive]:
    """Representative configurations."""
    return [
        FreeReceive(),
        *(
            Dispatch(topk=topk, by_token=by_token, metadata=metadata)
            for topk in (1, 8)
            for by_token in (True, False)
            for metadata in (True, False)
        ),
        Dispatch(topk=32, by_token=True, metadata=True),
    ]


@cute.jit
def _launch(
    peers: cute.Tensor,
    config: cutlass.Constexpr[Dispatch],
    group: sync.Group,
    args: _Arguments,
    stream: Any,
) -> None:
    _kernel(peers, config, group, args).launch(
        grid=[args.sms, 1, 1], block=[rows.THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
    )


@cute.kernel
def _kernel(
    peers: cute.Tensor,
    config: cutlass.Constexpr[Dispatch],
    group: sync.Group,
    args: _Arguments,
) -> None:
    lane, warp = rows.place()
    warps = args.sms * rows.WARPS
    rank = group.rank
    epoch = sync.next_epoch(group.control, sync.DISPATCHED)
    # With R <= K this rank owns the receive rows of S tokens on every rank, also of those it does
    # not bring: their rows_of must say "none", whatever an earlier pass left there.
    last = args.tokens
    if cutlass.const_expr(config.by_token and config.metadata):
        last = args.max_tokens
    stretches, span = rows.stretches(args.chunks, UNROLL)
    # The tables of successive tokens of a warp fall to different stretches.
    turns = cutlass.max(warps // stretches, 1)
    next_to, next_row, next_prob = _entries(args, warp // stretches, lane, config)
    sync.wait_all(peers, group, sync.RECEIVE_FREE, epoch - 1)
    for item in cutlass.range(warp, last * stretches, warps, unroll=1):
        token, part = item // stretches, item % stretches
        to, row, prob = next_to, next_row, next_prob
        next_to, next_row, next_prob = _entries(args, (item + warps) // stretches, lane, config)
        carry, first = rows.carriers(to, lane)
        there = rows.receive_row(row, first, token, rank, args.max_tokens, config.by_token)
        base = peers[cutlass.max(to, 0)]
        target = base + args.receive + Int64(there) * (args.chunks * rows.CHUNK)
        begin = part * span
        end = cutlass.min(begin + span, args.chunks)
        if carry == 0:
            end = Int32(0)
        words = _load_stretch(args.x + Int64(token) * args.x_stride, begin + lane, end)
        if cutlass.const_expr(config.metadata):  # noqa: SIM102 - run time inside compile time
            if part == token // turns % stretches:
                if to >= 0:
                    ptx.store(base + args.source_row + Int64(row) * 4, there, "s32")
                    ptx.store(base + args.probs + Int64(row) * 4, prob, "s32")
                _store_rows_of(peers, group, args.rows_of, to, row, there, carry, lane, config)
        home = cute.arch.vote_ballot_sync(to == rank)
        turn = (token + rank) % config.topk
        _store_stretch(words, target, carry, home, turn, begin + lane, end)

    if sync.last_block(sync.arrivals(group.control, sync.DISPATCHED), args.sms):
        sync.signal_all(peers, group, sync.DISPATCHED, epoch)
        sync.wait_all(peers, group, sync.DISPATCHED, epoch)
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            sync.finish_epoch(group.control, sync.DISPATCHED, epoch)


@cute.jit
def _store_rows_of(
    peers: cute.Tensor,
    group: sync.Group,
    rows_of: Int64,
    to: Int32,
    row: Int32,
    there: Int32,
    carry: Int32,
    lane: Int32,
    config: cutlass.Constexpr[Dispatch],
) -> None:
    """Store ``rows_of`` of the warp's token on its destinations; with R <= K on all ranks."""
    if cutlass.const_expr(config.by_token):
        for i in cutlass.range(group.ranks, unroll=1):
            peer = group.rank + 1 + i
            if peer >= group.ranks:
                peer = peer - group.ranks
            _store_one(peers[peer] + rows_of, there, to == peer, row, lane, config.topk)
    else:
        left = carry
        while left != 0:
            k = rows.lowest(left)
            left = left & (left - 1)
            peer = cute.arch.shuffle_sync(to, k)
            m = cute.arch.shuffle_sync(there, k)
            _store_one(peers[peer] + rows_of, m, to == peer, row, lane, config.topk)


@cute.jit
def _store_one(
    region: Int64,
    m: Int32,
    member: cutlass.Boolean,
    row: Int32,
    lane: Int32,
    topk: cutlass.Constexpr[int],
) -> None:
    """Store ``rows_of[m, :]``: the rows of the member lanes in order, then -1, one store a lane."""
    members = cute.arch.vote_ballot_sync(member)
    below = (Int32(1) << lane) - 1
    # Members take the places in front in their order, the other lanes those behind in theirs.
    column = cute.arch.popc(members & below)
    value = row
    if not member:
        column = cute.arch.popc(members) + lane - column
        value = Int32(-1)
    if lane < topk:
        ptx.store(region + (Int64(m) * topk + column) * 4, value, "s32")


@cute.jit
def _entries(
    args: _Arguments, token: Int32, lane: Int32, config: cutlass.Constexpr[Dispatch]
) -> tuple[Int32, Int32, Int32]:
    """Lane k's entry of a token: destination, row there, and probability as bits."""
    prob = Int32(0)
    if cutlass.const_expr(config.metadata):
        prob = rows.entry(args.probs_sK, token, args.tokens, lane, config.topk)
    to = rows.entry(args.rank_sK, token, args.tokens, lane, config.topk)
    row = rows.entry(args.row_sK, token, args.tokens, lane, config.topk)
    return to, row, prob


def _load_stretch(source: Int64, chunk: Int32, end: Int32) -> list[tuple[Uint32, ...]]:
    """This lane's chunks of a row from its first one on, ``LANES`` apart."""
    start = source + Int64(chunk) * rows.CHUNK
    return [
        ptx.load16_if(chunk + i * rows.LANES < end, start + i * rows.STRIDE, streaming=True)
        for i in range(UNROLL)
    ]


@cute.jit
def _store_stretch(
    words: list[tuple[Uint32, ...]],
    target: Int64,
    carry: Int32,
    home: Int32,
    turn: Int32,
    chunk: Int32,
    end: Int32,
) -> None:
    """Store them to the target of every carrying lane, from lane ``turn`` on, home's at the end."""
    left = carry
    while left != 0:
        pool = left & ~home
        if pool == 0:
            pool = left
        pick = pool & (Int32(-1) << turn)
        if pick == 0:
            pick = pool
        k = rows.lowest(pick)
        left = left & ~(Int32(1) << k)
        at = cute.arch.shuffle_sync(target, k) + Int64(chunk) * rows.CHUNK
        for i in cutlass.range_constexpr(UNROLL):
            ptx.store16_if(chunk + i * rows.LANES < end, at + i * rows.STRIDE, words[i])


@cute.kernel
def _free_kernel(peers: cute.Tensor, group: sync.Group) -> None:
    # The readers were earlier kernels of this stream; the fence keeps their loads before the flag.
    ptx.fence_sys()
    epoch = sync.current_epoch(group.control, sync.DISPATCHED)
    sync.signal_all(peers, group, sync.RECEIVE_FREE, epoch)


@cute.jit
def _launch_free(peers: cute.Tensor, group: sync.Group, stream: Any) -> None:
    _free_kernel(peers, group).launch(grid=[1, 1, 1], block=[rows.MAX_RANKS, 1, 1], stream=stream)
