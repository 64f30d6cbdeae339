"""The plan, solved on the device by every rank alone, bit for bit `moonep_megatron.plan.make_plan`.

Letters: E experts, R ranks, n = E/R home experts of a rank.

A block tries each candidate of `moonep_megatron.kernels.rules` and stores what it costs and which
pieces move; the last block to finish takes the best and writes the plan and the tables of the
destinations (`moonep_megatron.kernels.layout`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import torch
from cutlass import Boolean, Int32, Int64, cute
from moonep_megatron.kernels import candidate, caps, layout, ptx, rules, sync, trees, warp
from moonep_megatron.kernels import compile as kc
from moonep_megatron.kernels.counting import MAX_EXPERTS
from moonep_megatron.kernels.exchange import Exchanged
from torch import Tensor

# What ``rule`` of a plan counts: the rule that made it.
RULES = ("pairs", "chain", "peel", "trees")
PLANNERS = ("best", *RULES)
MAX_RANKS = 128

_THREADS = 1024
# What a candidate leaves in the scratch memory before its pieces: exists, most experts received,
# most received or sent, all; then the experts received by each rank.
_EXISTS, _WIDEST, _BUSIEST, _ALL = range(4)
_RECEIVED = 4


@dataclass(frozen=True)
class PlanConfig:
    """Compile-time constants of the plan."""

    ranks: int
    experts: int
    planner: str
    slack: int = 0
    keeps: bool = False
    """Foreign experts stand in the slots that hold them."""

    signals = waits = False
    starts_early = True

    @property
    def trees(self) -> int:
        """Blocks that grow trees. They take longest, so they are the first."""
        return trees.CANDIDATES if self.planner in ("best", "trees") else 0

    @property
    def candidates(self) -> int:
        """Blocks: pairs needs the last fill, chain the first and pairs, the others all."""
        fills = {"pairs": 1, "trees": 1, "chain": min(self.ranks, 2)}.get(self.planner, self.ranks)
        return self.trees + fills

    @property
    def blocks(self) -> int:
        """All candidates for the caps within the slack, then all for exact caps."""
        return self.candidates * (2 if self.slack else 1)

    @property
    def record(self) -> int:
        """Ints of a candidate in the scratch memory."""
        return -(-(_RECEIVED + self.ranks) // 4) * 4 + 2 * self.experts

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `moonep_megatron.kernels.compile.Config`."""
        config = self

        @cute.kernel
        def kernel(
            totals: cute.Tensor,
            counts: Int64,
            home_order: Int64,
            scratch: Int64,
            out: Int64,
            held: Int64,
            rank: Int32,
            slots: Int32,
        ) -> None:
            cute.arch.griddepcontrol_wait()
            _solve(totals, scratch, config)
            if sync.last_block_here(scratch, Int32(config.blocks)):
                # Not before: the destinations' many blocks would hold their SMs meanwhile.
                cute.arch.griddepcontrol_launch_dependents()
                winner = _choose(scratch, out, slots, config)
                layout.lay_out(
                    layout.Inputs(
                        totals, counts, home_order, winner + _RECEIVED * 4, out, held, slots
                    ),
                    winner + (config.record - 2 * config.experts) * 4,
                    rank,
                    config.ranks,
                    config.experts,
                    _THREADS,
                    config.keeps,
                )

        @cute.jit
        def launch(
            totals: cute.Tensor,
            counts: Int64,
            home_order: Int64,
            scratch: Int64,
            out: Int64,
            held: Int64,
            rank: Int32,
            slots: Int32,
            stream: Any,
        ) -> None:
            kernel(totals, counts, home_order, scratch, out, held, rank, slots).launch(
                grid=[config.blocks, 1, 1],
                block=[_THREADS, 1, 1],
                min_blocks_per_mp=1,
                use_pdl=True,
                stream=stream,
            )

        example = (kc.vector(Int32), *[Int64(0)] * 5, *[Int32(0)] * 2, kc.stream())
        return launch, example


