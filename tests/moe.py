"""Builds Megatron's MoELayer on one rank, forces its routing, and runs a case through it.

``dispatcher`` is "alltoall" (Megatron's own, held to the same comparisons) or "moonep".
Everything here runs on a rank of ``ranks.run_ranks``.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import ROUTINGS, Case, batch, device, weights
from grouped import TEGroupedMLP
from megatron.core import parallel_state
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "quick_gelu": quick_gelu,
    "squared_relu": squared_relu,
}


class ForcedRouter(nn.Module):
    """Stands where Megatron's router stands and answers with the routing of ``microbatch``."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__()
        parts = [batch(case, m, rank) for m in range(len(case.routing))]
        self.maps = [part.routing_map(case.experts) for part in parts]
        self.probs = [part.dense_probs(case.experts).requires_grad_() for part in parts]
        self.microbatch = 0

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.probs[self.microbatch], self.maps[self.microbatch]

    def set_layer_number(self, layer_number: int) -> None:
        pass


class FusedKernel:
    """Stands in for the CUDA kernels that add a weight gradient into ``main_grad``."""

    @staticmethod
    def wgrad_gemm_accum_fp32(rows_MH: Tensor, grad_MI: Tensor, main_grad_IH: Tensor) -> None:
        main_grad_IH += (grad_MI.float().T @ rows_MH.float()).to(main_grad_IH.dtype)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def stand_in_for_fused_kernels() -> None:
    """Megatron's own linear layers take ``gradient_accumulation_fusion`` with Apex only."""
    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = FusedKernel


def transformer_config(case: Case, dispatcher: str) -> TransformerConfig:
    expert = case.expert
    if case.grads == "fused":
        stand_in_for_fused_kernels()
    options: dict[str, Any] = dict(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=max(2, case.tp),
        ffn_hidden_size=case.ffn,
        moe_ffn_hidden_size=case.ffn,
        num_moe_experts=case.experts,
        moe_router_topk=case.topk,
        moe_router_pre_softmax=case.topk == 1,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=case.ep_size,
        tensor_model_parallel_size=case.tp,
        expert_tensor_parallel_size=1,
        sequence_parallel=case.tp > 1,
        add_bias_linear=expert.biased,
        gated_linear_unit=expert.gated,
        activation_func=ACTIVATIONS[expert.activation],
        activation_func_clamp_value=expert.clamp,
        glu_linear_offset=expert.offset,
        moe_apply_probs_on_input=expert.probs_on_input,
        params_dtype=case.dtype,
        bf16=case.dtype == torch.bfloat16,
        fp16=case.dtype == torch.float16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=case.grads == "fused",
        # A plain sum over data-parallel ranks, so that main_grad is the reference's gradient.
        calculate_per_token_loss=True,
    )
    return TransformerConfig(**(options | dict(case.config)))


def build(case: Case, dispatcher: str) -> nn.Module:
    """The rank's MoELayer: the case's weights cut for its EP rank, its routing forced."""
    if dispatcher == "moonep":
        from moonep_megatron import MoonEPConfig, enable

        most = max(max(tokens) for tokens in case.tokens_mr)
        enable(MoonEPConfig(**({"max_tokens": max(most, 1)} | dict(case.moonep))))
    te = case.form == "te"
    if case.expert.biased:
        # SequentialMLP adds its bias in place to what this Function returns, which torch refuses.
        layers.reduce_from_tensor_model_parallel_region = lambda rows, group=None: rows
    spec = get_moe_module_spec(use_te=te, num_experts=case.experts, moe_grouped_gemm=te)
    if case.form in ("grouped", "single"):
        single = case.form == "single"
        spec.keywords["submodules"].experts = partial(TEGroupedMLP, single_weight=single)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = transformer_config(case, dispatcher)
    layer = spec(config=config, layer_number=1, pg_collection=groups)
    if all(name in ROUTINGS for name in case.routing):
        layer.router = ForcedRouter(case, dist.get_rank())
    set_weights(layer, *weights(case))
    return layer.to(device(), case.dtype)


def home_experts(layer: nn.Module) -> slice:
    """Which experts of the whole layer this rank owns."""
    n = layer.num_local_experts
    first = parallel_state.get_expert_model_parallel_rank() * n
    return slice(first, first + n)


