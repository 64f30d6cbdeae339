"""From the routing map to the destinations, each part and all together.

The exchange is between the ranks at hand. The plan is that of more ranks than there are: their
counts are made up, and this rank's own are those of its routing map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from itertools import cycle
from typing import Any

import torch
from moonep_megatron.kernels import compact, counting, exchange, layout, sync
from moonep_megatron.kernels import destinations as place
from moonep_megatron.kernels import plan as planning
from torch import Tensor

from kernel_bench.measure import TIMEOUT_NS, Bench
from kernel_bench.ranks import Shape
from moonep_megatron import plan as definition
from moonep_megatron.backends.memory import Regions

VIRTUAL_RANKS = (8, 64)
MOST_SLOTS = 4
# Steps of one timed pass: single ones are too short for events.
LAUNCHES = 10
# Inputs that together are larger than the cache.
SETS = 4


class Work:
    """A routing of this rank, its memory, and launches of every part."""

    def __init__(self, bench: Bench, shape: Shape, experts: int) -> None:
        self.bench, self.shape, self.experts = bench, shape, experts
        regions = Regions()
        flags = regions.add((sync.STAGES, bench.ranks), torch.int32)
        pitch = experts + counting.HEADER
        counts = regions.add((2, bench.ranks, pitch), torch.int32)
        memory = bench.memory(regions)
        self.common: dict[str, Any] = {
            "tokens": shape.tokens,
            "max_tokens": shape.tokens,
            "rank": bench.rank,
            "layer": 0,
            "counts_offset": counts.offset,
            "flags_offset": flags.offset,
            "control": memory.control,
            "fault": memory.fault,
            "timeout_ns": TIMEOUT_NS,
        }
        self.peers = memory.peers
        self.ids = self.ids_of(bench.rank)
        everything = torch.zeros(shape.tokens, experts, dtype=torch.bool, device=bench.device)
        self.map = everything.scatter_(1, self.ids, True)
        self.probs = bench.noise(self.map.shape, 900 + bench.rank, torch.float32)
        self.inputs = cycle([(self.map.clone(), self.probs.clone()) for _ in range(SETS)])

    def ids_of(self, rank: int) -> Tensor:
        """Int64 [S, K], ascending: of experts that are more and less popular on all ranks."""
        liking = self.bench.noise((1, self.experts), 999, torch.float32)
        scores = self.bench.noise((self.shape.tokens, self.experts), 1000 + rank, torch.float32)
        return (scores + liking).topk(self.shape.topk).indices.sort(1).values

    def counts_of(self, rank: int) -> Tensor:
        """Int32 [E]."""
        return torch.bincount(self.ids_of(rank).view(-1), minlength=self.experts).int()

    def compact(self, inputs: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, ...]:
        """Launch the compaction."""
        return compact.compact(*(inputs or (self.map, self.probs)), self.shape.topk)

    def exchange(self, counts_CE: Tensor) -> exchange.Exchanged:
        """Launch the exchange."""
        return exchange.exchange(self.peers, counts_CE, **self.common)


class Virtual:
    """The plan of more ranks than there are.

    Attributes:
        counts_RE: int32, on the device.
    """

    def __init__(self, work: Work, ranks: int) -> None:
        self.work, self.rank = work, work.bench.rank
        shape, experts = work.shape, work.experts
        self.counts_RE = torch.stack([work.counts_of(r) for r in range(ranks)])
        self.totals_2E = torch.stack(
            [self.counts_RE.sum(0), self.counts_RE[: self.rank].sum(0)]
        ).int()
        self.slots = min(MOST_SLOTS, experts // ranks)
        order = torch.arange(experts, device=work.bench.device, dtype=torch.int32)
        self.home_order = order.view(ranks, -1).flip(1).contiguous()
        self.planner = planning.Planner(
            ranks,
            experts,
            planner="best",
            slots=self.slots,
            most_rows=ranks * shape.tokens * shape.topk,
            device=work.bench.device,
        )

    def plan(self, exchanged: exchange.Exchanged) -> layout.DevicePlan:
        """Launch the plan; of the exchange it takes this rank's part only."""
        seen = exchange.Exchanged(
            first_CE=exchanged.first_CE, counts_RE=self.counts_RE, totals_2E=self.totals_2E
        )
        return self.planner.plan(seen, self.home_order, self.rank)

    def destinations(
        self, plan: layout.DevicePlan, ids: Tensor, places: Tensor, exchanged: exchange.Exchanged
    ) -> tuple[Tensor, Tensor]:
        """Launch the destinations."""
        return place.destinations(plan, ids, places, exchanged.first_CE, self.rank)

    def everything(self) -> tuple[layout.DevicePlan, Tensor, Tensor]:
        """All four."""
        ids, _, places, counts_CE = self.work.compact(next(self.work.inputs))
        exchanged = self.work.exchange(counts_CE)
        plan = self.plan(exchanged)
        return plan, *self.destinations(plan, ids, places, exchanged)


