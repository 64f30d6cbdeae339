"""Routings with a hot expert, planned and placed, the same on every rank."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kernel_bench.ranks import Shape
from moonep_megatron.backends.base import first_entry, receive_rows
from moonep_megatron.plan import destinations, make_plan


def ids_of(shape: Shape, rank: int, maxvio: float) -> Tensor:
    """Int64 [S, K], the experts of a rank's tokens; expert 0 has (1 + maxvio) times the mean.

    The others share the rest, by chance but for maxvio 0, where all have the same. Where the hot
    expert has more entries than there are tokens (above E/K - 1), tokens choose it repeatedly.
    """
    tokens, topk, experts = shape.tokens, shape.topk, shape.experts
    generator = torch.Generator().manual_seed(7919 * rank + int(1000 * maxvio))
    if maxvio == 0:
        decks = -(-tokens * topk // experts)
        shuffled = torch.rand(decks, experts, generator=generator).argsort(1)
        return shuffled.view(-1)[: tokens * topk].view(tokens, topk)
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, 0] = -1
    ids = scores.topk(topk).indices
    hot = min(round((1 + maxvio) * tokens * topk / experts), tokens * topk)
    times = torch.full((tokens,), hot // tokens)
    times[torch.randperm(tokens, generator=generator)[: hot % tokens]] += 1
    ids[torch.arange(topk) < times[:, None]] = 0
    return ids


class Route:
    """Where every entry of every rank goes.

    Attributes:
        rank, row, receive: int32 [S, K] of each rank, on the device: destination, grouped row and
            receive row of every entry.
        carries: bool [S, K] of each rank, whether an entry is its token's first on its rank.
        caps: grouped rows of each rank.
        maxvio: as counted.
        tokens_RR, entries_RR: int64 [R, R] on the host, of rank r with destination d.
    """

    def __init__(self, shape: Shape, ranks: int, maxvio: float, device: torch.device) -> None:
        self.shape, self.ranks, self.device = shape, ranks, device
        self.by_token = ranks <= shape.topk
        self.most = min(ranks, shape.topk) * shape.tokens
        ids = [ids_of(shape, r, maxvio) for r in range(ranks)]
        counts = torch.stack([torch.bincount(i.view(-1), minlength=shape.experts) for i in ids])
        total_E = counts.sum(0).double()
        self.maxvio = float(total_E.max() / total_E.mean() - 1)
        plan = make_plan(counts)
        self.caps = plan.cap_R.tolist()
        there = [destinations(plan, counts, ids[r], r) for r in range(ranks)]
        self.rank = [rank.to(device) for rank, _ in there]
        self.row = [row.to(device) for _, row in there]
        self.receive = [
            receive_rows(rank, row, r, ranks, shape.tokens)
            for r, (rank, row) in enumerate(zip(self.rank, self.row, strict=True))
        ]
        k = torch.arange(shape.topk, device=device)
        self.carries = [first_entry(rank) == k for rank in self.rank]
        self.tokens_RR, self.entries_RR = (
            torch.stack(
                [
                    torch.stack([chosen(r, d).sum() for d in range(ranks)]).cpu()
                    for r in range(ranks)
                ]
            )
            for chosen in (self.carriers, lambda r, d: self.rank[r] == d)
        )

    def carriers(self, r: int, d: int) -> Tensor:
        """Bool [S, K], the one entry of each token of rank r that stands for it on rank d."""
        return self.carries[r] & (self.rank[r] == d)

    def rows_of(self, d: int) -> Tensor:
        """``rows_of`` [M, K] of rank d, -1 for none."""
        shape = self.most, self.shape.topk
        out = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        for r in range(self.ranks):
            here = self.rank[r] == d
            token, k = here.nonzero(as_tuple=True)
            column = (here.cumsum(1) - 1)[token, k]
            out[self.receive[r][token, k].long(), column] = self.row[r][token, k]
        return out

    def on(self, d: int, values: list[Tensor]) -> Tensor:
        """Values [S, K] of every rank's entries, in the order of the grouped rows of rank d."""
        out = values[0].new_empty(self.caps[d])
        for r in range(self.ranks):
            here = self.rank[r] == d
            out[self.row[r][here].long()] = values[r][here]
        return out

    def busiest(self, bytes_RR: Tensor) -> int:
        """Of the bytes that rank r sends to rank d, those of the busiest rank and direction."""
        crossing_RR = bytes_RR.clone().fill_diagonal_(0)
        return int(torch.stack([crossing_RR.sum(0), crossing_RR.sum(1)]).max())


@cache
def route(shape: Shape, ranks: int, maxvio: float, device: torch.device) -> Route:
    """The route, made once."""
    return Route(shape, ranks, maxvio, device)
