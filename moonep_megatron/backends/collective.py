"""The portable backend: torch.distributed collectives, gloo on CPUs and NCCL across nodes.

The reference for the symmetric backend. It reads the exchanged counts on the host (plan) and then
the number of rows that cross between each pair of ranks (split sizes): two host synchronisations a
layer on GPUs. Rows cross once a token and rank; only real rows travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import override

import torch
import torch.distributed as dist
from torch import Tensor

from moonep_megatron.backends import faults
from moonep_megatron.backends.bags import bags, sum_bags
from moonep_megatron.backends.base import (
    Backend,
    Choices,
    Route,
    compare_plans,
    first_entry,
    receive_rows,
    row_counts,
)
from moonep_megatron.backends.residents import Residents
from moonep_megatron.plan import Plan, destinations, make_plan
from moonep_megatron.slots import SlotPool


@dataclass(frozen=True, kw_only=True)
class CollectiveRoute(Route):
    """A `Route` with the split sizes and orders of this rank's collectives.

    Attributes:
        starts: the 2n + 1 row boundaries of this rank's groups, home then foreign, on the host.
        foreign_Rn: the plan's foreign experts on the host, read by every push and pull.
        sent_token_U: int64, the token behind each row this rank sends, by (destination, token).
        sent_rows, received_rows: rows to and from each rank.
        received_row_V: int64, the receive row of each arriving row, by (source, token).
        sent_entry_A: int64, flat (token, k) index of each entry sent, by (destination, token, k).
        sent_entries, received_entries: entries to and from each rank.
        received_entry_C: int64, the grouped row of each arriving entry, by (source, token, k).
        presum_order_C, presum_starts_M: grouped rows by receive row, and where each begins.
        gather_order_U, gather_starts_s: sent rows by (token, destination), and where each begins.
    """

    starts: list[int]
    foreign_Rn: list[list[int]]
    sent_token_U: Tensor
    sent_rows: list[int]
    received_rows: list[int]
    received_row_V: Tensor
    sent_entry_A: Tensor
    sent_entries: list[int]
    received_entries: list[int]
    received_entry_C: Tensor
    presum_order_C: Tensor
    presum_starts_M: Tensor
    gather_order_U: Tensor
    gather_starts_s: Tensor

    @override
    def bounds(self, first: int, count: int) -> list[int]:
        return self.starts[first : first + count + 1]

    @override
    def starts_G1(self) -> list[int]:
        return self.starts


class CollectiveBackend(Backend):
    """Exchange, dispatch, combine, push and pull over ``torch.distributed``.

    Args:
        group: the expert-parallel group.
        num_experts: E, divisible by the group's size.
        slots: B, duplicate slots of a rank, 1..E/R.
        planner: planning rule, see `moonep_megatron.plan`.
        slack: how far above an equal share a rank may be, in parts (`moonep_megatron.caps`).
        max_tokens: S, or None to agree on the most tokens of any rank at the first exchange.
        check_plan: compare the plan's hash across ranks in every exchange (debugging).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        num_experts: int,
        slots: int,
        planner: str = "best",
        slack: int = 0,
        max_tokens: int | None = None,
        check_plan: bool = False,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        nccl = dist.get_backend(group) == "nccl"
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        )
        self.num_experts = num_experts
        self.slots = slots
        self.planner = planner
        self.slack = slack
        self.max_tokens = max_tokens
        self.check_plan = check_plan
        self.residents: Residents | None = None

    @override
    def keep_slots(self, shared: SlotPool, version: Callable[[], int]) -> SlotPool:
        slots, homes = shared.tagged(), self.num_experts // self.size
        self.residents = Residents(slots, version, homes, self._gather_numbers)
        return slots

    @override
    def publish_home_order(self, order_n: Tensor) -> Tensor:
        return self._all_gather(order_n)

    @override
    def exchange(self, choices: Choices, home_order_Rn: Tensor) -> CollectiveRoute:
        ids_sK = choices.ids_sK.long()
        excess = ids_sK.new_zeros(()) if choices.excess is None else choices.excess
        counts_RE = self._exchange_counts(ids_sK, excess)
        residents = self.residents
        plan = make_plan(
            counts_RE,
            planner=self.planner,
            slots=self.slots,
            slack=self.slack,
            home_order_Rn=home_order_Rn.cpu(),
            held=residents.held(self.layer) if residents else None,
        )
        if residents:
            residents.planned(plan)
        if self.check_plan:
            compare_plans(self.group, plan)
        return self._route(plan, counts_RE, ids_sK)

    @override
    def dispatch(
        self, route: Route, x_sH: Tensor, probs_sK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(route, CollectiveRoute)
        arrived_VH = self._all_to_all(
            x_sH.index_select(0, route.sent_token_U), route.sent_rows, route.received_rows
        )
        receive_MH = x_sH.new_zeros(route.presum_starts_M.numel(), x_sH.shape[1])
        receive_MH.index_copy_(0, route.received_row_V, arrived_VH)
        if probs_sK is None:
            return receive_MH, None
        arrived_C = self._all_to_all(
            probs_sK.reshape(-1).index_select(0, route.sent_entry_A),
            route.sent_entries,
            route.received_entries,
        )
        probs_N = probs_sK.new_zeros(route.source_row_N.numel())
        return receive_MH, probs_N.index_copy_(0, route.received_entry_C, arrived_C)

    @override
    def presum(self, route: Route, rows_NH: Tensor, d_probs_N: Tensor | None = None) -> Tensor:
        assert isinstance(route, CollectiveRoute)
        return sum_bags(rows_NH, route.presum_order_C, route.presum_starts_M)

    @override
    def gather(
        self, route: Route, sums_MH: Tensor, d_probs_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(route, CollectiveRoute)
        returned_UH = self._all_to_all(
            sums_MH.index_select(0, route.received_row_V), route.received_rows, route.sent_rows
        )
        x_sH = sum_bags(returned_UH, route.gather_order_U, route.gather_starts_s)
        if d_probs_N is None:
            return x_sH, None
        returned_A = self._all_to_all(
            d_probs_N.index_select(0, route.received_entry_C),
            route.received_entries,
            route.sent_entries,
        )
        probs = d_probs_N.new_zeros(route.tokens * route.topk)
        probs.index_copy_(0, route.sent_entry_A, returned_A)
        return x_sH, probs.view(route.tokens, route.topk)

    @override
    def push_weights(
        self,
        route: Route,
        wave: int,
        weights: Mapping[int, Sequence[Tensor]],
        slots: SlotPool,
        *,
        backward: bool = False,
    ) -> None:
        residents = self.residents
        tags = residents.look(self.layer) if residents else None
        n = self.num_experts // self.size
        for projection, weights_n in weights.items():
            slots_Boi = slots.weights(projection)
            # Straight from parameter to slot: a hot expert's home would have to stage R - 1 copies.
            transfers, filled = [], []
            for holder in range(self.size):
                for slot, expert, home in self._copies(route, holder, wave):
                    if tags and tags.has(holder, slot, projection, home * n + expert):
                        continue
                    if home == self.rank:
                        transfers.append(self._send(weights_n[expert], holder, slot))
                    elif holder == self.rank:
                        transfers.append(self._receive(slots_Boi[slot], home, slot))
                        filled.append((slot, home * n + expert))
            if residents and tags:
                for slot, _ in filled:
                    residents.clear(slot, projection)
            _finish(transfers)
            if residents and tags:
                for slot, expert in filled:
                    residents.mark(slot, projection, tags.wanted(expert))

    @override
    def pull_gradients(
        self,
        route: Route,
        wave: int,
        slots: SlotPool,
        targets: tuple[Sequence[Tensor], Sequence[Tensor]],
    ) -> None:
        for slot_grads_Boi, targets_n in zip((slots.grad1, slots.grad2), targets, strict=True):
            self._pull(route, wave, slot_grads_Boi, targets_n)

    def _pull(
        self, route: Route, wave: int, slot_grads_Boi: Tensor, targets_n: Sequence[Tensor]
    ) -> None:
        sums: dict[int, Tensor] = {}
        # Holder by holder, so that a home stages the copies of one at a time, and adds in order.
        for holder in range(self.size):
            copies = self._copies(route, holder, wave)
            if holder == self.rank:
                _finish([self._send(slot_grads_Boi[slot], home, slot) for slot, _, home in copies])
            mine = [(slot, expert) for slot, expert, home in copies if home == self.rank]
            arriving = [(expert, torch.empty_like(slot_grads_Boi[0])) for _, expert in mine]
            _finish(
                self._receive(gradient, holder, slot)
                for (slot, _), (_, gradient) in zip(mine, arriving, strict=True)
            )
            for expert, gradient in arriving:
                # A narrow main_grad is rounded once, not once a copy.
                narrow = targets_n[expert].dtype != gradient.dtype
                into = sums.setdefault(expert, torch.zeros_like(gradient)) if narrow else None
                (targets_n[expert] if into is None else into).add_(gradient)
        for expert, total in sums.items():
            targets_n[expert].add_(total)

    def _exchange_counts(self, ids_sK: Tensor, excess: Tensor) -> Tensor:
        """All ranks' counts [R, E] on the host; raises on every rank when one has bad input."""
        tokens, topk = ids_sK.shape
        legal = (ids_sK >= 0) & (ids_sK < self.num_experts)
        bad = ((ids_sK < -1) | (ids_sK >= self.num_experts)).sum()
        # Illegal ids count into a spare bin, so that every rank can finish the exchange.
        flat = torch.where(legal, ids_sK, self.num_experts).reshape(-1)
        counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=ids_sK.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        header = torch.stack([bad, excess.to(bad), bad.new_full((), tokens)])
        everyone = self._all_gather(torch.cat([counts[:-1], header])).cpu()
        self._refuse_bad_input(everyone[:, self.num_experts :].tolist(), topk)
        # Without any token there is nothing to agree on yet.
        self.max_tokens = self.max_tokens or int(everyone[:, -1].max()) or None
        return everyone[:, : self.num_experts].int()

    def _refuse_bad_input(self, headers: list[list[int]], topk: int) -> None:
        words = partial(faults.bad_input, num_experts=self.num_experts, topk=topk)
        for rank, (bad, excess, tokens) in enumerate(headers):
            if bad:
                raise ValueError(words(faults.BAD_IDS, rank, bad, 0))
            if excess:
                raise ValueError(words(faults.EXCESS_CHOICES, rank, excess, 0))
            if self.max_tokens is not None and tokens > self.max_tokens:
                raise ValueError(words(faults.TOO_MANY_TOKENS, rank, tokens, self.max_tokens))

    def _route(self, plan: Plan, counts_RE: Tensor, ids_sK: Tensor) -> CollectiveRoute:
        """Derive what this rank sends, tell every rank, and lay out what arrives."""
        (tokens, topk), max_tokens = ids_sK.shape, self.max_tokens or 0
        grouped, received = row_counts(max_tokens, topk, self.size, self.slack)
        device = ids_sK.device
        there = destinations(plan.to(device), counts_RE.to(device), ids_sK, self.rank)
        rank_sK, row_sK = (x.long() for x in there)
        receive_sK = receive_rows(rank_sK, row_sK, self.rank, self.size, max_tokens)
        k = torch.arange(topk, device=ids_sK.device)
        # The first entry of a token for a rank carries the token's row.
        carries_sK = (first_entry(rank_sK) == k) & (rank_sK >= 0)
        carrier_rank_sK = torch.where(carries_sK, rank_sK, -1)
        (sent_entries, sent_rows), (received_entries, received_rows) = self._exchange_sizes(
            rank_sK, carrier_rank_sK
        )
        entry_A = _by_rank(rank_sK, sum(sent_entries))
        token_U = _by_rank(carrier_rank_sK, sum(sent_rows)) // max(topk, 1)
        table_A3 = torch.stack([row_sK, receive_sK, carries_sK.long()], dim=2).view(-1, 3)[entry_A]
        row_C, receive_C, carries_C = self._all_to_all(
            table_A3, sent_entries, received_entries
        ).unbind(1)
        source_row_N = torch.zeros(grouped, dtype=torch.int32, device=ids_sK.device)
        carried = torch.sort(carries_C, descending=True, stable=True).indices[: sum(received_rows)]
        presum_order, presum_starts = bags(receive_C, received)
        gather_order, gather_starts = bags(token_U, tokens)
        return CollectiveRoute(
            plan=plan,
            counts_RE=counts_RE,
            source_row_N=source_row_N.index_copy_(0, row_C, receive_C.int()),
            starts=plan.group_start_RG1[self.rank].tolist(),
            tokens=tokens,
            topk=topk,
            max_tokens=max_tokens,
            waves=plan.waves(self.slots),
            foreign_Rn=plan.foreign_expert_Rn.tolist(),
            sent_token_U=token_U,
            sent_rows=sent_rows,
            received_rows=received_rows,
            received_row_V=receive_C[carried],
            sent_entry_A=entry_A,
            sent_entries=sent_entries,
            received_entries=received_entries,
            received_entry_C=row_C,
            presum_order_C=row_C[presum_order],
            presum_starts_M=presum_starts,
            gather_order_U=gather_order,
            gather_starts_s=gather_starts,
        )

    def _exchange_sizes(
        self, rank_sK: Tensor, carrier_rank_sK: Tensor
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Entries and rows that this rank sends to, and receives from, every rank."""
        ranks = torch.arange(self.size, device=rank_sK.device)
        sent_R2 = torch.stack(
            [(x.reshape(-1, 1) == ranks).sum(0) for x in (rank_sK, carrier_rank_sK)], dim=1
        )
        received_R2 = self._all_to_all(sent_R2, [1] * self.size, [1] * self.size)
        sent, received = torch.stack([sent_R2.t(), received_R2.t()]).tolist()
        return sent, received

    def _copies(self, route: Route, holder: int, wave: int) -> list[tuple[int, int, int]]:
        """What ``holder`` holds in this wave: (slot, local index at home, home rank), by slot."""
        assert isinstance(route, CollectiveRoute)
        n = self.num_experts // self.size
        experts = route.foreign_Rn[holder][wave * self.slots : (wave + 1) * self.slots]
        return [(slot, e % n, e // n) for slot, e in enumerate(experts) if e >= 0]

    def _send(self, tensor: Tensor, to: int, slot: int) -> dist.P2POp:
        return dist.P2POp(dist.isend, tensor, group=self.group, tag=slot, group_peer=to)

    def _receive(self, tensor: Tensor, source: int, slot: int) -> dist.P2POp:
        return dist.P2POp(dist.irecv, tensor, group=self.group, tag=slot, group_peer=source)

    def _gather_numbers(self, x: Tensor) -> Tensor:
        """[R, *x.shape] on the host, of integers on the host."""
        return self._all_gather(x.to(self.device)).cpu()

    def _all_gather(self, x: Tensor) -> Tensor:
        """[R, *x.shape], stacked by rank."""
        if self.size == 1:
            return x[None]
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out.view(self.size, *x.shape)

    def _all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows of ``x``, ``sent[r]`` to each rank r, exchanged for ``received[r]`` from each."""
        if self.size == 1:
            return x
        out = x.new_empty(sum(received), *x.shape[1:])
        # As bytes, so that every dtype travels over every transport.
        width = prod(x.shape[1:]) * x.itemsize
        source, target = (
            t.view(-1).view(torch.uint8).view(t.shape[0], width) for t in (x.contiguous(), out)
        )
        dist.all_to_all_single(target, source, received, sent, group=self.group)
        return out


def _finish(transfers: Iterable[dist.P2POp]) -> None:
    """Start transfers together and wait for all of them."""
    started = list(transfers)
    if started:
        for work in dist.batch_isend_irecv(started):
            work.wait()


def _by_rank(rank_sK: Tensor, count: int) -> Tensor:
    """Flat (token, k) indices of the entries with a rank, by (rank, token, k).

    Args:
        count: how many entries have a rank (known on the host).
    """
    order = torch.sort(rank_sK.reshape(-1), stable=True).indices
    return order[order.numel() - count :]
