"""Models around the layer: context parallelism, generation, upcycling, hybrid models."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case
from gpt import EXPERTS, SEQUENCE, VOCABULARY, build, draw_weights, sequences, transformer_config
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.moe.upcycling_utils import upcycle_state_dict
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayerSubmodules,
)
from moe import build as build_layer
from ranks import Layout, RankError, run_ranks
from reference import error
from torch import Tensor, nn

DISPATCHERS = ("alltoall", "moonep")
CLOSE = 2e-6


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        off = error(ours[name], value.double())
        assert off < CLOSE, f"{name} is off by {off:.1e}"


# --- context parallelism ------------------------------------------------------------------------


LOSSES = (
    ("moe_router_load_balancing_type", ["seq_aux_loss", "global_aux_loss"]),
    ("moe_aux_loss_coeff", [0.1, 0.1]),
    ("moe_z_loss_coeff", 0.01),
)
OVERLAPPED = (("moe_shared_expert_intermediate_size", 20), ("moe_shared_expert_overlap", True))


def _layer_of_sequence_shards(config: tuple[Any, ...], tp: int = 1) -> list[dict[str, Tensor]]:
    """A layer with Megatron's router: output and all gradients under both dispatchers."""
    found = []
    for dispatcher in DISPATCHERS:
        tokens = ((24,) * 4,)
        case = Case(
            name="", ranks=4, tp=tp, routing=("router",), tokens=tokens, config=LOSSES + config
        )
        layer = build_layer(case, dispatcher)
        g = torch.Generator().manual_seed(5)
        layer.router.weight.data = torch.randn(layer.router.weight.shape, generator=g)
        for name, parameter in layer.named_parameters():
            if name.startswith("shared_experts"):
                parameter.data = torch.randn(parameter.shape, generator=g) / 4
        g.manual_seed(dist.get_rank())
        hidden = torch.randn(12, 2, case.hidden, generator=g).requires_grad_()
        output = layer(hidden)[0]
        output.pow(2).sum().backward()
        weights = {name: p.grad for name, p in layer.named_parameters()}
        found.append(weights | {"output": output.detach(), "hidden": hidden.grad})
    return found


def test_context_parallel() -> None:
    """CP=2 x DP=2 in an EP group of four, which spans the shards of two sequences."""
    shards = (("context_parallel_size", 2),)
    layout = Layout(ep=4, cp=2)
    for theirs, ours in run_ranks(4, _layer_of_sequence_shards, shards, layout=layout):
        assert_close(ours, theirs)


def test_sequence_parallel_shared_experts() -> None:
    """TP=2: shared experts gather and scatter the sequence beside dispatch and combine."""
    layout = Layout(ep=4, tp=2, expert_tp=1)
    for theirs, ours in run_ranks(4, _layer_of_sequence_shards, OVERLAPPED, 2, layout=layout):
        assert_close(ours, theirs)
        assert any(name.startswith("shared_experts") for name in ours)


# --- evaluation and generation ------------------------------------------------------------------


@torch.no_grad()
def _greedy(model: nn.Module, prompts: Tensor, count: int, cached: bool) -> Tensor:
    """The next tokens [batch, count], with Megatron's key-value cache or from whole sequences."""
    batch, length = prompts.shape
    context = StaticInferenceContext(batch, length + count) if cached else None
    tokens, done = prompts, 0
    for _ in range(count):
        fed = tokens[:, done:] if cached else tokens
        first = done if cached else 0
        positions = torch.arange(first, first + fed.shape[1]).expand(batch, -1)
        mask = torch.ones(1, 1, fed.shape[1], fed.shape[1], dtype=torch.bool).triu(1)
        logits = model(fed, positions, mask, inference_context=context)
        if cached:
            done = context.sequence_len_offset = tokens.shape[1]
            context.enable_decode_mode()
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens[:, length:]


def _generated() -> list[Tensor]:
    """Of every dispatcher with a cache, then of moonep without; ranks bring different batches."""
    rank, found = dist.get_rank(), []
    prompts = sequences(range(10 * rank, 10 * rank + 1 + rank))["tokens"][:, : 5 - rank]
    for dispatcher, cached in (("alltoall", True), ("moonep", True), ("moonep", False)):
        model = build(dispatcher).eval()
        found.append(_greedy(model, prompts, SEQUENCE - 5, cached))
    return found


