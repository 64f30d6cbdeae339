"""How many rows every rank computes within a slack, bit for bit `moonep_megatron.caps`."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute
from moonep_megatron.kernels import warp
from moonep_megatron.kernels.candidate import State, padded

SLACK_UNIT = 10_000
TILE = 128


@cute.jit
def slacken(
    s: State, total: Int32, slack: cutlass.Constexpr[int], ranks: cutlass.Constexpr[int]
) -> None:
    """Warp 0: replace exact caps, and the surpluses over them, by those within a slack.

    Args:
        total: rows of all ranks.
        slack: in parts of ``SLACK_UNIT``, above 0.
    """
    lane, _ = warp.lane_and_warp()
    groups = range(padded(ranks) // warp.WARP)
    mean = total // ranks + Int32(total % ranks > 0)
    high = Int32(Int64(total) * (SLACK_UNIT + slack) // (SLACK_UNIT * ranks))
    # One rank alone may have more than 31 bits of slack.
    if cutlass.const_expr(ranks == 1):
        high = total
    high = cutlass.max(high, mean)
    # A lane keeps its ranks' state in registers: the steps wait for nothing but votes.
    mine = [g * warp.WARP + lane for g in groups]
    loads = [s.cap[d] + s.surplus[d] for d in mine]
    caps = [s.cap[d] + s.surplus[d] for d in mine]
    surplus = [cutlass.max(load - high, 0) for load in loads]
    room = [cutlass.max(cutlass.min(high - load, mean), 0) for load in loads]
    for g in cutlass.range_constexpr(len(groups)):
        if mine[g] >= ranks:
            room[g] = Int32(0)
    more = Int32(1)
    while more != 0:
        most, widest = surplus[0], room[0]
        for g in cutlass.range_constexpr(1, len(groups)):
            most = cutlass.max(most, surplus[g])
            widest = cutlass.max(widest, room[g])
        most, widest = warp.warp_max(most), warp.warp_max(widest)
        if most > 0:
            donor = warp.lowest_rank([Int32(one == most) for one in surplus])
            receiver = warp.lowest_rank([Int32(one == widest) for one in room])
            tiles = (most + TILE - 1) // TILE * TILE
            rows = most
            if tiles - most <= high - mean and tiles <= widest:
                rows = tiles
            rows = cutlass.min(rows, widest)
            for g in cutlass.range_constexpr(len(groups)):
                if mine[g] == donor:
                    caps[g] = caps[g] - rows
                    surplus[g] = cutlass.max(most - rows, 0)
                if mine[g] == receiver:
                    caps[g] = caps[g] + rows
                    room[g] = widest - rows
        else:
            more = Int32(0)
    for g in cutlass.range_constexpr(len(groups)):
        s.cap[mine[g]] = caps[g]
        s.surplus[mine[g]] = loads[g] - caps[g]