class Planner:
    """Solves plans of one group of ranks and one number of experts.

    Args:
        ranks, experts: R up to 128 and E up to 1024.
        planner: one of ``PLANNERS``.
        slots, slack: see `moonep_megatron.plan.make_plan`.
        keeps: foreign experts stand in the slots that hold them; plans are else the same.
        most_rows: rows that all ranks may route together, R*S*K.
        device: this rank's GPU.
    """

    def __init__(
        self,
        ranks: int,
        experts: int,
        *,
        planner: str,
        slots: int,
        most_rows: int,
        device: torch.device,
        slack: int = 0,
        keeps: bool = False,
    ) -> None:
        if planner not in PLANNERS:
            raise ValueError(f"planner {planner!r} is unknown: use one of {', '.join(PLANNERS)}")
        if not 1 <= ranks <= MAX_RANKS or experts % ranks or not 1 <= experts <= MAX_EXPERTS:
            raise ValueError(
                f"{experts} experts on {ranks} ranks: the kernels take up to {MAX_RANKS} ranks "
                f"and a multiple of that, up to {MAX_EXPERTS}, of experts"
            )
        if most_rows > warp.MOST:
            raise ValueError(
                f"all ranks together route up to {most_rows} rows: the kernels count to "
                f"{warp.MOST}; lower --moe-moonep-max-tokens"
            )
        self.config = PlanConfig(ranks, experts, planner, slack, keeps)
        self.slots = slots
        # The counter of finished blocks, then a record for each candidate.
        self._scratch = torch.zeros(
            4 + self.config.blocks * self.config.record, dtype=torch.int32, device=device
        )

    def plan(
        self,
        exchanged: Exchanged,
        home_order_Rn: Tensor,
        rank: int,
        held_RB: Tensor | None = None,
    ) -> layout.DevicePlan:
        """The plan of the counts exchanged. Not collective, and not for two streams at a time.

        Args:
            home_order_Rn: int32 [R, n] on the device, see `moonep_megatron.plan.make_plan`.
            rank: this rank, for the tables of its own destinations.
            held_RB: int32 [R, B] on the device, the expert in every slot, -1 for none; where
                ``keeps``.
        """
        ranks, experts = self.config.ranks, self.config.experts
        assert (held_RB is not None) == self.config.keeps
        if home_order_Rn.dtype != torch.int32 or not home_order_Rn.is_contiguous():
            raise ValueError("home_order_Rn must be int32 and contiguous")
        plan = layout.DevicePlan.empty(ranks, experts, home_order_Rn.device)
        kc.compiled(self.config)(
            exchanged.totals_2E.view(-1),
            exchanged.counts_RE.data_ptr(),
            home_order_Rn.data_ptr(),
            self._scratch.data_ptr(),
            plan.memory.data_ptr(),
            0 if held_RB is None else held_RB.data_ptr(),
            rank,
            self.slots,
        )
        return plan


def configs() -> list[PlanConfig]:
    """Configurations that the tests compile."""
    return [
        PlanConfig(8, 896, "best"),
        PlanConfig(8, 896, "best", 100),
        PlanConfig(128, 1024, "pairs", 10_000),
        PlanConfig(1, 7, "peel", 1),
        PlanConfig(64, 1024, "best"),
        PlanConfig(128, 1024, "best"),
        PlanConfig(1, 7, "best"),
        PlanConfig(2, 1024, "pairs"),
        PlanConfig(16, 64, "chain"),
        PlanConfig(128, 896, "peel"),
        PlanConfig(32, 64, "trees"),
        PlanConfig(8, 896, "best", keeps=True),
        PlanConfig(128, 1024, "best", keeps=True),
    ]


