"""Megatron's six dispatcher methods over a `Backend`.

Two forms. Under `MoonEPMoELayer` the receive rows go straight into the experts, which read them by
index and return per-token sums. Alone, ``dispatch_postprocess`` expands them to grouped rows and
``combine_preprocess`` sums these again.

Letters: s tokens, S the most tokens a rank may bring, K experts a token goes to, E experts,
R ranks, n = E/R, H row width, N = S*K grouped rows (more with a slack), M receive rows.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonep_megatron.backends.base import Backend, Choices, Route
from moonep_megatron.experts import gather_follows


class MoonEPTokenDispatcher(MoETokenDispatcher):
    """Dispatches tokens so that every expert-parallel rank computes the same number of rows.

    Args:
        config: the layer's TransformerConfig.
        pg_collection: the process groups, as for Megatron's own dispatchers.
        backend: the transport.
        home_order_n: int32 [n], global ids of this rank's experts in the order of their row
            groups; the layer sets it before its first dispatch. Default: last expert first.
    """

    def __init__(
        self,
        config: Any,
        pg_collection: Any,
        *,
        backend: Backend,
        home_order_n: Tensor | None = None,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.backend = backend
        self.topk: int = config.moe_router_topk
        if home_order_n is None:
            n = config.num_moe_experts // self.ep_size
            home_order_n = torch.arange(n - 1, -1, -1, dtype=torch.int32) + self.ep_rank * n
        self.home_order_n = home_order_n
        self.home_order_Rn: Tensor | None = None
        # State between steps 1 and 2 must be tensors that a captured graph can return.
        self.cudagraph_attrs = [f"choices.{field.name}" for field in fields(Choices)]
        self.choices: Choices | None = None
        self.hidden_shape: torch.Size | None = None
        self.route: Route | None = None

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Compute shared experts on a stream of their own, FC1 beside the dispatch, FC2 beside
        the combine (``--moe-shared-expert-overlap``).

        Args:
            shared_experts: Megatron's SharedExpertMLP, whose steps are called here in their order.
        """
        super().set_shared_experts(shared_experts)
        self.cudagraph_attrs += ["shared_experts.gate_score", "shared_experts.cached_fc1_input"]

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compact the routing map; no communication.

        Args:
            hidden_states: [..., H].
            routing_map: bool [s, E].
            probs: [s, E], any floating dtype.

        Returns:
            rows [s, H] and the probabilities [s, K] of the chosen experts, 0 for none.
        """
        self.hidden_shape = hidden_states.shape
        self.choices, chosen = self.backend.choose(routing_map, probs, self.topk)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        return hidden_states.reshape(-1, hidden_states.shape[-1]), chosen

    def route_ids(self, hidden_states: Tensor, ids_sK: Tensor) -> Tensor:
        """Step 1 for a caller that has expert ids: int32 or int64 [s, K], -1 for none.

        Returns:
            rows [s, H]; pass them to `token_dispatch` with probabilities [s, K].
        """
        if ids_sK.dim() != 2 or ids_sK.shape[1] != self.topk or ids_sK.is_floating_point():
            raise ValueError(
                f"expert ids must be integers of shape [tokens, {self.topk}] (--moe-router-topk), "
                f"got {ids_sK.dtype} {list(ids_sK.shape)}"
            )
        self.hidden_shape = hidden_states.shape
        self.choices = Choices(ids_sK=ids_sK)
        return hidden_states.reshape(-1, hidden_states.shape[-1])

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange counts, plan, and send the rows.

        Args:
            hidden_states: [s, H].
            probs: [s, K].

        Returns:
            receive rows [M, H], lent until the experts or `dispatch_postprocess` have read them,
            and probabilities [N].
        """
        assert self.choices is not None
        if self.home_order_Rn is None:
            order_n = self.home_order_n.to(hidden_states.device)
            self.home_order_Rn = self.backend.publish_home_order(order_n)
        self.route = self.backend.exchange(self.choices, self.home_order_Rn)
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        rows, probs = _Dispatch.apply(self.backend, self.route, hidden_states, probs)
        if self.shared_experts is not None:
            # It makes the dispatch's backward start before that of the shared FC1.
            self.shared_experts.linear_fc1_forward_and_act(rows)
        return rows, probs

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Expand the receive rows (stand-alone form only).

        Returns:
            grouped rows [N, H] of which the first ``cap`` are real, rows of each of this rank's 2n
            groups (home, then foreign) int64 [2n], and probabilities [N].
        """
        route = self.current_route()
        counts = route.plan.group_start_RG1[self.backend.rank].long().diff()
        rows, probs = _Expand.apply(self.backend, route, hidden_states, probs)
        return rows, counts.to(rows.device), probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Sum each token's grouped rows [N, H] on this rank to [M, H] (stand-alone form only)."""
        return _Presum.apply(self.backend, self.current_route(), hidden_states)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Bring the sums [M, H] home: [s, H]."""
        route, self.route = self.current_route(), None
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        output = _Gather.apply(self.backend, route, hidden_states)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(output)
            self.shared_experts.post_forward_comm()
        return output

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Give [s, H] the shape of the layer's input, and add the overlapped shared experts."""
        assert self.hidden_shape is not None
        output = hidden_states.view(self.hidden_shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()

    def current_route(self) -> Route:
        """The route of the pass between `token_dispatch` and `token_combine`."""
        assert self.route is not None, "token_dispatch has not run in this pass"
        return self.route


def recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass, as activation recompute does."""
    return torch._C._current_graph_task_id() != -1


class _Dispatch(torch.autograd.Function):
    """Rows and probabilities to the ranks that compute them; the adjoint of `_Gather`."""

    @staticmethod
    def forward(
        ctx: Any, backend: Backend, route: Route, x_sH: Tensor, probs_sK: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        ctx.backend, ctx.route = backend, route
        return backend.dispatch(route, x_sH, probs_sK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_receive: Tensor, d_probs: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.backend.gather(ctx.route, d_receive, d_probs)


class _Gather(torch.autograd.Function):
    """Per-rank sums to the owners of the tokens; the adjoint of `_Dispatch`."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, route: Route, sums_MH: Tensor) -> Tensor:
        ctx.backend, ctx.route = backend, route
        # Torch's other checkpoint recomputes until the last saved tensor is there again: without
        # this one it would stop between the pre-sum and the gather.
        ctx.save_for_backward(sums_MH.new_empty(0))
        return backend.gather(route, sums_MH)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor | None, ...]:
        # Recomputes now where a checkpoint asks for it: not while the rows below are lent.
        _ = ctx.saved_tensors
        return None, None, ctx.backend.dispatch(ctx.route, d_x)[0]