def bench_plan(bench: Bench) -> None:
    """Compaction, exchange, plan, destinations; then all of them."""
    first = bench.options.shapes[0]
    experts = bench.options.routed_experts
    shape = Shape(first.tokens, 0, first.topk, experts)
    virtual_ranks = [r for r in VIRTUAL_RANKS if experts % r == 0 and r >= bench.ranks]
    bench.warm(
        [
            compact.CompactConfig(experts, shape.topk, "float32"),
            exchange.ExchangeConfig(bench.ranks, experts),
            *(planning.PlanConfig(r, experts, "best") for r in virtual_ranks),
            *(place.DestinationsConfig(r, experts, shape.topk) for r in virtual_ranks),
        ]
    )
    work = Work(bench, shape, experts)

    def part(form: str, step: Callable[[], object], check: Callable[[], str]) -> None:
        row = {"form": form, "link": "none", "sms": None}
        row["shape"] = f"S={shape.tokens} K={shape.topk} E={experts}"
        bench.measure(row, None, step, check=check, launches=LAUNCHES)

    part("compact", lambda: work.compact(next(work.inputs)), partial(_check_compact, work))
    part("compact, inputs in the cache", work.compact, str)
    ids, _, places, counts_CE = work.compact()
    part(
        f"exchange, R={bench.ranks}",
        partial(work.exchange, counts_CE),
        partial(_check_exchange, work, counts_CE),
    )
    exchanged = work.exchange(counts_CE)
    for ranks in virtual_ranks:
        virtual = Virtual(work, ranks)
        check = partial(_check_plan, virtual)
        plan = virtual.plan(exchanged)
        solve = partial(virtual.plan, exchanged)
        send = partial(virtual.destinations, plan, ids, places, exchanged)
        part(f"plan, R={ranks}", solve, check)
        part(f"destinations, R={ranks}", send, str)
        part(f"all, plan of R={ranks}", virtual.everything, check)


def _check_compact(work: Work) -> str:
    ids, chosen, _, counts_CE = work.compact(next(work.inputs))
    good = {
        "ids": torch.equal(ids.long(), work.ids),
        "probs": torch.equal(chosen, work.probs.gather(1, work.ids)),
        "counts": torch.equal(
            counts_CE[:, : work.experts].sum(0).int(), work.counts_of(work.bench.rank)
        ),
    }
    return ", ".join(name for name, same in good.items() if not same)


def _check_exchange(work: Work, counts_CE: Tensor) -> str:
    seen = work.exchange(counts_CE).counts_RE
    expected = torch.stack([work.counts_of(r) for r in range(work.bench.ranks)])
    return "" if torch.equal(seen, expected) else "counts of the ranks"


def _check_plan(virtual: Virtual) -> str:
    """The plan and the destinations, bit for bit."""
    plan, rank_sK, row_sK = virtual.everything()
    counts_RE = virtual.counts_RE.cpu()
    expected = definition.make_plan(
        counts_RE, planner="best", slots=virtual.slots, home_order_Rn=virtual.home_order.cpu()
    )
    there = definition.destinations(expected, counts_RE, virtual.work.ids.cpu(), virtual.rank)
    wrong = [
        field.name
        for field in fields(expected)
        if field.name != "rule"
        and not torch.equal(getattr(plan, field.name).cpu(), getattr(expected, field.name))
    ]
    if planning.RULES[int(plan.rule)] != expected.rule:
        wrong.append(f"rule {planning.RULES[int(plan.rule)]} for {expected.rule}")
    for name, seen, wanted in zip(("rank", "row"), (rank_sK, row_sK), there, strict=True):
        if not torch.equal(seen.cpu(), wanted):
            wrong.append(f"{name} of the entries")
    virtual.work.bench.align()
    return ", ".join(wrong)
