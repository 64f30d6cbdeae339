"""The experts that move with a transfer, on the device, as `moonep_megatron.transfers.take`.

Letters: R ranks, n home experts of a rank.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute
from moonep_megatron.kernels import ptx, warp
from moonep_megatron.kernels.candidate import State

# Shared loads that a lane has under way at once.
_BATCH = 4


@cute.jit
def serve(
    s: State,
    first: Int32,
    last: Int32,
    pieces: Int64,
    homes: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    """All warps: say which experts move, a donor a warp, so that its transfers stay in order.

    Args:
        first, last: transfers of the state, from the first to before the last.
        pieces: address of (expert, rows) by (receiver, arrival), int32 [R, n, 2].
    """
    lane, own = warp.lane_and_warp()
    for start in cutlass.range(first, last, warp.WARP):
        ours = Int32(0)
        if start + lane < last:
            ours = Int32(s.donor[start + lane] % (threads // warp.WARP) == own)
        left = warp.ballot(ours != 0)
        while left != 0:
            t = start + warp.lowest(left)
            left = Int32(left & (left - 1))
            take(s, s.donor[t], s.receiver[t], s.moved[t], pieces, homes)


@cute.jit
def take(
    s: State,
    donor: Int32,
    receiver: Int32,
    moved: Int32,
    pieces: Int64,
    homes: cutlass.Constexpr[int],
) -> None:
    """One warp: remove rows of the donor, largest expert first, and store the pieces."""
    lane, _ = warp.lane_and_warp()
    row = donor * (homes + 1)
    head = s.head[donor]
    keeps = s.after[row + head] - moved
    whole = Int32(0)
    for start in cutlass.range(0, homes, _BATCH * warp.WARP):
        # Also the experts before the head, so that these loads need not wait for it.
        ks = [start + i * warp.WARP + lane for i in range(_BATCH)]
        after = [s.after[row + cutlass.min(k + 1, homes)] for k in ks]
        for i in cutlass.range_constexpr(_BATCH):
            if ks[i] >= head and ks[i] < homes and after[i] > keeps:
                whole += 1
    # experts head..cut-1 leave as a whole, expert ``cut`` in part or as a whole
    cut = head + warp.warp_sum(whole)
    part_with(s, donor, receiver, keeps, head, cut, pieces, homes)


@cute.jit
def part_with(
    s: State,
    donor: Int32,
    receiver: Int32,
    keeps: Int32,
    head: Int32,
    cut: Int32,
    pieces: Int64,
    homes: cutlass.Constexpr[int],
) -> None:
    """One warp: remove the donor's experts ``head`` to ``cut``, so that it keeps these rows.

    What is left of the last expert moves to its place in the falling order.
    """
    lane, _ = warp.lane_and_warp()
    row = donor * (homes + 1)
    left = keeps - s.after[row + cut + 1]
    for start in cutlass.range(head, cut + 1, warp.WARP):
        k = start + lane
        if k <= cut:
            given = s.rows[row + k]
            if k == cut:
                given -= left
            piece = pieces + Int64(receiver * homes + k - head) * 8
            ptx.store(piece, donor * homes + s.expert[row + k], "s32")
            ptx.store(piece + 4, given, "s32")
    new_head = cut + 1
    if left > 0:
        _reinsert(s, row, cut, left, homes)
        new_head = cut
    # All lanes have read the old head.
    cute.arch.sync_warp()
    if lane == 0:
        s.head[donor] = new_head
        s.received[receiver] = cut + 1 - head
        s.sent[donor] = s.sent[donor] + cut + 1 - head
    cute.arch.sync_warp()


@cute.jit
def _reinsert(s: State, row: Int32, cut: Int32, left: Int32, homes: cutlass.Constexpr[int]) -> None:
    """One warp: expert ``cut`` keeps ``left`` rows; move it to its place in the falling order."""
    lane, _ = warp.lane_and_warp()
    expert, passed = s.expert[row + cut], Int32(0)
    for start in cutlass.range(cut + 1, homes, warp.WARP):
        k = start + lane
        if k < homes:
            rows = s.rows[row + k]
            if rows > left or (rows == left and s.expert[row + k] < expert):
                passed += 1
    end = cut + warp.warp_sum(passed)
    # The experts passed move up. A step reads ahead of what it writes, and no step reads what an
    # earlier one wrote.
    for start in cutlass.range(cut, end, warp.WARP):
        k = cutlass.min(start + lane, end - 1)
        next_rows, next_expert = s.rows[row + k + 1], s.expert[row + k + 1]
        next_after = s.after[row + k + 1] + left
        cute.arch.sync_warp()
        if start + lane < end:
            s.rows[row + k] = next_rows
            s.expert[row + k] = next_expert
            s.after[row + k] = next_after
        cute.arch.sync_warp()
    # all lanes have read the old state
    cute.arch.sync_warp()
    if lane == 0:
        s.rows[row + end] = left
        s.expert[row + end] = expert
        s.after[row + end] = s.after[row + end + 1] + left
