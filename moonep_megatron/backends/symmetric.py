"""The backend of one NVLink domain: kernels that store to and load from the peers' memory.

After the first pass nothing waits on the host and nothing is allocated but ordinary tensors from
torch's cache, so a pass can be captured in a CUDA graph. `docs/protocol.md` says which memory may
be written when.

Letters as in `moonep_megatron.backends.base`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import override

import torch
import torch.distributed as dist
from torch import Tensor

from moonep_megatron.backends import faults
from moonep_megatron.backends.addresses import Addresses
from moonep_megatron.backends.base import Backend, Choices, Route, compare_plans, gather_objects
from moonep_megatron.backends.group_memory import (
    CountMemory,
    RowShape,
    SymmetricSlots,
    Tables,
    group_memory,
)
from moonep_megatron.backends.symmetric_route import SymmetricRoute, chosen_experts, plan_of
from moonep_megatron.kernels import pull_gradients as pull
from moonep_megatron.kernels import push_weights as push
from moonep_megatron.kernels.counting import count
from moonep_megatron.kernels.destinations import destinations
from moonep_megatron.kernels.dispatch import dispatch, free_receive
from moonep_megatron.kernels.duplicates import Duplicates
from moonep_megatron.kernels.exchange import Exchanged, exchange
from moonep_megatron.kernels.gather import gather
from moonep_megatron.kernels.plan import Planner
from moonep_megatron.kernels.presum import presum
from moonep_megatron.kernels.rows import RowMemory
from moonep_megatron.slots import SlotPool, SlotShape

# Measured on two H200s: rows need 16 SMs to fill the link, a push 8, a pull 12.
ROW_SMS, PUSH_SMS, PULL_SMS = 16, 8, 12


class SymmetricBackend(Backend):
    """Exchange, plan, dispatch, combine, push and pull as kernels over symmetric memory.

    Args:
        group: the expert-parallel group, inside one NVLink domain.
        num_experts: E, divisible by the group's size.
        slots: B, duplicate slots of a rank, 1..E/R.
        planner: planning rule, see `moonep_megatron.plan`.
        slack: how far above an equal share a rank may be, in parts (`moonep_megatron.caps`).
        max_tokens: S, or None to agree on the most tokens of any rank at the first exchange.
        check_plan: compare the plan's hash across ranks in every exchange (debugging; waits).
        reuse: layers keep their duplicates in slots of their own, see `keep_slots`.
        num_sms: most SMs that a kernel of rows may use; pushes and pulls take fewer.
        sharing: ranks on this GPU, above 1 in tests only. They divide its SMs, because kernels
            that wait for another rank must leave it some.
        timeout: seconds that a kernel waits for another rank.
    """

    device_bounds = True
    # The first slots are needed first, and arrive first.
    slot_chunks = (1, 3)

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
        reuse: bool = False,
        num_sms: int | None = None,
        sharing: int = 1,
        timeout: float = 300.0,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.num_experts = num_experts
        self.slots = slots
        self.slack = slack
        self.max_tokens = max_tokens
        self.check_plan = check_plan
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.memory = group_memory(group, self.device, timeout)
        # The pre-sum moves nothing between ranks, so it may use the whole GPU.
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        most = num_sms or ROW_SMS
        if sharing > 1:  # waiting pre-sums leave half, a row kernel, a push and a pull together 3/8
            sms = max(1, sms // (2 * sharing))
            most = max(1, min(most, 5 * sms // 12))
        self.all_sms = sms
        self.row_sms, self.push_sms, self.pull_sms = most, min(most, PUSH_SMS), min(most, PULL_SMS)
        self._planner_name = planner
        self._planners: dict[int, Planner] = {}
        self._addresses = Addresses(num_experts // self.size, self.device)
        self._held_RB: Tensor | None = None
        if reuse:
            self._held_RB = torch.full(
                (self.size, slots), -1, dtype=torch.int32, device=self.device
            )
        self._version: Callable[[], int] = int
        self._lent: RowMemory | None = None
        self._pushed: Duplicates | None = None
        self._pulled: Duplicates | None = None
        self._before_dispatch = torch.cuda.Event()

    @override
    def choose(self, routing_map: Tensor, probs: Tensor, topk: int) -> tuple[Choices, Tensor]:
        ids, chosen, places, counts = chosen_experts(routing_map.contiguous(), probs, topk)
        choices = Choices(ids_sK=ids, places_sK=places, counts_CE=counts)
        return choices, chosen.to(probs.dtype)

    @override
    def publish_home_order(self, order_n: Tensor) -> Tensor:
        orders = gather_objects(self.group, order_n.tolist())
        return torch.tensor(orders, dtype=torch.int32, device=self.device)

    @override
    def exchange(self, choices: Choices, home_order_Rn: Tensor) -> SymmetricRoute:
        (tokens, topk), experts = choices.ids_sK.shape, self.num_experts
        max_tokens = self._agreed_max_tokens(tokens)
        ids, places, counts = choices.ids_sK, choices.places_sK, choices.counts_CE
        if places is None or counts is None:
            ids, places, counts = count(ids.contiguous(), experts)
        exchanged = self._exchange(self.memory.counts(experts), counts, tokens, max_tokens)
        planner = self._planner(topk, max_tokens)
        made = planner.plan(exchanged, home_order_Rn, self.rank, self._held_RB)
        rank_sK, row_sK = destinations(made, ids, places, exchanged.first_CE, self.rank)
        plan = plan_of(made)
        if self.check_plan:
            compare_plans(self.group, plan)
        homes = experts // self.size
        starts = plan.group_start_RG1[self.rank].index_select(0, self._shifted)
        if tokens > max_tokens:
            # The exchange ends the processes of all ranks with these words; should it not:
            torch.cuda.synchronize(self.device)
            raise ValueError(
                faults.bad_input(faults.TOO_MANY_TOKENS, self.rank, tokens, max_tokens)
            )
        shape = RowShape(max_tokens, topk, self.slack, 0, torch.float32)
        kept = Tables(shape, self.size, self.device)
        return SymmetricRoute(
            plan=plan,
            counts_RE=exchanged.counts_RE,
            source_row_N=kept.source_row_N,
            tables=kept,
            tokens=tokens,
            topk=topk,
            max_tokens=max_tokens,
            waves=-(-homes // self.slots) if self.size > 1 else 0,
            rank=self.rank,
            rank_sK=rank_sK,
            row_sK=row_sK,
            starts=starts.view(4, -1),
        )

    @override
    def dispatch(
        self, route: Route, x_sH: Tensor, probs_sK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(route, SymmetricRoute)
        rows = self._rows(route, x_sH)
        self.memory.turns.begin("dispatch", rows, self.layer)
        self._before_dispatch.record()
        probs = None if probs_sK is None else probs_sK.float().contiguous()
        dispatch(
            rows,
            x_sH.contiguous(),
            route.rank_sK,
            route.row_sK,
            probs,
            sms=self.row_sms,
            layer=self.layer,
        )
        self._lent = rows
        receive_MH = rows.memory.local(rows.receive)
        if probs_sK is None:
            return receive_MH, None
        route.tables.take(rows)
        return receive_MH, route.tables.probs_N().to(probs_sK.dtype)

    @override
    def keep(self, lent: Tensor) -> Tensor:
        return lent.clone()

    @override
    def free_receive(self) -> None:
        assert self._lent is not None
        free_receive(self._lent)
        self.memory.turns.end("dispatch", self._lent)
        self._lent = None

    @override
    def presum(self, route: Route, rows_NH: Tensor, d_probs_N: Tensor | None = None) -> Tensor:
        assert isinstance(route, SymmetricRoute)
        rows = self._rows(route, rows_NH)
        self.memory.turns.begin("pre-sum", rows, self.layer)
        if d_probs_N is not None:
            rows.memory.local(rows.d_probs).copy_(d_probs_N)
        presum(
            rows,
            rows_NH,
            route.tables.rows_of_MK,
            route.source_row_N,
            route.cap,
            sms=self.all_sms,
            layer=self.layer,
        )
        return rows.memory.local(rows.combine)

    @override
    def gather(
        self, route: Route, sums_MH: Tensor, d_probs_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(route, SymmetricRoute)
        rows = self._rows(route, sums_MH)
        if sums_MH.data_ptr() != rows.memory.local(rows.combine).data_ptr():
            raise RuntimeError(
                "the sums of a pre-sum must reach the gather as they are; something between the "
                "experts and the combine of an MoE layer copied or changed them"
            )
        shape = (route.tokens, route.topk)
        x_sH = sums_MH.new_empty(route.tokens, sums_MH.shape[1])
        d_probs_sK = None if d_probs_N is None else torch.empty(shape, device=self.device)
        gather(
            rows,
            route.rank_sK,
            route.row_sK,
            x_sH,
            d_probs_sK,
            sms=self.row_sms,
            layer=self.layer,
        )
        self.memory.turns.end("pre-sum", rows)
        if d_probs_N is None or d_probs_sK is None:
            return x_sH, None
        return x_sH, d_probs_sK.to(d_probs_N.dtype)

    @override
    def make_slots(self, count: int, shape: SlotShape) -> SlotPool:
        return self.memory.slots(count, shape)

    @override
    def keep_slots(self, shared: SlotPool, version: Callable[[], int]) -> SlotPool:
        assert isinstance(shared, SymmetricSlots)
        assert self._held_RB is not None
        self._version = version
        # New slots hold nothing; the order of the experts in them never decides what is pushed.
        self._held_RB.fill_(-1)
        return self.memory.kept_slots(shared, self._held_RB)

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
        assert isinstance(slots, SymmetricSlots)
        if slots.pushed.kept is not None and torch.cuda.is_current_stream_capturing():
            # A replay would compare the tags with the version of the capture.
            raise RuntimeError("--moe-moonep-reuse cannot be captured in a CUDA graph")
        self._pushed, self._pulled = slots.pushed, slots.pulled
        self.memory.turns.begin("push", slots.pushed, self.layer)
        # Weights were ready before the dispatch; what the slots held, the flags guard.
        self.memory.side.wait_event(self._before_dispatch)
        with torch.cuda.stream(self.memory.side):
            first, second = (
                self._addresses.table(f"weights of FC{p + 1}", weights.get(p, ())) for p in (0, 1)
            )
            push.push_weights(
                slots.pushed if len(weights) == 2 else slots.pushed.only(weights),
                route.plan.foreign_expert_Rn,
                (first, second),
                wave,
                backward=backward,
                version=self._version(),
                sms=self.push_sms,
                layer=self.layer,
            )

    @override
    def wait_slots(self, route: Route, wave: int, projection: int, first: int, end: int) -> None:
        assert self._pushed is not None
        push.wait_slots(
            self._pushed,
            route.plan.foreign_expert_Rn,
            wave,
            projection,
            first,
            end,
            layer=self.layer,
        )

    @override
    def free_slots(self) -> None:
        assert self._pushed is not None
        push.free_slots(self._pushed)
        self.memory.turns.end("push", self._pushed)

    @override
    def wait_pulled(self) -> None:
        assert self._pulled is not None
        pull.wait_pulled(self._pulled, layer=self.layer)

    @override
    def pull_gradients(
        self,
        route: Route,
        wave: int,
        slots: SlotPool,
        targets: tuple[Sequence[Tensor], Sequence[Tensor]],
    ) -> None:
        assert isinstance(slots, SymmetricSlots)
        dtypes = {target.dtype for targets_n in targets for target in targets_n}
        if len(dtypes) > 1:
            raise TypeError(f"the gradients of FC1 and FC2 must have one dtype, not {dtypes}")
        pull.grads_ready(slots.pulled)
        self.memory.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.memory.side):
            first, second = (
                self._addresses.table(f"gradients of FC{p + 1}", targets_n)
                for p, targets_n in enumerate(targets)
            )
            pull.pull_gradients(
                slots.pulled,
                route.plan.foreign_expert_Rn,
                (first, second),
                dtypes.pop(),
                wave,
                sms=self.pull_sms,
                layer=self.layer,
            )

    @override
    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self.memory.side)

    def _agreed_max_tokens(self, tokens: int) -> int:
        """S; without one given, the most tokens of any rank at the first exchange with tokens."""
        if self.max_tokens is None:
            self.max_tokens = max(gather_objects(self.group, tokens)) or None
        # Kernels need memory to point to, also when no rank has brought a token yet.
        return self.max_tokens or 1

    def _exchange(
        self, memory: CountMemory, counts_CE: Tensor, tokens: int, max_tokens: int
    ) -> Exchanged:
        return exchange(
            memory.memory.peers,
            counts_CE,
            tokens=tokens,
            max_tokens=max_tokens,
            rank=self.rank,
            layer=self.layer,
            counts_offset=memory.counts.offset,
            flags_offset=memory.flags.offset,
            control=memory.memory.control,
            fault=memory.memory.fault,
            timeout_ns=self.memory.timeout_ns,
        )

    def _planner(self, topk: int, max_tokens: int) -> Planner:
        most = self.size * max_tokens * topk
        if most not in self._planners:
            self._planners[most] = Planner(
                self.size,
                self.num_experts,
                planner=self._planner_name,
                slots=self.slots,
                slack=self.slack,
                keeps=self._held_RB is not None,
                most_rows=most,
                device=self.device,
            )
        return self._planners[most]

    @cached_property
    def _shifted(self) -> Tensor:
        """int32 [4 * P], which boundary stands at each place of `SymmetricRoute.starts`."""
        last = 2 * self.num_experts // self.size
        places = -(-(last + 4) // 4) * 4
        shifted = [[min(place + shift, last) for place in range(places)] for shift in range(4)]
        return torch.tensor(shifted, dtype=torch.int32, device=self.device).view(-1)

    def _rows(self, route: Route, rows: Tensor) -> RowMemory:
        shape = RowShape(route.max_tokens, route.topk, self.slack, rows.shape[1], rows.dtype)
        return self.memory.rows(shape)
