"""A GPT-MoE of Megatron-Core, with the same initial weights for every dispatcher and EP size."""

from __future__ import annotations

import argparse
import re
import zlib

import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from gpt_moe.text import VOCABULARY


def build(args: argparse.Namespace, device: torch.device) -> DistributedDataParallel:
    """The model of ``args`` on ``device``, initialised, wrapped for data parallel training."""
    config = transformer_config(args)
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(args),
        vocab_size=VOCABULARY,
        max_sequence_length=args.seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    initialise(model, seed=args.seed, router_skew=args.router_skew)
    model.to(device)
    if config.bf16:
        model = Float16Module(config, model)
    wrapped = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=args.overlap,
            overlap_param_gather=args.overlap,
        ),
        module=model,
    )
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap:
        config.no_sync_func = wrapped.no_sync
    return wrapped


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    bf16 = args.dtype == "bf16"
    return TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        ffn_hidden_size=args.ffn,
        moe_ffn_hidden_size=args.ffn,
        num_moe_experts=args.experts,
        moe_router_topk=args.topk,
        # With one expert a token, softmax after the choice would always give 1 and no gradient.
        moe_router_pre_softmax=args.topk == 1,
        moe_router_dtype="fp32",
        moe_router_score_function="sigmoid" if args.expert_bias else "softmax",
        moe_router_enable_expert_bias=args.expert_bias,
        moe_router_load_balancing_type="aux_loss" if args.aux_loss else "none",
        moe_aux_loss_coeff=args.aux_loss,
        moe_shared_expert_intermediate_size=args.shared_ffn or None,
        moe_token_dispatcher_type=args.dispatcher,
        expert_model_parallel_size=args.ep,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_cpu_initialization=True,
        # Fused kernels need CUDA with Apex or Transformer Engine; the demo must run without.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **_RECOMPUTE[args.recompute],
    )


_RECOMPUTE: dict[str, dict[str, object]] = {
    "none": {},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def _layer_spec(args: argparse.Namespace) -> object:
    # Imported here, after moonep_megatron.enable() has put its layer in place.
    from megatron.core.models.gpt import gpt_layer_specs

    make = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
        if args.te
        else gpt_layer_specs.get_gpt_layer_local_spec
    )
    kwargs = {} if args.te else {"normalization": "RMSNorm"}
    return make(num_experts=args.experts, moe_grouped_gemm=args.te, **kwargs)


def moe_layers(model: torch.nn.Module) -> list[MoELayer]:
    """The model's MoE layers, first to last."""
    return [module for module in model.modules() if isinstance(module, MoELayer)]


# An expert's number in a parameter's name: SequentialMLP's, then TEGroupedMLP's.
_EXPERT = re.compile(r"(\.local_experts\.|experts\.linear_fc[12]\.weight)(\d+)")


def initialise(model: torch.nn.Module, *, seed: int, router_skew: float) -> None:
    """Draw every matrix from a generator seeded by its name, local experts named globally.

    ``router_skew`` > 0 scales row e of each router by (e + 1) ** -router_skew: experts with
    larger rows win more often, so the first experts (the first rank's) start hot.
    """
    first_expert = {layer.local_expert_indices[0] for layer in moe_layers(model)}.pop()

    def globally(match: re.Match[str]) -> str:
        return f"{match[1]}{int(match[2]) + first_expert}"

    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue  # norms start as ones
        draw = model.config.init_method
        if "linear_proj" in name or "linear_fc2" in name:
            draw = model.config.output_layer_init_method
        torch.manual_seed(zlib.crc32(f"{seed} {_EXPERT.sub(globally, name)}".encode()))
        values = draw(torch.empty(parameter.shape, dtype=torch.float32))
        if name.endswith("router.weight"):
            rank_of_expert = torch.arange(1, len(values) + 1, dtype=torch.float32)
            values = values * rank_of_expert.pow(-router_skew)[:, None]
        parameter.data.copy_(values)
