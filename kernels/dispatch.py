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
from typing import TYPE_CHECKING, Any, ClassVar

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
        *memory.common,
        layer,
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
    )


def free_receive(memory: rows.RowMemory) -> None:
    """Tell every rank that this one is done with the receive rows of the last dispatch.

    Launch it once between two dispatches, behind the last reader of the receive rows, ``rows_of``,
    ``source_row`` and ``probs``.
    """
    peers, flags, control, _, _, rank, ranks = memory.common
    kernel_compile.compiled(FreeReceive())(peers, flags, control, rank, ranks)


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
        examples = (*[Int64(0)] * 9, *[Int32(0)] * 4)
        return _launch, (*rows.common_examples(), *examples, self, kernel_compile.stream())


@dataclass(frozen=True)
class FreeReceive:
    """`free_receive` has no constants."""

    waits: ClassVar[bool] = False

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `compile.Config`."""
        return _launch_free, (
            kernel_compile.vector(Int64),
            *[Int64(0)] * 2,
            *[Int32(0)] * 2,
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
    flags: Int64,
    control: Int64,
    fault: Int64,
    timeout_ns: Int64,
    rank: Int32,
    ranks: Int32,
    layer: Int32,
    x: Int64,
    x_stride: Int64,
    rank_sK: Int64,
    row_sK: Int64,
    probs_sK: Int64,
    receive: Int64,
    rows_of: Int64,
    source_row: Int64,
    probs: Int64,
    tokens: Int32,
    max_tokens: Int32,
    chunks: Int32,
    sms: Int32,
    config: cutlass.Constexpr[Dispatch],
    stream: Any,
) -> None:
    _kernel(
        peers,
        flags,
        control,
        fault,
        timeout_ns,
        rank,
        ranks,
        layer,
        x,
        x_stride,
        rank_sK,
        row_sK,
        probs_sK,
        receive,
        rows_of,
        source_row,
        probs,
        tokens,
        max_tokens,
        chunks,
        sms,
        config,
    ).launch(grid=[sms, 1, 1], block=[rows.THREADS, 1, 1], min_blocks_per_mp=1, stream=stream)


@cute.kernel
def _kernel(
    peers: cute.Tensor,
    flags: Int64,
    control: Int64,
    fault: Int64,
    timeout_ns: Int64,
    rank: Int32,
    ranks: Int32,
    layer: Int32,
    x: Int64,
    x_stride: Int64,
    rank_sK: Int64,
    row_sK: Int64,
    probs_sK: Int64,
    receive: Int64,
    rows_of: Int64,
    source_row: Int64,
    probs: Int64,
    tokens: Int32,
    max_tokens: Int32,
    chunks: Int32,
    sms: Int32,
    config: cutlass.Constexpr[Dispatch],
) -> None:
    lane, warp = rows.place()
    warps = sms * rows.WARPS
    epoch = sync.next_epoch(control, sync.DISPATCHED)
    # With R <= K this rank owns the receive rows of S tokens on every rank, also of those it does
    # not bring: their rows_of must say "none", whatever an earlier pass left there.
    last = tokens
    if cutlass.const_expr(config.by_token and config.metadata):
        last = max_tokens
    stretches, span = rows.stretches(chunks, UNROLL)
    # The tables of successive tokens of a warp fall to different stretches.
    turns = cutlass.max(warps // stretches, 1)
    next_to, next_row, next_prob = _entries(
        rank_sK, row_sK, probs_sK, warp // stretches, tokens, lane, config
    )
    mine = peers[rank]
    free = mine + sync.flag_offset(flags, sync.RECEIVE_FREE, ranks)
    sync.wait_all(free, ranks, epoch - 1, sync.RECEIVE_FREE, fault, timeout_ns, rank, layer)
    for item in cutlass.range(warp, last * stretches, warps, unroll=1):
        token, part = item // stretches, item % stretches
        to, row, prob = next_to, next_row, next_prob
        next_to, next_row, next_prob = _entries(
            rank_sK, row_sK, probs_sK, (item + warps) // stretches, tokens, lane, config
        )
        carry, first = rows.carriers(to, lane)
        there = rows.receive_row(row, first, token, rank, max_tokens, config.by_token)
        base = peers[cutlass.max(to, 0)]
        target = base + receive + Int64(there) * (chunks * rows.CHUNK)
        begin = part * span
        end = cutlass.min(begin + span, chunks)
        if carry == 0:
            end = Int32(0)
        words = _load_stretch(x + Int64(token) * x_stride, begin + lane, end)
        if cutlass.const_expr(config.metadata):  # noqa: SIM102 - run time inside compile time
            if part == token // turns % stretches:
                if to >= 0:
                    ptx.store(base + source_row + Int64(row) * 4, there, "s32")
                    ptx.store(base + probs + Int64(row) * 4, prob, "s32")
                _store_rows_of(peers, rows_of, to, row, there, carry, rank, ranks, lane, config)
        home = cute.arch.vote_ballot_sync(to == rank)
        turn = (token + rank) % config.topk
        _store_stretch(words, target, carry, home, turn, begin + lane, end)

    if sync.last_block(sync.arrivals(control, sync.DISPATCHED), sms):
        arrived = sync.flag_offset(flags, sync.DISPATCHED, ranks)
        sync.signal_all(peers, arrived + Int64(rank) * 4, ranks, epoch)
        sync.wait_all(mine + arrived, ranks, epoch, sync.DISPATCHED, fault, timeout_ns, rank, layer)
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            sync.finish_epoch(control, sync.DISPATCHED, epoch)


@cute.jit
def _store_rows_of(
    peers: cute.Tensor,
    rows_of: Int64,
    to: Int32,
    row: Int32,
    there: Int32,
    carry: Int32,
    rank: Int32,
    ranks: Int32,
    lane: Int32,
    config: cutlass.Constexpr[Dispatch],
) -> None:
    """Store ``rows_of`` of the warp's token on its destinations; with R <= K on all ranks."""
    if cutlass.const_expr(config.by_token):
        for i in cutlass.range(ranks, unroll=1):
            peer = rank + 1 + i
            if peer >= ranks:
                peer = peer - ranks
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
    rank_sK: Int64,
    row_sK: Int64,
    probs_sK: Int64,
    token: Int32,
    tokens: Int32,
    lane: Int32,
    config: cutlass.Constexpr[Dispatch],
) -> tuple[Int32, Int32, Int32]:
    """Lane k's entry of a token: destination, row there, and probability as bits."""
    prob = Int32(0)
    if cutlass.const_expr(config.metadata):
        prob = rows.entry(probs_sK, token, tokens, lane, config.topk)
    to, row = (rows.entry(at, token, tokens, lane, config.topk) for at in (rank_sK, row_sK))
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
def _free_kernel(
    peers: cute.Tensor, flags: Int64, control: Int64, rank: Int32, ranks: Int32
) -> None:
    # The readers were earlier kernels of this stream; the fence keeps their loads before the flag.
    ptx.fence_sys()
    flag = sync.flag_offset(flags, sync.RECEIVE_FREE, ranks) + Int64(rank) * 4
    sync.signal_all(peers, flag, ranks, sync.current_epoch(control, sync.DISPATCHED))


@cute.jit
def _launch_free(
    peers: cute.Tensor, flags: Int64, control: Int64, rank: Int32, ranks: Int32, stream: Any
) -> None:
    _free_kernel(peers, flags, control, rank, ranks).launch(
        grid=[1, 1, 1], block=[rows.MAX_RANKS, 1, 1], stream=stream
    )
