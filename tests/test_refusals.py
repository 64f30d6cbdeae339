"""The table of refused settings: every row, what it lets pass, and how the README shows it."""

import argparse
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training import global_vars
from megatron.training.arguments import add_megatron_arguments

from moonep_megatron import config as moonep
from moonep_megatron import refusals
from moonep_megatron.config import MoonEPConfig
from moonep_megatron.refusals import ALLOWED, REFUSED

README = Path(__file__).parent.parent / "README.md"


def megatron_config(**changes):
    """A configuration that is accepted, with fields changed behind Megatron's own validation."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=8,
        add_bias_linear=False,
        expert_model_parallel_size=4,
        moe_token_dispatcher_type="moonep",
    )
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def some_activation(x):
    return x


COLLECTIVE = {"moe_moonep_backend": "collective"}


def graphed(*names):
    return [CudaGraphModule[name] for name in names]


# For every row: settings that must be refused, and settings that must not.
REFUSED_CASES = {
    "num_moe_experts": [{"num_moe_experts": 6}],
    "moe_moonep_slots": [{"moe_moonep_slots": 3}, {"moe_moonep_slots": 99}],
    "expert_tensor_parallel_size": [{"expert_tensor_parallel_size": 2}],
    "expert_tensor_parallel_num_weight_shards": [{"expert_tensor_parallel_num_weight_shards": 2}],
    "expert_gtp_weight_remat_size": [{"expert_gtp_weight_remat_size": 2}],
    "use_megatron_fsdp": [{"use_megatron_fsdp": True}],
    "use_torch_fsdp2": [{"use_torch_fsdp2": True}],
    "use_layer_wise_distributed_optimizer": [{"use_layer_wise_distributed_optimizer": True}],
    "sequence_parallel": [{"tensor_model_parallel_size": 2, "sequence_parallel": False}],
    "variable_seq_lengths": [{"variable_seq_lengths": True}],
    "hybrid_context_parallel": [{"hybrid_context_parallel": True}],
    "moe_expert_capacity_factor": [{"moe_expert_capacity_factor": 0.0}],
    "moe_pad_expert_input_to_capacity": [{"moe_pad_expert_input_to_capacity": True}],
    "moe_expert_rank_capacity_factor": [{"moe_expert_rank_capacity_factor": 2.0}],
    "moe_token_dropping": [{"moe_token_dropping": True}],
    "moe_pad_experts_for_cuda_graph_inference": [
        {"moe_pad_experts_for_cuda_graph_inference": True}
    ],
    "moe_router_padding_for_quantization": [{"moe_router_padding_for_quantization": True}],
    "moe_router_padding_for_fp8": [{"moe_router_padding_for_fp8": True}],
    "moe_paged_stash": [{"moe_paged_stash": True}],
    "fp8": [{"fp8": "hybrid"}, {"fp8": "e4m3"}],
    "fp4": [{"fp4": "e2m1"}],
    "quant_recipe": [{"quant_recipe": object()}],
    "use_kitchen": [{"use_kitchen": True}],
    "moe_dispatch_fwd_dtype": [{"moe_dispatch_fwd_dtype": "mxfp8"}],
    "moe_combine_bwd_dtype": [{"moe_combine_bwd_dtype": "mxfp8"}],
    "enable_autocast": [{"enable_autocast": True}],
    "activation_func": [
        {"activation_func": fast_gelu},
        {"activation_func": torch.tanh},
        {"activation_func": some_activation},
    ],
    "activation_func_clamp_value": [
        {
            "activation_func_clamp_value": 7.0,
            "activation_func": F.silu,
            "gated_linear_unit": True,
            "bias_activation_fusion": True,
        }
    ],
    "moe_mlp_glu_interleave_size": [{"moe_mlp_glu_interleave_size": 32}],
    "use_te_activation_func": [{"use_te_activation_func": True}],
    "use_transformer_engine_op_fuser": [{"use_transformer_engine_op_fuser": True}],
    "batch_invariant_mode": [{"batch_invariant_mode": True}],
    "offload_modules": [
        {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", module]}
        for module in ("expert_fc1", "moe_act", "fused_group_mlp")
    ],
    "activation_func_fp8_input_store": [{"activation_func_fp8_input_store": True}],
    "cpu_offloading": [{"cpu_offloading": True}],
    "save_activations_interval": [{"save_activations_interval": 10}],
    "save_dgrads_interval": [{"save_dgrads_interval": 10}],
    "save_tokens_per_expert_interval": [{"save_tokens_per_expert_interval": 10}],
    "moe_shared_expert_overlap": [{"moe_shared_expert_overlap": True, "moe_latent_size": 8}],
    "overlap_moe_expert_parallel_comm": [{"overlap_moe_expert_parallel_comm": True}],
    "delay_wgrad_compute": [{"delay_wgrad_compute": True}],
    "overlap_dispatch_backward_with_experts_wgrad": [
        {"overlap_dispatch_backward_with_experts_wgrad": True}
    ],
    "cuda_graph_impl": [
        {"cuda_graph_impl": impl, "cuda_graph_modules": modules} | COLLECTIVE
        for impl, modules in (
            ("local", []),
            ("local", graphed("attn", "moe_router")),
            ("transformer_engine", []),
            ("transformer_engine", graphed("moe")),
            ("full_iteration", []),
        )
    ],
    "cuda_graph_modules": [
        {
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": graphed("moe_router", "moe_preprocess"),
            "moe_shared_expert_overlap": True,
        }
    ],
    "moe_moonep_check_plan": [{"moe_moonep_check_plan": True, "cuda_graph_impl": "local"}],
    "transformer_impl": [{"transformer_impl": "inference_optimized"}],
    "moe_router_force_biased": [{"moe_router_force_biased": 1.0, "moe_moonep_force_maxvio": 2.0}],
    "moe_moonep_redispatch": [
        {"moe_moonep_redispatch": True, "moe_moonep_backend": "collective"}
    ],
    "moe_moonep_reuse": [
        {"moe_moonep_reuse": True, "cuda_graph_impl": "local"},
        {"moe_moonep_reuse": True, "cuda_graph_impl": "full_iteration"},
        {"moe_moonep_reuse": True, "recompute_granularity": "full"},
        {
            "moe_moonep_reuse": True,
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "moe"],
        },
    ],
    "distributed_timeout_minutes": [
        {"distributed_timeout_minutes": 5},
        {"distributed_timeout_minutes": 10, "moe_moonep_timeout": 3600.0},
        {"distributed_timeout_minutes": 5, "moe_moonep_backend": "symmetric"},
    ],
    "distributed_timeout_seconds_after_init": [
        {"distributed_timeout_seconds_after_init": 300},
        {"distributed_timeout_seconds_after_init": 30, "moe_moonep_timeout": 30.5},
    ],
}  # fmt: skip

ACCEPTED = [
    {},
    {"num_moe_experts": 4, "moe_moonep_slots": 1},
    {"moe_moonep_slots": 2},
    {"num_moe_experts": None, "fp8": "hybrid"},
    {"add_bias_linear": True},
    {"expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"moe_expert_capacity_factor": None},
    {"moe_mlp_glu_interleave_size": None},
    *({"activation_func": f} for f in (F.silu, F.gelu, F.relu, squared_relu, quick_gelu)),
    {"activation_func_clamp_value": 7.0, "activation_func": F.silu, "gated_linear_unit": True},
    {
        "activation_func_clamp_value": 7.0,
        "activation_func": quick_gelu,
        "gated_linear_unit": True,
        "bias_activation_fusion": True,
        "glu_linear_offset": 1.0,
    },
    {"recompute_granularity": "selective", "recompute_modules": ["moe", "shared_experts"]},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe_act"]},
    {"moe_router_force_biased": 1.0},
    {"moe_moonep_force_maxvio": 2.0},
    {"distributed_timeout_minutes": 10, "distributed_timeout_seconds_after_init": 301},
    {"distributed_timeout_minutes": 6, "distributed_timeout_seconds_after_init": None},
    {"distributed_timeout_minutes": 1, "moe_moonep_backend": "collective"},
    {"distributed_timeout_minutes": 1, "moe_moonep_timeout": 59.5},
    {"moe_moonep_redispatch": True},
    {"moe_moonep_reuse": True, "recompute_granularity": "selective", "recompute_modules": []},
    {"moe_moonep_reuse": True, "moe_moonep_backend": "symmetric"},
    {
        "moe_moonep_reuse": True,
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": graphed("moe_router"),
    },
    {"moe_moonep_redispatch": True, "moe_moonep_backend": "symmetric"},
    {"moe_dispatch_fwd_dtype": "bf16"},
    {"cuda_graph_impl": "none", "transformer_impl": "local"},
    {"cuda_graph_impl": "none", "moe_moonep_check_plan": True} | COLLECTIVE,
    *({"cuda_graph_impl": impl} for impl in ("local", "transformer_engine", "full_iteration")),
    {
        "cuda_graph_impl": "local",
        "cuda_graph_modules": graphed("moe_router", "moe_preprocess"),
        "moe_moonep_check_plan": True,
    }
    | COLLECTIVE,
    {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": graphed("attn")} | COLLECTIVE,
    {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": graphed("moe_router"),
        "moe_shared_expert_overlap": True,
    },
    {"moe_shared_expert_intermediate_size": 64, "moe_latent_size": 8, "moe_permute_fusion": True},
    {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True},
    {"fine_grained_activation_offloading": True, "offload_modules": ["mlp_norm", "core_attn"]},
    {"offload_modules": ["expert_fc1"]},
    {"variable_seq_lengths": True, "moe_moonep_max_tokens": 64},
]


def refused(settings):
    """The messages for a configuration with these settings of Megatron's and of ours."""
    ours = {k.removeprefix("moe_moonep_"): v for k, v in settings.items() if "moonep" in k}
    fields = {f.name for f in dataclasses.fields(TransformerConfig)}
    rest = {k: v for k, v in settings.items() if "moonep" not in k}
    config = megatron_config(**{k: v for k, v in rest.items() if k in fields})
    arguments = SimpleNamespace(**{k: v for k, v in rest.items() if k not in fields})
    return refusals.refusals(config, MoonEPConfig(**ours), arguments)


