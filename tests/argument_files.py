"""Command lines of `configs/` and `examples/` as Megatron reads them, and the models they describe.

Two things of a GPU machine are stood in for: the device's capability, which validation reads, and
Transformer Engine's fused rotary embedding, whose presence it asks for.
"""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from packaging.version import Version

CONFIGS = Path(__file__).parent.parent / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
SINCE = {"gpt_oss_20b": "0.19.0"}
"""The first Megatron-LM that has all flags of a file, where older supported ones do not."""


def too_old(stem, version):
    """Whether a Megatron-LM lacks flags of a file."""
    return Version(version) < Version(SINCE.get(stem, "0"))


def megatron(words, ranks=None):
    """Megatron's validated arguments and its configuration, from a script's command line.

    For as many ranks as one data-parallel copy of the model takes, or ``ranks``. Changes Megatron:
    for a process of its own.
    """
    import moonep_megatron

    moonep_megatron.enable()
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.training import arguments

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)
    rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb_thd = object()
    sys.argv = ["script", *words]
    args = arguments.parse_args()
    copy = args.expert_model_parallel_size * args.pipeline_model_parallel_size
    args.world_size = ranks or copy
    arguments.validate_args(args)
    return args, arguments.core_transformer_config_from_args(args)


def settings(args, config):
    """A configuration as a plain dict of numbers, strings and lists."""
    from moonep_megatron.config import from_arguments

    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values |= {"vocab_size": args.vocab_size, "tied": not args.untie_embeddings_and_output_weights}
    values["max_tokens"] = from_arguments(args).max_tokens
    plain = (int, float, str, bool, list, type(None))
    return {k: v for k, v in values.items() if isinstance(v, plain)}


def layer_parameters(c):
    """Parameters of one layer: attention with norms, a dense MLP, one expert, router, shared."""
    h, heads, biased = c["hidden_size"], c["num_attention_heads"], c["add_bias_linear"]
    if c["multi_latent_attention"]:
        q, kv = c["q_lora_rank"], c["kv_lora_rank"]
        nope, rope, v = c["qk_head_dim"], c["qk_pos_emb_head_dim"], c["v_head_dim"]
        query = h * q + q + q * heads * (nope + rope) if q else h * heads * (nope + rope)
        key_value = h * (kv + rope) + kv + kv * heads * (nope + v)
        attention = query + key_value + heads * v * h
    else:
        d, inputs = c["kv_channels"], heads + 2 * c["num_query_groups"]
        attention = h * d * inputs + heads * d * h
        attention += 2 * d if c["qk_layernorm"] else 0
        attention += d * inputs + h if biased else 0
        attention += heads if c["softmax_type"] == "learnable" else 0
    width = c.get("moe_latent_size") or h
    matrices = 3 if c["gated_linear_unit"] else 2
    biases = (matrices - 1) * c["moe_ffn_hidden_size"] + width if biased else 0
    return SimpleNamespace(
        attention=attention + 2 * h,
        dense=matrices * h * c["ffn_hidden_size"],
        expert=matrices * width * c["moe_ffn_hidden_size"] + biases,
        shared=matrices * h * (c["moe_shared_expert_intermediate_size"] or 0),
        router=(h + biased) * c["num_moe_experts"] + (2 * h * width if width != h else 0),
    )


def parameters(c):
    """All parameters of the main model, those active for a token, and those of one MTP layer."""
    one = layer_parameters(c)
    freq = c["moe_layer_freq"]
    sparse = sum(freq) if isinstance(freq, list) else c["num_layers"] // freq
    dense = c["num_layers"] - sparse
    h = c["hidden_size"]
    embeddings = c["vocab_size"] * h * (1 if c["tied"] else 2)
    fixed = embeddings + h + c["num_layers"] * one.attention + dense * one.dense

    def moe(experts):
        return one.router + one.shared + experts * one.expert

    all_, active = moe(c["num_moe_experts"]), moe(c["moe_router_topk"])
    mtp = one.attention + all_ + 2 * h * h + 3 * h
    return fixed + sparse * all_, fixed + sparse * active, mtp