class _Expand(torch.autograd.Function):
    """Receive rows to grouped rows; the adjoint of `_Presum`.

    The probabilities pass through, because their gradients return with those of the rows.
    """

    @staticmethod
    def forward(
        ctx: Any, backend: Backend, route: Route, receive_MH: Tensor, probs_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.backend, ctx.route = backend, route
        rows_NH = _expanded(backend, route, receive_MH)
        return rows_NH, probs_N.view_as(probs_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_probs: Tensor) -> tuple[Tensor | None, ...]:
        if not gather_follows(ctx):
            return None, None, None, d_probs
        return None, None, ctx.backend.presum(ctx.route, d_rows, d_probs), d_probs


class _Presum(torch.autograd.Function):
    """Grouped rows of one token to their sum on this rank; the adjoint of `_Expand`."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, route: Route, rows_NH: Tensor) -> Tensor:
        ctx.backend, ctx.route = backend, route
        return backend.presum(route, rows_NH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _expanded(ctx.backend, ctx.route, d_sums)


def _expanded(backend: Backend, route: Route, receive_MH: Tensor) -> Tensor:
    """Lent rows, read through ``source_row_N`` and freed. Behind the cap are any rows."""
    source_row_N = route.source_row_N.clamp(0, max(receive_MH.shape[0] - 1, 0))
    rows_NH = receive_MH.index_select(0, source_row_N)
    backend.free_receive()
    return rows_NH