@cute.jit
def _solve(totals: cute.Tensor, scratch: Int64, config: cutlass.Constexpr[PlanConfig]) -> None:
    """All threads: this block's candidate, into its record."""
    ranks, homes = config.ranks, config.experts // config.ranks
    number, _, _ = cute.arch.block_idx()
    block = number % config.candidates
    tree = block
    if block >= config.trees:
        tree = Int32(-1)
    # Pairs has the most fills; the rule chain has two blocks, for none and the most.
    fills = block - config.trees
    if cutlass.const_expr(config.planner in ("pairs", "trees")):
        fills = Int32(ranks - 1)
    elif cutlass.const_expr(config.planner == "chain"):
        fills = block * (ranks - 1)
    state = candidate.allocate(ranks, homes)
    total = candidate.prepare(state, totals, ranks, homes, _THREADS)
    thread, _, _ = cute.arch.thread_idx()
    if cutlass.const_expr(config.slack > 0):
        if number < config.candidates and thread < warp.WARP:
            caps.slacken(state, total, config.slack, ranks)
        cute.arch.sync_threads()
    record = _record(scratch, number, config)
    pieces = record + (config.record - 2 * config.experts) * 4
    rules.find(state, tree, fills, pieces, ranks, homes, _THREADS, config.trees > 0)
    _, own = warp.lane_and_warp()
    for d in cutlass.range(thread, ranks, _THREADS):
        ptx.store(record + (_RECEIVED + d) * 4, state.received[d], "s32")
    if own == 0:
        _store_cost(state, record, ranks)


def _record(scratch: Int64, number: Int32, config: PlanConfig) -> Int64:
    """Address of a candidate's record."""
    return scratch + 16 + Int64(number) * (config.record * 4)


