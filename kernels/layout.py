"""From the pieces that move to the plan's tensors, and to the tables of the destinations.

Letters: E experts, R ranks, n = E/R home experts of a rank, G = 2n row groups of a rank.

A *share* of an expert is what one rank computes of it: the home first keeps what it does not give
away. The shares of an expert stand by ascending rank. A share's *free* rows are those that entries
of other ranks fill, behind its own rank's local entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import torch
from cutlass import Int32, Int64, Uint32, cute
from moonep_megatron.kernels import keeping, ptx, warp
from torch import Tensor


class Offsets(NamedTuple):
    """Where each part of a `DevicePlan` starts in its memory, in ints, multiples of four."""

    rule: int
    cap: int
    foreign: int
    group_expert: int
    group_start: int
    expert: int
    share: int
    rows: int
    end: int


def offsets(ranks: int, experts: int) -> Offsets:
    """The parts of a plan's memory."""
    sizes = (4, ranks, experts, 2 * experts, 2 * experts + ranks, 4 * experts, 8 * experts)
    starts = [0]
    for size in (*sizes, ranks * experts):
        starts.append(starts[-1] + -(-size // 4) * 4)
    return Offsets(*starts)


@dataclass(frozen=True, kw_only=True, eq=False)
class DevicePlan:
    """A plan on the device, and what its rank needs for its destinations; views of one memory.

    The fields that `moonep_megatron.plan.Plan` has too are equal to its, bit for bit. ``rows_RE``
    is written with the destinations, everything else with the plan.
    """

    memory: Tensor
    rule: Tensor
    """[1], index into `moonep_megatron.kernels.plan.RULES`."""
    cap_R: Tensor
    foreign_expert_Rn: Tensor
    group_expert_RG: Tensor
    group_start_RG1: Tensor
    rows_RE: Tensor

    @staticmethod
    def empty(ranks: int, experts: int, device: torch.device) -> DevicePlan:
        """Memory of a plan, without values."""
        at, groups = offsets(ranks, experts), 2 * experts // ranks
        memory = torch.empty(at.end, dtype=torch.int32, device=device)

        def part(start: int, *shape: int) -> Tensor:
            return memory[start : start + torch.Size(shape).numel()].view(shape)

        return DevicePlan(
            memory=memory,
            rule=part(at.rule, 1),
            cap_R=part(at.cap, ranks),
            foreign_expert_Rn=part(at.foreign, ranks, experts // ranks),
            group_expert_RG=part(at.group_expert, ranks, groups),
            group_start_RG1=part(at.group_start, ranks, groups + 1),
            rows_RE=part(at.rows, ranks, experts),
        )


class Inputs(NamedTuple):
    """What the layout reads, and where it writes."""

    totals: cute.Tensor
    """[2, E] rows of all ranks, and of the ranks before this one."""
    counts: Int64
    """[R, E]"""
    home_order: Int64
    """[R, n]"""
    received: Int64
    """[R] pieces of each rank."""
    out: Int64
    """A plan's memory."""
    held: Int64
    """[R, B] what the slots hold, where duplicates are kept."""
    slots: Int32
    """B."""


class _Tables(NamedTuple):
    order: cute.Tensor
    """[R, n] home experts in the order of their groups."""
    received: cute.Tensor
    """[R]"""
    kept: cute.Tensor
    """[E] rows that stay at home."""
    takers: cute.Tensor
    """[E, words] bits of the ranks that receive rows of an expert."""
    piece: cute.Tensor
    """[E] by (rank, arrival): expert; so is ``piece_rows``."""
    piece_rows: cute.Tensor
    foreign: cute.Tensor
    """[E] by (rank, ascending expert), -1 for none; so are its rows and start."""
    foreign_rows: cute.Tensor
    foreign_start: cute.Tensor
    home_start: cute.Tensor
    """[E] row of the home group of each expert."""
    starts: cute.Tensor
    """[2E+1] running rows by (rank, group)."""
    first_share: cute.Tensor
    """[E+1]"""
    share_rank: cute.Tensor
    """[2E] of each share; so are its local and free rows and the row behind the local ones."""
    share_local: cute.Tensor
    share_free: cute.Tensor
    share_row: cute.Tensor
    sums: cute.Tensor


@cute.jit
def lay_out(
    inputs: Inputs,
    pieces: Int64,
    rank: Int32,
    ranks: cutlass.Constexpr[int],
    experts: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
    keeps: cutlass.Constexpr[bool],
) -> None:
    """All threads of one block: write every part of a plan but ``rows``.

    Args:
        keeps: foreign experts stand in the slots that hold them, not ascending.
    """
    tables = _allocate(ranks, experts)
    _read_pieces(tables, inputs, pieces, ranks, experts, threads)
    if cutlass.const_expr(keeps):
        _keep_foreign(tables, inputs, ranks, experts, threads)
    else:
        _sort_foreign(tables, inputs, ranks, experts, threads)
    _place_groups(tables, inputs, ranks, experts, threads)
    _list_shares(tables, inputs, ranks, experts, threads)
    _write_shares(tables, inputs, rank, ranks, experts, threads)


def _words(ranks: int) -> int:
    return -(-ranks // 32)


@cute.jit
def _allocate(ranks: cutlass.Constexpr[int], experts: cutlass.Constexpr[int]) -> _Tables:
    smem = cutlass.utils.SmemAllocator()
    sizes = [
        experts,
        ranks,
        experts,
        experts * _words(ranks),
        *[experts] * 6,
        2 * experts + 1,
        experts + 1,
    ]
    sizes += [2 * experts] * 4 + [warp.WARP]
    return _Tables(
        *[smem.allocate_tensor(Int32, cute.make_layout(size), byte_alignment=16) for size in sizes]
    )


@cute.jit
def _read_pieces(
    t: _Tables,
    inputs: Inputs,
    pieces: Int64,
    ranks: cutlass.Constexpr[int],
    experts: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    homes, words = experts // ranks, _words(ranks)
    for i in cutlass.range(thread, experts, threads):
        d = i // homes
        # All loads at once, also of places without a piece.
        order, kept = ptx.load(inputs.home_order + i * 4, "s32"), inputs.totals[i]
        received = ptx.load(inputs.received + d * 4, "s32")
        e, rows = ptx.load(pieces + i * 8, "s32"), ptx.load(pieces + i * 8 + 4, "s32")
        if i - d * homes >= received:
            e = Int32(warp.MOST)
        if i == d * homes:
            t.received[d] = received
        t.order[i] = order
        t.kept[i] = kept
        t.piece[i] = e
        t.piece_rows[i] = rows
        for w in cutlass.range_constexpr(words):
            t.takers[i * words + w] = 0
    cute.arch.sync_threads()
    for i in cutlass.range(thread, experts, threads):
        d, e = i // homes, t.piece[i]
        if e != warp.MOST:
            cute.arch.atomic_add(t.kept.iterator + e, Int32(0) - t.piece_rows[i])
            word = t.takers.iterator + (e * words + d // 32)
            cute.arch.atomic_or(word, Int32(1) << (d % 32))
    cute.arch.sync_threads()


@cute.jit
def _sort_foreign(
    t: _Tables,
    inputs: Inputs,
    ranks: cutlass.Constexpr[int],
    experts: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    """Foreign experts of every rank, ascending; empty places stay behind."""
    thread, _, _ = cute.arch.thread_idx()
    homes, at = experts // ranks, offsets(ranks, experts)
    for i in cutlass.range(thread, experts, threads):
        d, mine = i // homes, t.piece[i]
        place, foreign, rows = i, Int32(-1), Int32(0)
        if mine != warp.MOST:
            place, foreign, rows = d * homes, mine, t.piece_rows[i]
            for other in cutlass.range(d * homes, d * homes + t.received[d]):
                if t.piece[other] < mine:
                    place += 1
        t.foreign[place] = foreign
        t.foreign_rows[place] = rows
        ptx.store(inputs.out + (at.foreign + place) * 4, foreign, "s32")
    cute.arch.sync_threads()


@cute.jit
def _keep_foreign(
    t: _Tables,
    inputs: Inputs,
    ranks: cutlass.Constexpr[int],
    experts: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    """Foreign experts of every rank in the order of its slots, with empty places between."""
    thread, _, _ = cute.arch.thread_idx()
    homes, at = experts // ranks, offsets(ranks, experts)
    # Nobody needs the homes' rows yet.
    places = t.home_start
    for i in cutlass.range(thread, experts, threads):
        t.foreign[i] = Int32(-1)
        t.foreign_rows[i] = 0
    keeping.find_places(
        t.piece, t.received, places, inputs.held, inputs.slots, ranks, experts, threads
    )
    for i in cutlass.range(thread, experts, threads):
        if t.piece[i] != warp.MOST:
            place = i // homes * homes + places[i]
            t.foreign[place] = t.piece[i]
            t.foreign_rows[place] = t.piece_rows[i]
    cute.arch.sync_threads()
    for i in cutlass.range(thread, experts, threads):
        ptx.store(inputs.out + (at.foreign + i) * 4, t.foreign[i], "s32")


@cute.jit
def _place_groups(
    t: _Tables,
    inputs: Inputs,
    ranks: cutlass.Constexpr[int],
    experts: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    """Row groups of every rank, home experts in home order, then the foreign ones."""
    thread, _, _ = cute.arch.thread_idx()
    homes, at = experts // ranks, offsets(ranks, experts)
    for i in cutlass.range(thread, 2 * experts, threads):
        d, group = i // (2 * homes), i % (2 * homes)
        expert, rows = Int32(0), Int32(0)
        if group < homes:
            expert = t.order[d * homes + group]
            rows = t.kept[expert]
        else:
            expert = t.foreign[d * homes + group - homes]
            rows = t.foreign_rows[d * homes + group - homes]
        t.starts[i] = rows
        ptx.store(inputs.out + (at.group_expert + i) * 4, expert, "s32")
    warp.exclusive_scan(t.starts, t.sums, 2 * experts, threads)
    for i in cutlass.range(thread, 2 * experts, threads):
        d, group = i // (2 * homes), i % (2 * homes)
        start = t.starts[i] - t.starts[d * (2 * homes)]
        ptx.store(inputs.out + (at.group_start + i + d) * 4, start, "s32")
        if group < homes:
            expert = t.order[d * homes + group]
            t.home_start[expert] = start
        else:
            t.foreign_start[d * homes + group - homes] = start
    for d in cutlass.range(thread, ranks, threads):
        cap = t.starts[(d + 1) * (2 * homes)] - t.starts[d * (2 * homes)]
        end = at.group_start + (d + 1) * (2 * homes) + d
        ptx.store(inputs.out + end * 4, cap, "s32")
        ptx.store(inputs.out + (at.cap + d) * 4, cap, "s32")


@cute.jit
def _takers_below(t: _Tables, e: Int32, d: Int32, words: cutlass.Constexpr[int]) -> Int32:
    """How many ranks before ``d`` receive rows of ``e``."""
    below = Int32(0)
    for w in cutlass.range_constexpr(words):
        bits = t.takers[e * words + w]
        if d < 32 * w + 32:
            bits &= (Int32(-1) << cutlass.min(cutlass.max(d - 32 * w, 0), 31)) ^ -1
        below += cute.arch.popc(bits)
    return below


@cute.jit
def _list_shares(
    t: _Tables,
    inputs: Inputs,
    ranks: cutlass.Constexpr[int],
    experts: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    """Shares of every expert by ascending rank."""
    thread, _, _ = cute.arch.thread_idx()
    homes, words = experts // ranks, _words(ranks)
    for e in cutlass.range(thread, experts, threads):
        t.first_share[e] = 1 + _takers_below(t, e, Int32(ranks), words)
    warp.exclusive_scan(t.first_share, t.sums, experts, threads)
    for i in cutlass.range(thread, 2 * experts, threads):
        # the home share of every expert, then every foreign share
        d, e = i // homes, i
        rows, start = Int32(0), Int32(0)
        if i < experts:
            rows, start = t.kept[i], t.home_start[i]
        else:
            d, e = (i - experts) // homes, t.foreign[i - experts]
            rows, start = t.foreign_rows[i - experts], t.foreign_start[i - experts]
        if e >= 0:
            place = t.first_share[e] + _takers_below(t, e, d, words)
            if i >= experts and e // homes < d:
                place += 1
            local = cutlass.min(ptx.load(inputs.counts + (d * experts + e) * 4, "s32"), rows)
            t.share_rank[place] = d
            t.share_local[place] = local
            t.share_free[place] = rows - local
            t.share_row[place] = start + local
    cute.arch.sync_threads()


@cute.jit
def _write_shares(
    t: _Tables,
    inputs: Inputs,
    rank: Int32,
    ranks: cutlass.Constexpr[int],
    experts: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    """Tables of the destinations, an expert a thread.

    Of every expert: its entries that stay on this rank, their first row, what to add to the place
    of another one for its number among all entries that move, and its shares. Of every share: the
    numbers below which it is filled, its rank, and what to add to a number for the row.
    """
    thread, _, _ = cute.arch.thread_idx()
    at = offsets(ranks, experts)
    for e in cutlass.range(thread, experts, threads):
        first, last = t.first_share[e], t.first_share[e + 1]
        stay, row, before, free = Int32(0), Int32(0), inputs.totals[experts + e], Int32(0)
        for share in cutlass.range(first, last):
            d, local = t.share_rank[share], t.share_local[share]
            if d < rank:
                before -= local
            if d == rank:
                stay, row = local, t.share_row[share] - local
            end = free + t.share_free[share]
            _store4(inputs.out + (at.share + share * 4) * 4, end, d, t.share_row[share] - free, 0)
            free = end
        shares = first + ((last - first) << 16)
        _store4(inputs.out + (at.expert + e * 4) * 4, stay, row, before - stay, shares)


@cute.jit
def _store4(address: Int64, a: Int32, b: Int32, c: Int32, d: Int32) -> None:
    ptx.store16(address, (Uint32(a), Uint32(b), Uint32(c), Uint32(d)))
