"""A two-layer GPT-MoE of Megatron's own, and a training step on it, for tests on gloo ranks.

Its weights depend on names alone, with experts numbered over the whole model, so that every
dispatcher and every EP size starts from the same model.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.package_info import __version__
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version
from torch import Tensor, nn

VOCABULARY, SEQUENCE, EXPERTS = 32, 12, 8
MTP_NEEDS_TE = Version(__version__).release >= (0, 20) and not find_spec("transformer_engine")
"""Whether this Megatron builds multi-token prediction only with the Transformer Engine it lacks."""


def transformer_config(
    dispatcher: str, *, moonep: Mapping[str, Any] | None = None, **options: Any
) -> TransformerConfig:
    if dispatcher == "moonep":
        from moonep_megatron import MoonEPConfig, enable

        enable(MoonEPConfig(max_tokens=2 * SEQUENCE, **(moonep or {})))
    defaults: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=24,
        moe_ffn_hidden_size=24,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        pipeline_dtype=torch.float32,
    )
    return TransformerConfig(**(defaults | options))


def build(dispatcher: str, *, vp_stage: int | None = None, **options: Any) -> GPTModel:
    """This rank's model, or one of its chunks.

    ``options`` are fields of TransformerConfig, and ``moonep``, fields of MoonEPConfig.
    """
    from megatron.core.models.gpt import gpt_layer_specs as specs

    config = transformer_config(dispatcher, **options)
    layer = partial(specs.get_gpt_layer_local_spec, num_experts=EXPERTS, normalization="RMSNorm")
    mtp = specs.get_gpt_mtp_block_spec(config, layer(), False) if config.mtp_num_layers else None
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=mtp,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )
    draw_weights(model)
    return model


def moe_layers(model: nn.Module) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    for name, parameter in global_parameters(model).items():
        g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=g) / parameter.shape[-1] ** 0.5)
        if name.endswith("router.weight"):
            # Rows of falling size: the first experts, of the first rank, are chosen far more often.
            parameter.mul_((1 + torch.arange(len(parameter)))[:, None] ** -0.7)


def global_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by a name in which experts and layers are numbered over the whole model."""
    first = moe_layers(model)[0].local_expert_indices[0]

    def number(match: re.Match[str]) -> str:
        return f"local_experts.{int(match[1]) + first}."

    offset = model.decoder.layers[0].layer_number - 1
    names = {}
    for name, parameter in model.named_parameters():
        whole = re.sub(r"local_experts\.(\d+)\.", number, name)
        whole = re.sub(
            r"^decoder\.layers\.(\d+)", lambda m: f"decoder.layers.{int(m[1]) + offset}", whole
        )
        names[whole] = parameter
    return names


def sequences(numbers: Sequence[int]) -> dict[str, Tensor]:
    """The batch of the numbered sequences: a noisy walk over the vocabulary, each its own."""
    rows = []
    for number in numbers:
        g = torch.Generator().manual_seed(number)
        rows.append(torch.randint(1, 4, (SEQUENCE + 1,), generator=g).cumsum(0) % VOCABULARY)
    text = torch.stack(rows)
    positions = torch.arange(SEQUENCE).expand(len(rows), -1)
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "positions": positions}


def losses(model: nn.Module, numbers: Sequence[int]) -> Tensor:
    """Loss of every position [sequences, SEQUENCE]."""
    data = sequences(numbers)
    return model(data["tokens"], data["positions"], None, labels=data["labels"])


class Trainer:
    """A model under DDP with its optimizer; ``step`` is one step over microbatches.

    Of a virtual pipeline a rank has several ``chunks``, of which ``model`` is the first.
    """

    def __init__(self, model: GPTModel, *others: GPTModel, overlap: bool = False) -> None:
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
        )
        model.config.finalize_model_grads_func = finalize_model_grads
        self.chunks = [DistributedDataParallel(m.config, options, m) for m in (model, *others)]
        self.model = self.chunks[0]
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.02,
            adam_eps=1e-3,
            weight_decay=0.0,
            use_distributed_optimizer=True,
            overlap_param_gather=overlap,
        )
        self.optimizer = get_megatron_optimizer(config, self.chunks, use_gloo_process_groups=False)
        self.forward_step = _forward_step

    def step(self, microbatches: Sequence[Sequence[int]]) -> list[float]:
        """Train on microbatches of numbered sequences; the mean loss of each (last stage only)."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        iterators = [iter(microbatches) for _ in self.chunks]
        reported = get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(microbatches),
            seq_length=SEQUENCE,
            micro_batch_size=len(microbatches[0]),
            forward_only=False,
        )
        assert self.optimizer.step()[0]
        return [float(entry["loss"]) for entry in reported]


def _forward_step(numbers: Any, model: nn.Module) -> tuple[Tensor, Any]:
    output = losses(model, next(numbers))
    return output, lambda out: (out.mean(), {"loss": out.mean().detach()})
