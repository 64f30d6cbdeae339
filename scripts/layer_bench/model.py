"""One Megatron MoELayer of a variant, its routing forced, its weights those of every variant."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from layer_bench.mlp import GroupedMLP, row_bounds
from layer_bench.options import IDEAL, Options, Shape, Variant, importable
from moonep_megatron import MoonEPConfig, enable
from moonep_megatron.activation import activation


class ForcedRouter(nn.Module):
    """Stands where Megatron's router stands and answers with the routing last set."""

    def __init__(self) -> None:
        super().__init__()
        self.probs: Tensor | None = None
        self.map: Tensor | None = None

    def force(self, ids_SK: Tensor, experts: int) -> None:
        """Take the choices of this rank's tokens; probabilities are random and sum to 1."""
        generator = torch.Generator(ids_SK.device).manual_seed(5 + dist.get_rank())
        scores = torch.rand(ids_SK.shape, generator=generator, device=ids_SK.device)
        empty = torch.zeros(len(ids_SK), experts, device=ids_SK.device)
        self.probs = empty.scatter(1, ids_SK, scores.softmax(1)).requires_grad_()
        self.map = torch.zeros_like(empty, dtype=torch.bool).scatter_(1, ids_SK, True)

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert self.probs is not None
        assert self.map is not None
        return self.probs, self.map

    def set_layer_number(self, layer_number: int) -> None:
        pass