def expert_parameters(
    layer: nn.Module, kind: str = "weight"
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Of FC1 and FC2: one an expert, or a single one over all of the rank's experts."""
    owners = getattr(layer.experts, "local_experts", [layer.experts])

    def of(fc: str) -> list[nn.Parameter]:
        named = [pair for owner in owners for pair in getattr(owner, fc).named_parameters()]
        return [parameter for name, parameter in named if name.startswith(kind)]

    return of("linear_fc1"), of("linear_fc2")


def stacked(weights: list[Tensor], biases: Sequence[Tensor] = ()) -> Tensor:
    """[n, out, in], with biases as a last column."""
    whole = torch.stack(weights) if weights[0].dim() == 2 else weights[0].clone()
    return torch.cat((whole, torch.stack(list(biases))[..., None]), dim=2) if biases else whole


@torch.no_grad()
def set_weights(layer: nn.Module, fc1_EIH: Tensor, fc2_EHF: Tensor) -> None:
    weights, biases = (expert_parameters(layer, kind) for kind in ("weight", "bias"))
    for parameters, added, full in zip(weights, biases, (fc1_EIH, fc2_EHF), strict=True):
        home = full[home_experts(layer)]
        if added:
            for parameter, value in zip(added, home[..., -1], strict=True):
                parameter.copy_(value)
            home = home[..., :-1]
        values = list(home) if parameters[0].dim() == 2 else [home]
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def wrap(layer: nn.Module, case: Case) -> nn.Module:
    """Megatron's DDP around the layer, unless the case keeps gradients in ``.grad``."""
    if case.grads == "plain":
        return layer
    options = {"grad_reduce_in_fp32": case.grads != "bf16_main_grad"} | dict(case.ddp)
    config = DistributedDataParallelConfig(**options)
    model = DistributedDataParallel(layer.config, config, layer)
    model.zero_grad_buffer()
    return model


def gradient(parameter: nn.Parameter) -> Tensor:
    value = getattr(parameter, "main_grad", parameter.grad)
    assert value is not None, "a home weight has no gradient at all"
    return value.detach().clone()


@contextmanager
def recorded(dispatcher: str) -> Iterator[list[dict[str, Any]]]:
    """moonep's own row counts of every forward pass within; an empty list for alltoall."""
    if dispatcher != "moonep":
        yield []
        return
    from moonep_megatron import metrics

    with metrics.record() as records:
        yield records


@contextmanager
def poisoned_memory(dispatcher: str) -> Iterator[None]:
    """Within, uninitialised memory of moonep is NaN: tails, slots and dummies must not be read."""
    # This mode of torch fills what torch.empty gives; the fill is on unless switched off.
    # Some of Megatron's operations have no deterministic form on GPUs; the fill is all we ask for.
    gpu = torch.cuda.is_available()
    torch.use_deterministic_algorithms(dispatcher == "moonep", warn_only=gpu)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run_case(case: Case, dispatcher: str) -> SimpleNamespace:
    """Forward of all microbatches, then their backwards, in the same order.

    The answer, on the host, has, a microbatch each, ``output``, ``grad_tokens`` [s,H] and
    ``grad_probs`` [s,K]; ``grad_fc1`` [n,I,H] and ``grad_fc2`` [n,H,F] of the rank's own experts;
    ``records``.
    """
    with poisoned_memory(dispatcher):
        layer = build(case, dispatcher)
        return run_layer(layer, wrap(layer, case), case, dispatcher)


def run_layer(layer: nn.Module, model: nn.Module, case: Case, dispatcher: str) -> SimpleNamespace:
    """``run_case`` on a layer built before; ``model`` is the layer or its DDP wrapper."""
    rank, router, last = dist.get_rank(), layer.router, len(case.routing) - 1
    parts = [batch(case, m, rank) for m in range(last + 1)]
    tokens = [part.tokens_sH[:, None].clone().requires_grad_() for part in parts]
    outputs = []
    with recorded(dispatcher) as records:
        for m, hidden in enumerate(tokens):
            router.microbatch = m
            outputs.append(model(hidden)[0])
    for m, part in enumerate(parts):
        # Recompute asks the router again, for the microbatch whose backward runs.
        router.microbatch = m
        with model.no_sync() if m < last and model is not layer else nullcontext():
            outputs[m].backward(part.grad_sH[:, None])
    if model is not layer:
        model.finish_grad_sync()
        assert all(parameter.grad is None for parameter in layer.parameters()), "a hook did not run"
    fc1, fc2 = (
        stacked([gradient(p) for p in weights], [gradient(p) for p in biases]).cpu()
        for weights, biases in zip(
            expert_parameters(layer), expert_parameters(layer, "bias"), strict=True
        )
    )
    return SimpleNamespace(
        output=[output.detach()[:, 0].cpu() for output in outputs],
        grad_tokens=[hidden.grad[:, 0].cpu() for hidden in tokens],
        grad_probs=[
            p.grad.gather(1, b.ids_sK).cpu() for p, b in zip(router.probs, parts, strict=True)
        ],
        grad_fc1=fc1,
        grad_fc2=fc2,
        records=records,
    )
