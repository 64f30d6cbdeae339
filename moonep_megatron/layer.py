"""The MoE layer: Megatron's own, with our dispatcher and our expert compute."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from moonep_megatron import config as moonep_config
from moonep_megatron import metrics, quack_gemm
from moonep_megatron.activation import activation
from moonep_megatron.backends import log_once, make_backend
from moonep_megatron.conditions import captures_dispatch, tokens_twice
from moonep_megatron.dispatcher import MoonEPTokenDispatcher, recomputing
from moonep_megatron.experts import ExpertCall, run_experts
from moonep_megatron.forced import forced_gating
from moonep_megatron.plan import plan_hash
from moonep_megatron.slots import SlotPool, SlotShape, slot_pool
from moonep_megatron.weights import HomeWeights


class MoonEPMoELayer(MoELayer):
    """A MoELayer whose expert-parallel ranks all compute the same number of rows.

    Parameters, state dict and router are Megatron's. For every dispatcher type but ``moonep`` the
    constructor gives Megatron's own MoELayer.

    Raises:
        ValueError, TypeError: when built, for a configuration or an expert module that is not
            supported; the message names the flag and the remedy.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """The layer that the config's dispatcher type asks for."""
        config = kwargs.get("config", args[0] if args else None)
        # copy and pickle call without arguments.
        if config is None or config.moe_token_dispatcher_type == "moonep":
            return super().__new__(cls)
        return MoELayer(*args, **kwargs)

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        groups = _default_groups() if pg_collection is None else pg_collection
        # The base class knows no `moonep`, and `alltoall` would create a CUDA stream.
        with moonep_config.presented_as(config, "allgather"):
            super().__init__(config, submodules, layer_number, groups, **kwargs)
        self.moonep = moonep_config.active()
        moonep_config.check(config, self.moonep)
        self.home = HomeWeights(self.experts, self.num_local_experts)
        self.token_dispatcher = MoonEPTokenDispatcher(
            config,
            groups,
            backend=make_backend(
                self.moonep,
                self.ep_group,
                config.num_moe_experts,
                topk=config.moe_router_topk,
                hidden=config.moe_latent_size or config.hidden_size,
                ffn=config.moe_ffn_hidden_size,
                dtype=config.params_dtype,
            ),
        )
        self._check_capture()
        if self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)
        self.activation = activation(config, fuse=torch.cuda.is_available())
        self.probs_on_input: bool = config.moe_apply_probs_on_input
        self.router_histogram: Tensor | None = None
        # The rows of the pass between dispatch and experts, for --moe-moonep-redispatch.
        self.dispatched_sH: Tensor | None = None
        # This layer's own, for --moe-moonep-reuse.
        self.kept_slots: SlotPool | None = None
        # Hashes of plans whose pass will be recomputed, in any order: how many of each.
        self.checkpointed_plans: Counter[int] = Counter()
        if self.moonep.force_maxvio is not None:
            self.router.gating = forced_gating(
                self.router.gating,
                self.moonep.force_maxvio,
                config.moe_router_topk,
                lambda: (self.layer_number or 0) % config.num_moe_experts,
            )

    def _check_capture(self) -> None:
        """Refuse graphs over what waits for the host, now that the backend is known.

        Raises:
            ValueError: names the flag, also where `auto` has taken the collective backend.
        """
        if not captures_dispatch(self.config):
            return
        if not self.token_dispatcher.backend.device_bounds:
            moonep_config.check(self.config, replace(self.moonep, backend="collective"))
        fc1, fc2 = (p.weights()[0] for p in (self.home.fc1, self.home.fc2))
        reason = quack_gemm.refusal(self.config.params_dtype, *fc1.shape, *fc2.shape)
        if reason is not None:
            raise ValueError(
                f"--cuda-graph-impl = {self.config.cuda_graph_impl!r} is not supported: quack's "
                f"grouped GEMM cannot serve these experts ({reason}), and torch's products wait "
                "for the host; leave it out."
            )
        log_once(
            f"moonep: --cuda-graph-impl {self.config.cuda_graph_impl} is unproven: Megatron's own "
            "graphs over this layer have not passed their tests on a GPU yet"
        )

    def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Megatron's routing, unchanged; its histogram [E] is kept while metrics are recorded."""
        routed = super().route(hidden_states, padding_mask)
        if metrics.recording():
            # A replayed graph that ends behind the preprocessing keeps its routing map.
            self.router_histogram = None if routed[1] is None else routed[1].sum(0)
        return routed

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send rows [s, H] and probabilities [s, K]; receive rows [M, H] and probabilities [N]."""
        if tokens_twice(self.config.sequence_parallel, self.config):
            # Switched off since the layer was built. Copies of a token may be summed in different
            # orders, so tensor-parallel ranks would drift apart.
            moonep_config.check(self.config, self.moonep)
        self.home.replay_pre_hooks()
        if self.token_dispatcher.home_order_Rn is None:  # published with this first dispatch
            order_n = torch.tensor(self.home.order(), dtype=torch.int32)
            self.token_dispatcher.home_order_n = order_n + self.local_expert_indices[0]
        if self.probs_on_input:  # K = 1, so a row has one probability before it travels
            hidden_states = (hidden_states * probs).to(hidden_states.dtype)
            probs = torch.ones_like(probs)
        self.token_dispatcher.backend.layer = self.layer_number or 0
        dispatched = self.token_dispatcher.token_dispatch(hidden_states, probs)
        self.dispatched_sH = hidden_states.detach() if self.moonep.redispatch else None
        if self.moonep.check_plan and self.training:
            self._compare_with_checkpointed(plan_hash(self.token_dispatcher.current_route().plan))
        return dispatched

    def _compare_with_checkpointed(self, plan: int) -> None:
        """A recomputed pass must have the plan of a pass that was checkpointed (debugging).

        Megatron's checkpoints run their first pass without gradients. Where no such pass was seen
        (torch's non-reentrant checkpoint), there is nothing to compare with.
        """
        if not recomputing():
            self.checkpointed_plans[plan] += not torch.is_grad_enabled()
        elif self.checkpointed_plans.total():
            if not self.checkpointed_plans[plan]:
                raise RuntimeError(
                    "activation recompute routed a microbatch differently from its first pass; "
                    "the router is not deterministic (--moe-moonep-check-plan)"
                )
            self.checkpointed_plans[plan] -= 1

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Receive rows [M, H] and probabilities [N] to per-token sums [M, H]."""
        backend, route = self.token_dispatcher.backend, self.token_dispatcher.current_route()
        slots = self._slots(hidden_states)
        x_sH, self.dispatched_sH = self.dispatched_sH, None
        call = ExpertCall(
            backend=backend,
            route=route,
            home=self.home,
            slots=slots,
            activation=self.activation,
            fused=self.config.gradient_accumulation_fusion,
            differentiated=torch.is_grad_enabled(),
            on_host=not backend.device_bounds or _products_on_host(slots),
            dispatch_again=None if x_sH is None else lambda: backend.dispatch(route, x_sH)[0],
        )
        metrics.observe(self, call)
        return run_experts(call, hidden_states, probs), None

    def _slots(self, rows: Tensor) -> SlotPool:
        fc1, fc2 = (p.weights()[0] for p in (self.home.fc1, self.home.fc2))
        shape = SlotShape(
            fc1=(fc1.shape[0], fc1.shape[1]),
            fc2=(fc2.shape[0], fc2.shape[1]),
            dtype=fc1.dtype,
            device=rows.device,
        )
        count = self.token_dispatcher.backend.slots
        route = self.token_dispatcher.current_route()
        kept = route.receive_rows * rows.shape[1], route.source_row_N.numel() * fc1.shape[0]
        log_once(
            f"moonep: {count} duplicate slots a rank take "
            f"{count * shape.weight_bytes / 2**20:.1f} MiB for weights"
            f"{', in every layer again (--moe-moonep-reuse),' if self.moonep.reuse else ''} and "
            f"{count * shape.grad_bytes / 2**20:.1f} MiB for gradients, shared by all layers; "
            f"a layer keeps {route.receive_rows} receive rows of {rows.shape[1]} and "
            f"{route.source_row_N.numel()} pre-activations of {fc1.shape[0]} for backward, "
            f"{sum(kept) * rows.itemsize / 2**20:.1f} MiB. Fewer --moe-moonep-slots take less "
            "memory and more rounds of weight transfers"
        )
        backend = self.token_dispatcher.backend
        shared = slot_pool(self.ep_group, count, shape, backend.make_slots)
        if not self.moonep.reuse:
            return shared
        if self.kept_slots is None or self.kept_slots.grad1 is not shared.grad1:
            self.kept_slots = backend.keep_slots(shared, self.home.version)
        return self.kept_slots


def _products_on_host(slots: SlotPool) -> bool:
    """Whether the products need row boundaries on the host; says so once."""
    reason = quack_gemm.refusal(slots.fc1.dtype, *slots.fc1.shape[1:], *slots.fc2.shape[1:])
    if reason is not None:
        log_once(
            f"moonep: quack's grouped GEMM cannot serve these experts ({reason}); torch's products "
            "are used instead, and every layer waits for its row boundaries on the host"
        )
    return reason is not None


def _default_groups() -> Any:
    from megatron.core.transformer.moe.moe_utils import (  # noqa: PLC0415
        get_default_pg_collection,
    )

    return get_default_pg_collection()