class Layer:
    """What is timed: a forward and a backward of one variant.

    Attributes:
        notes: how it differs from what its name promises, in words.
        hidden: [S, 1, H] bf16, this rank's tokens (or, ideal, [N, H] rows), requires grad.
    """

    def __init__(
        self, shape: Shape, variant: Variant, options: Options, device: torch.device
    ) -> None:
        self.shape, self.variant, self.device = shape, variant, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.notes: list[str] = []
        config = self._config(options)
        self.moe = self._build(config)
        self.model = self._wrap(config)
        self._fill_weights()
        ideal = variant.dispatcher == IDEAL
        sizes = (shape.rows, shape.width) if ideal else (shape.tokens, 1, shape.width)
        generator = torch.Generator(device).manual_seed(100 + self.rank)
        draw = partial(torch.randn, device=device, dtype=torch.bfloat16, generator=generator)
        self.hidden, self.d_out = draw(sizes).requires_grad_(), draw(sizes)
        if ideal:
            n = self.moe.num_local_experts
            # On the host, where TE wants them; the ideal must not wait for a copy.
            self._counts = shape.rows // n + (torch.arange(n) < shape.rows % n).long()
            if isinstance(self.moe.experts, GroupedMLP):
                self.moe.experts.fixed = row_bounds(self._counts, device)
            self._probs = torch.full((shape.rows,), 1 / shape.topk, device=device).requires_grad_()

    def force(self, ids_TK: Tensor) -> None:
        """Route the tokens of all ranks so."""
        mine = ids_TK[self.rank * self.shape.tokens :][: self.shape.tokens]
        self.moe.router.force(mine.to(self.device), self.shape.experts)

    def forward(self) -> Tensor:
        if self.variant.dispatcher == IDEAL:
            return self.moe.experts(self.hidden, self._counts, self._probs)[0]
        return self.model(self.hidden)[0]

    def backward(self, output: Tensor) -> None:
        output.backward(self.d_out)

    def clear(self) -> None:
        """Drop the gradients of the inputs, which would be added to."""
        probs = self._probs if self.variant.dispatcher == IDEAL else self.moe.router.probs
        self.hidden.grad = probs.grad = None

    def gradients(self) -> list[Tensor]:
        """fp32 main gradients of this rank's experts, FC1 of all of them before FC2."""
        if isinstance(self.moe.experts, GroupedMLP):
            return [gradient for stack in self.moe.experts.grads for gradient in stack]
        return [
            gradient
            for weights in self._weights()
            for weight in weights
            for gradient in (weight.main_grad if weight.dim() == 3 else [weight.main_grad])
        ]

    @torch.no_grad()
    def zero_gradients(self) -> None:
        for gradient in self.gradients():
            gradient.zero_()

    def _config(self, options: Options) -> TransformerConfig:
        dispatcher, _, form = self.variant.dispatcher.partition("-")
        if dispatcher == "moonep":
            collective = options.device == "cpu" or form == "collective"
            enable(
                MoonEPConfig(
                    backend="collective" if collective else "symmetric",
                    slots=options.slots,
                    max_tokens=self.shape.tokens,
                    redispatch=form == "redispatch",
                )
            )
        te, cuda = importable("transformer_engine"), options.device == "cuda"
        self.fusion = te or parallel_layers._grad_accum_fusion_available
        if not te and cuda:
            self.notes.append("transformer_engine is missing: no fused permute")
        return TransformerConfig(
            num_layers=1,
            hidden_size=self.shape.width,
            num_attention_heads=1,
            ffn_hidden_size=self.shape.ffn,
            moe_ffn_hidden_size=self.shape.ffn,
            num_moe_experts=self.shape.experts,
            moe_router_topk=self.shape.topk,
            moe_router_pre_softmax=self.shape.topk == 1,
            moe_router_load_balancing_type="none",
            moe_router_dtype="fp32",
            moe_token_dispatcher_type="allgather" if dispatcher == IDEAL else dispatcher,
            moe_grouped_gemm=te,
            moe_permute_fusion=te and cuda,
            expert_model_parallel_size=self.ranks,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=F.silu,
            bias_activation_fusion=cuda,
            params_dtype=torch.bfloat16,
            bf16=True,
            use_cpu_initialization=not cuda,
            perform_initialization=False,
            gradient_accumulation_fusion=self.fusion,
        )

    def _build(self, config: TransformerConfig) -> nn.Module:
        te = config.moe_grouped_gemm
        spec = get_moe_module_spec(
            use_te=te, num_experts=config.num_moe_experts, moe_grouped_gemm=te
        )
        moonep = self.variant.dispatcher.startswith("moonep")
        if self.variant.experts == "ours" and not moonep:
            spec.keywords["submodules"].experts = self._our_experts
        groups = ProcessGroupCollection.use_mpu_process_groups()
        layer = spec(config=config, layer_number=1, pg_collection=groups)
        layer.router = ForcedRouter()
        if moonep and not self.fusion:
            # Megatron's linears ask for Apex when built; moonep's experts never call them.
            config.gradient_accumulation_fusion = True
            self.notes.append("gradient_accumulation_fusion set after building: no TE, no Apex")
        return layer.to(self.device)

    def _our_experts(
        self, num_local_experts: int, config: TransformerConfig, **_: Any
    ) -> GroupedMLP:
        width, ffn = self.shape.width, self.shape.ffn
        return GroupedMLP(
            num_local_experts,
            width,
            ffn,
            activation(config, fuse=self.device.type == "cuda"),
            self.device,
        )

    def _wrap(self, config: TransformerConfig) -> nn.Module:
        """DDP, for ``main_grad``; our experts have theirs."""
        if isinstance(self.moe.experts, GroupedMLP):
            return self.moe
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        model = DistributedDataParallel(config, ddp, self.moe)
        model.zero_grad_buffer()
        return model

    def _weights(self) -> list[list[Any]]:
        """FC1 and FC2: a tensor an expert [out, in], or one of all [n, out, in]."""
        experts = self.moe.experts
        if isinstance(experts, GroupedMLP):
            return [[stack] for stack in experts.weights]
        if hasattr(experts, "local_experts"):
            names = ("linear_fc1", "linear_fc2")
            return [[getattr(e, name).weight for e in experts.local_experts] for name in names]
        return [list(experts.linear_fc1.parameters()), list(experts.linear_fc2.parameters())]

    @torch.no_grad()
    def _fill_weights(self) -> None:
        """By number of the expert, so that every variant and number of ranks has the same."""
        first = self.rank * self.moe.num_local_experts
        for projection, weights in enumerate(self._weights()):
            matrices = [m for w in weights for m in (w if w.dim() == 3 else [w])]
            for number, matrix in enumerate(matrices):
                generator = torch.Generator(self.device)
                generator.manual_seed(1000 * (first + number) + projection)
                matrix.normal_(0, matrix.shape[1] ** -0.5, generator=generator)


def free() -> None:
    """Give back the memory of layers that nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