def test_every_row_has_a_case():
    assert [row.field for row in REFUSED] == list(dict.fromkeys(row.field for row in REFUSED))
    assert set(REFUSED_CASES) == {row.field for row in REFUSED}


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.field)
def test_refused(row):
    for settings in REFUSED_CASES[row.field]:
        (message,) = refused(settings)
        value = settings.get(row.field)
        assert row.label in message
        assert (getattr(value, "__name__", None) or repr(value)) in message
        assert row.why in message
        assert row.remedy in message


@pytest.mark.parametrize("settings", ACCEPTED, ids="-".join)
def test_accepted(settings):
    assert refused(settings) == []


def test_check_names_everything_at_once():
    config = megatron_config(fp8="hybrid", moe_expert_capacity_factor=1.0)
    with pytest.raises(ValueError) as error:
        moonep.check(config, MoonEPConfig())
    assert "--fp8-format" in str(error.value)
    assert "--moe-expert-capacity-factor" in str(error.value)


def test_check_sees_megatrons_arguments(monkeypatch):
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)
    moonep.check(megatron_config(), MoonEPConfig())
    arguments = SimpleNamespace(distributed_timeout_minutes=4)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", arguments)
    with pytest.raises(ValueError, match="--distributed-timeout-minutes = 4"):
        moonep.check(megatron_config(), MoonEPConfig())