@cute.jit
def _store_cost(s: candidate.State, record: Int64, ranks: cutlass.Constexpr[int]) -> None:
    """Warp 0: whether the candidate exists, and what it costs."""
    lane, _ = warp.lane_and_warp()
    widest, busiest, everything = Int32(0), Int32(0), Int32(0)
    for g in cutlass.range_constexpr(candidate.padded(ranks) // warp.WARP):
        received, sent = s.received[g * warp.WARP + lane], s.sent[g * warp.WARP + lane]
        widest = cutlass.max(widest, received)
        busiest = cutlass.max(busiest, cutlass.max(received, sent))
        everything += received
    widest, busiest = warp.warp_max(widest), warp.warp_max(busiest)
    everything = warp.warp_sum(everything)
    if lane == 0:
        ptx.store(record + _EXISTS * 4, s.scalars[candidate.EXISTS], "s32")
        ptx.store(record + _WIDEST * 4, widest, "s32")
        ptx.store(record + _BUSIEST * 4, busiest, "s32")
        ptx.store(record + _ALL * 4, everything, "s32")


@cute.jit
def _choose(
    scratch: Int64, out: Int64, slots: Int32, config: cutlass.Constexpr[PlanConfig]
) -> Int64:
    """All threads of the last block: the record of the best candidate; stores its rule.

    Of exact caps only where it is cheaper than the best within the slack.
    """
    number, rule, cost = _best_of(scratch, Int32(0), slots, config)
    if cutlass.const_expr(config.slack > 0):
        exact, exact_rule, exact_cost = _best_of(scratch, Int32(config.candidates), slots, config)
        if _cheaper(exact_cost, cost, slots):
            number, rule = exact, exact_rule
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        ptx.store(out, rule, "s32")
    return _record(scratch, number, config)


@cute.jit
def _best_of(
    scratch: Int64, base: Int32, slots: Int32, config: cutlass.Constexpr[PlanConfig]
) -> tuple[Int32, Int32, list[Int32]]:
    """The best of the candidates from ``base`` on: its number, its rule, and what it costs.

    After the trees, the first candidate that exists is peel's; where it is the one without fills
    it is chain's. ``best`` takes it where it is cheaper than pairs, the last candidate, and a tree
    where that is cheaper still.
    """
    lane, _ = warp.lane_and_warp()
    last = config.candidates - 1
    rounds = range(-(-config.candidates // warp.WARP))
    # What all candidates cost, one a lane and round, all loads at once.
    places = [base + cutlass.min(i * warp.WARP + lane, last) for i in rounds]
    records = [_record(scratch, place, config) for place in places]
    costs = [[ptx.load(record + i * 4, "s32") for i in range(_RECEIVED)] for record in records]
    number, rule = Int32(last), Int32(RULES.index("pairs"))
    if cutlass.const_expr(config.planner in ("best", "chain", "peel")):
        first = _first_fill(costs, config)
        better = Boolean(first == 0)
        if cutlass.const_expr(config.planner == "best"):
            better = _cheaper(_cost_of(costs, first), _cost_of(costs, Int32(last)), slots)
        if better or config.planner == "peel":
            number, rule = first, Int32(RULES.index("peel"))
            if first == config.trees and config.planner != "peel":
                rule = Int32(RULES.index("chain"))
    if cutlass.const_expr(config.trees > 0):
        tree = _best_tree(costs[0], slots)
        better = Boolean(tree < config.trees)
        if cutlass.const_expr(config.planner == "best"):
            cheaper = _cheaper(_cost_of(costs, tree), _cost_of(costs, number), slots)
            better = better and cheaper
        if better:
            number, rule = tree, Int32(RULES.index("trees"))
    return base + number, rule, _cost_of(costs, number)


@cute.jit
def _first_fill(costs: list[list[Int32]], config: cutlass.Constexpr[PlanConfig]) -> Int32:
    """The first candidate that exists after the trees."""
    lane, _ = warp.lane_and_warp()
    first = Int32(config.candidates - 1)
    for i in cutlass.range_constexpr(len(costs)):
        g = len(costs) - 1 - i
        exists, number = costs[g][_EXISTS], g * warp.WARP + lane
        if number < config.trees or number >= config.candidates:
            exists = Int32(0)
        who = warp.ballot(exists != 0)
        if who != 0:
            first = g * warp.WARP + warp.lowest(who)
    return first


@cute.jit
def _best_tree(costs: list[Int32], slots: Int32) -> Int32:
    """The cheapest tree of the least limit that has one, ties to the first; 32 without any.

    Args:
        costs: of this lane's candidate. Those of the trees come first.
    """
    lane, _ = warp.lane_and_warp()
    exists = Int32(lane < trees.CANDIDATES) & Int32(costs[_EXISTS] != 0)
    limit = warp.lowest(warp.ballot(exists != 0)) // trees.KEYS
    among = exists & Int32(lane // trees.KEYS == limit)
    for cost in ((costs[_WIDEST] + slots - 1) // slots, costs[_BUSIEST], costs[_ALL]):
        value = Int32(warp.MOST)
        if among != 0:
            value = cost
        among = among & Int32(value == warp.warp_min(value))
    return warp.lowest(warp.ballot(among != 0))


@cute.jit
def _cost_of(costs: list[list[Int32]], number: Int32) -> list[Int32]:
    """Of one candidate, from the lane that has it."""
    found = [Int32(0)] * len(costs[0])
    for g in cutlass.range_constexpr(len(costs)):
        for i in cutlass.range_constexpr(len(found)):
            value = cute.arch.shuffle_sync(costs[g][i], number % warp.WARP)
            if number // warp.WARP == g:
                found[i] = value
    return found


@cute.jit
def _cheaper(cost: list[Int32], other: list[Int32], slots: Int32) -> Boolean:
    """Whether one cost is less than another, in (waves, busiest, all)."""
    waves, other_waves = ((c[_WIDEST] + slots - 1) // slots for c in (cost, other))
    cheaper = waves < other_waves
    if waves == other_waves:
        cheaper = cost[_BUSIEST] < other[_BUSIEST]
        if cost[_BUSIEST] == other[_BUSIEST]:
            cheaper = cost[_ALL] < other[_ALL]
    return cheaper