def test_generation() -> None:
    """Prompts of different lengths and numbers, then one token a sequence and step."""
    for theirs, ours, uncached in run_ranks(2, _generated):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, uncached)
        assert len(ours.unique()) > 1


@torch.no_grad()
def _decoded_under_tensor_parallelism() -> None:
    """As Megatron decodes there: without sequence parallelism, so each rank has every token."""
    case = Case(name="", ranks=2, tp=2, tokens=((24,) * 2,))
    layer = build_layer(case, "moonep").eval()
    hidden = torch.zeros(24, 1, case.hidden)
    layer(hidden)
    layer.config.sequence_parallel = False
    layer(hidden)


def test_decoding_under_tensor_parallelism_is_refused() -> None:
    with pytest.raises(RankError, match=r"--sequence-parallel = False .*alltoall"):
        run_ranks(2, _decoded_under_tensor_parallelism, layout=Layout(ep=2, tp=2, expert_tp=1))


# --- upcycling ----------------------------------------------------------------------------------


def _upcycled() -> tuple[Tensor, list[Tensor]]:
    """Logits of a dense model, and of the experts' models made of it."""
    data = sequences([dist.get_rank()])
    without_experts = {"num_moe_experts": None, "moe_ffn_hidden_size": None}
    without_experts |= {"expert_model_parallel_size": 1}
    dense = GPTModel(
        config=transformer_config("alltoall", **without_experts),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    logits = []
    for dispatcher in DISPATCHERS:
        model = build(dispatcher)
        model.load_state_dict(upcycle_state_dict([model], [dense])["model"])
        logits.append(model(data["tokens"], data["positions"], None).detach())
    return dense(data["tokens"], data["positions"], None).detach(), logits


def test_upcycling() -> None:
    """Every expert is the dense MLP, so that any routing gives the dense model's logits."""
    for dense, (theirs, ours) in run_ranks(2, _upcycled):
        assert error(ours, dense.double()) < CLOSE
        assert error(ours, theirs.double()) < CLOSE


# --- hybrid models ------------------------------------------------------------------------------


def _local_hybrid_spec() -> Any:
    """Megatron's specification of hybrid models with parts that need no Transformer Engine."""
    gpt = get_gpt_layer_local_spec(num_experts=EXPERTS, normalization="RMSNorm").submodules
    norm = gpt.input_layernorm
    hybrid_block.TENorm = norm
    stack = hybrid_layer_specs.hybrid_stack_spec
    moe = stack.submodules.moe_layer
    assert moe.module is MoETransformerLayer
    # The layer is the one that enable() put into this specification, the experts are local ones.
    experts = gpt.mlp.keywords["submodules"]
    layer = partial(moe.submodules.mlp.func, submodules=experts)
    moe = dataclasses.replace(
        moe, submodules=dataclasses.replace(moe.submodules, pre_mlp_layernorm=norm, mlp=layer)
    )
    attention = TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=gpt.self_attention, self_attn_bda=gpt.self_attn_bda
    )
    attention = dataclasses.replace(stack.submodules.attention_layer, submodules=attention)
    submodules = dataclasses.replace(stack.submodules, moe_layer=moe, attention_layer=attention)
    return dataclasses.replace(stack, submodules=submodules)


def hybrid_model(dispatcher: str, **options: Any) -> HybridModel:
    """Attention and expert layers in turn; ``options`` as of ``gpt.transformer_config``."""
    config = transformer_config(dispatcher, num_layers=4, **options)
    model = HybridModel(
        config=config,
        hybrid_stack_spec=_local_hybrid_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        hybrid_layer_pattern="*E*E",
        position_embedding_type="rope",
    )
    draw_weights(model)
    return model


def _hybrid() -> list[dict[str, Tensor]]:
    """Loss and gradients of a hybrid model."""
    data = sequences([3 * dist.get_rank(), 3 * dist.get_rank() + 1])
    found = []
    for dispatcher in DISPATCHERS:
        model = hybrid_model(dispatcher)
        loss = model(data["tokens"], data["positions"], None, labels=data["labels"])
        loss.mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        layers = {type(m).__name__ for m in model.modules() if "MoELayer" in type(m).__name__}
        assert layers == {"MoonEPMoELayer" if dispatcher == "moonep" else "MoELayer"}
        found.append(gradients | {"loss": loss.detach()})
    return found


def test_hybrid_model() -> None:
    for theirs, ours in run_ranks(2, _hybrid):
        assert_close(ours, theirs)