# --- nothing passes silently ------------------------------------------------------------------


def test_every_field_about_experts_is_decided():
    names = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    rows = {row.field for row in REFUSED}
    about_experts = {name for name in names if refusals.concerns_experts(name)}
    assert len(about_experts) > 60
    assert about_experts - rows - ALLOWED == set()
    assert rows & ALLOWED == set()


def test_a_setting_of_a_newer_megatron_is_refused_once_it_is_changed():
    @dataclasses.dataclass
    class Newer(TransformerConfig):
        moe_future_trick: int = 0
        expert_future_list: list = dataclasses.field(default_factory=list)
        unrelated_future: int = 0

    newer = Newer(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=8,
        add_bias_linear=False,
    )
    newer.unrelated_future = 1
    assert refusals.refusals(newer, MoonEPConfig()) == []
    newer.moe_future_trick, newer.expert_future_list = 3, [1]
    messages = refusals.refusals(newer, MoonEPConfig())
    assert [m.split(" ")[0] for m in messages] == ["moe_future_trick", "expert_future_list"]


def test_an_older_megatron_lacks_fields():
    older = SimpleNamespace(
        num_moe_experts=8,
        expert_model_parallel_size=4,
        add_bias_linear=False,
        activation_func=F.silu,
    )
    assert refusals.refusals(older, MoonEPConfig()) == []


# Fields of the table that only some versions of Megatron have, and one that validate_args makes.
NOT_EVERYWHERE = {
    "moe_dispatch_fwd_dtype",
    "moe_combine_bwd_dtype",
    "expert_tensor_parallel_num_weight_shards",
    "expert_gtp_weight_remat_size",
    "use_layer_wise_distributed_optimizer",
    "moe_moonep_slots",
    "moe_moonep_redispatch",
    "moe_moonep_reuse",
    "moe_moonep_check_plan",
}


def test_fields_and_flags_of_the_table_exist():
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = {option for action in parser._actions for option in action.option_strings}
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    fields |= {action.dest for action in parser._actions}
    assert {row.field for row in REFUSED} - fields <= NOT_EVERYWHERE
    labels = {row.label for row in REFUSED if row.flag is not None and row.field in fields}
    # Megatron adds this one only where the kitchen package is installed.
    assert labels - flags == {"--kitchen-config-file"}
    text = " ".join(row.remedy for row in REFUSED)
    words = {word.strip(",.:;") for word in text.split() if word.startswith("--")}
    assert words - flags == {"--moe-moonep-timeout", "--moe-moonep-max-tokens"}


# --- the README -------------------------------------------------------------------------------


def test_markdown_has_a_line_for_every_row():
    lines = refusals.markdown().splitlines()
    assert lines[0] == refusals.BEGIN
    assert lines[-1] == refusals.END
    assert len(lines) == len(REFUSED) + 4
    assert all(line.count("|") == 5 for line in lines[1:-1])


def test_readme_shows_the_table():
    text = README.read_text()
    shown = text[text.find(refusals.BEGIN) : text.find(refusals.END) + len(refusals.END)]
    assert shown == refusals.markdown(), (
        "README.md does not show the table of refused settings: put the output of "
        "`python -m moonep_megatron` there, markers included"
    )
