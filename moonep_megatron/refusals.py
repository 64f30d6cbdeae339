"""What `moonep` refuses: the one table that the check, its messages and the README all read.

A setting is refused when the configuration is built, never later and never silently. `check` looks
at Megatron's `TransformerConfig`, at Megatron's arguments where there are any, and at our own
settings; in the table the latter carry the name of their flag (`moe_moonep_slots`). A field that a
version of Megatron does not have reads as None and is not refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moonep_megatron import conditions

if TYPE_CHECKING:
    from moonep_megatron.config import MoonEPConfig

BEGIN, END = "<!-- refused:begin -->", "<!-- refused:end -->"


@dataclass(frozen=True)
class Refusal:
    """One refused setting. `refused(value, at)` decides; `at.x` is any other setting, or None."""

    field: str
    why: str
    when: str = "set"
    refused: conditions.Test = conditions.is_set
    remedy: str = "leave it out"
    flag: str | None = ""  # "" is made from the field; None: there is no flag, only the field

    @property
    def label(self) -> str:
        """The name a user knows it by: its flag, else the field of TransformerConfig."""
        if self.flag is None:
            return f"TransformerConfig.{self.field}"
        return self.flag or "--" + self.field.replace("_", "-")

    def message(self, value: object) -> str:
        """One sentence with setting, value, reason and remedy."""
        shown = getattr(value, "__name__", None) or repr(value)
        name = f"{self.label} ({self.field})" if self.flag else self.label
        return f"{name} = {shown} is not supported: {self.why}; {self.remedy}."


def _group(why: str, *fields: str, **same: Any) -> tuple[Refusal, ...]:
    """Settings refused for one reason, whenever they are set."""
    return tuple(Refusal(field, why, **same) for field in fields)


_WHOLE = "an expert lies whole on its home rank"
_ROWS = "every rank computes exactly the routed rows: none may be dropped or added"
_WEIGHTS = "expert weights travel between ranks, in fp16, bf16 or fp32 only"
_ORDER = (
    "an expert's weight gradients are computed in its backward pass, because its duplicates' must "
    "be home before its gradient hook fires"
)
_MLP = "the expert MLP is computed by moonep_megatron, which does not do this"

REFUSED: tuple[Refusal, ...] = (
    Refusal(
        "num_moe_experts",
        "every rank is home to the same number of experts",
        when="not divisible by `--expert-model-parallel-size`",
        refused=conditions.uneven_experts,
        remedy="choose a multiple of --expert-model-parallel-size",
        flag="--num-experts",
    ),
    Refusal(
        "moe_moonep_slots",
        "a rank has use for one duplicate slot at least and one for each home expert at most",
        when="not in 1 … `--num-experts` ÷ `--expert-model-parallel-size`",
        refused=conditions.slots_out_of_range,
        remedy="leave it out, or choose it in 1 … --num-experts ÷ --expert-model-parallel-size",
    ),
    Refusal(
        "expert_tensor_parallel_size",
        _WHOLE,
        when="above 1 (by default it is `--tensor-model-parallel-size`)",
        refused=conditions.above_one,
        remedy="set --expert-tensor-parallel-size 1",
    ),
    Refusal(
        "expert_tensor_parallel_num_weight_shards",
        _WHOLE,
        when="above 1",
        refused=conditions.above_one,
    ),
    Refusal(
        "expert_gtp_weight_remat_size",
        _WHOLE,
        when="above 1",
        refused=conditions.above_one,
        flag=None,
    ),
    Refusal("use_megatron_fsdp", _WHOLE, remedy="use --use-distributed-optimizer in place of FSDP"),
    Refusal("use_torch_fsdp2", _WHOLE, remedy="use --use-distributed-optimizer in place of FSDP"),
    Refusal(
        "use_layer_wise_distributed_optimizer",
        "it scatters the experts of a layer in memory",
        when="one that is sharded by layer (muon with `--use-distributed-optimizer`)",
        remedy="use --optimizer adam",
        flag="--optimizer",
    ),
    Refusal(
        "sequence_parallel",
        "tensor-parallel ranks would bring the same tokens twice",
        when="missing while `--tensor-model-parallel-size` is above 1",
        refused=conditions.tokens_twice,
        remedy="set --sequence-parallel; where Megatron's generation switches that off, load the "
        "checkpoint with alltoall or without tensor parallelism",
    ),
    Refusal(
        "variable_seq_lengths",
        "row buffers would take their size from the first microbatch, which may be a short one",
        when="set, and Megatron's arguments do not give the longest microbatch",
        refused=conditions.unbounded_tokens,
        remedy="set --moe-moonep-max-tokens",
        flag=None,
    ),
    Refusal(
        "hybrid_context_parallel",
        "ranks of one expert-parallel group would run different numbers of passes",
        remedy="leave it out; variable lengths need no dynamic groups",
    ),
    *_group(
        _ROWS,
        "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity",
        "moe_expert_rank_capacity_factor",
        "moe_pad_experts_for_cuda_graph_inference",
        "moe_router_padding_for_quantization",
        "moe_router_padding_for_fp8",
        "moe_paged_stash",
    ),
    Refusal("moe_token_dropping", _ROWS, flag=None),
    Refusal("fp8", _WEIGHTS, remedy="train with --bf16", flag="--fp8-format"),
    Refusal("fp4", _WEIGHTS, remedy="train with --bf16", flag="--fp4-format"),
    Refusal("quant_recipe", _WEIGHTS, flag="--te-precision-config-file"),
    Refusal("use_kitchen", _WEIGHTS, flag="--kitchen-config-file"),
    *_group(
        "rows travel in the dtype of the model",
        "moe_dispatch_fwd_dtype",
        "moe_combine_bwd_dtype",
        when="other than bf16",
        refused=conditions.other_than("bf16"),
    ),
    Refusal(
        "enable_autocast",
        "rows and weights must have one dtype",
        remedy="use bf16 or fp16 parameters",
        flag=None,
    ),
    Refusal(
        "activation_func",
        _MLP,
        when="none of silu, gelu, relu, squared_relu, quick_gelu",
        refused=conditions.unknown_activation,
        remedy="use --swiglu, --squared-relu, --quick-geglu or the default gelu",
        flag=None,
    ),
    Refusal(
        "activation_func_clamp_value",
        "Megatron's fused SwiGLU ignores the clamp, moonep_megatron would not",
        when="set together with `--swiglu` without `--no-bias-swiglu-fusion`",
        refused=conditions.clamp_ignored_by_fusion,
        remedy="set --no-bias-swiglu-fusion",
    ),
    *_group(
        _MLP,
        "moe_mlp_glu_interleave_size",
        "use_te_activation_func",
        "use_transformer_engine_op_fuser",
        "batch_invariant_mode",
    ),
    Refusal(
        "offload_modules",
        "the experts' activations are kept by moonep_megatron, which does not offload them",
        when="`expert_fc1`, `moe_act` or `fused_group_mlp` are among them",
        refused=conditions.offloads_experts,
        remedy="leave these out; the activations of other modules may be offloaded",
    ),
    Refusal("activation_func_fp8_input_store", _MLP, flag=None),
    Refusal("cpu_offloading", _MLP, flag="--cpu-offloading-num-layers"),
    *_group(
        "it listens to the linear layers of the experts, which are never called",
        "save_activations_interval",
        "save_dgrads_interval",
        "save_tokens_per_expert_interval",
    ),
    Refusal(
        "moe_shared_expert_overlap",
        "shared experts need rows of the model's width, and the dispatcher sees latent ones",
        when="set together with `--moe-latent-size`",
        refused=lambda value, at: bool(value) and bool(at.moe_latent_size),
    ),
    Refusal(
        "overlap_moe_expert_parallel_comm",
        "it runs two microbatches inside a layer, whose rows and slots serve one pass at a time",
    ),
    *_group(_ORDER, "delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad"),
    Refusal(
        "cuda_graph_impl",
        "the collective backend asks the host for sizes, which a graph cannot",
        when="the backend is `collective` and a graph holds the dispatch: `full_iteration`, whole "
        "layers, `moe`, or `local` with `attn`",
        refused=conditions.sizes_asked_in_graph,
        remedy="leave it out, or capture --cuda-graph-modules moe_router moe_preprocess only",
    ),
    Refusal(
        "cuda_graph_modules",
        "the graph would end between the steps of the overlapped shared experts",
        when="`moe_preprocess` together with `--moe-shared-expert-overlap`",
        refused=conditions.shared_experts_cut,
        remedy="leave out --moe-shared-expert-overlap",
    ),
    Refusal(
        "moe_moonep_check_plan",
        "it compares plans on the host, which a graph cannot",
        when="set together with a CUDA graph that holds the dispatch",
        refused=lambda value, at: bool(value) and conditions.captures_dispatch(at),
    ),
    Refusal(
        "transformer_impl",
        "it brings a dispatcher of its own",
        when="inference_optimized",
        refused=lambda value, _: value == "inference_optimized",
        remedy="use transformer_engine or local",
    ),
    Refusal(
        "moe_router_force_biased",
        "both bias the router",
        when="set together with `--moe-moonep-force-maxvio`",
        refused=conditions.biased_twice,
        remedy="use one of the two",
    ),
    Refusal(
        "moe_moonep_redispatch",
        "the collective backend keeps the dispatched rows",
        when="set together with `--moe-moonep-backend collective`",
        refused=conditions.without_symmetric,
    ),
    Refusal(
        "moe_moonep_reuse",
        "a layer that is recomputed could be planned otherwise than in its first pass, and a graph "
        "that is replayed would not see that the weights have changed",
        when="set while MoE layers are recomputed, or a CUDA graph holds the dispatch",
        refused=conditions.no_reuse,
    ),
    *(
        Refusal(
            field,
            "Megatron would end the run before moonep can name the rank that does not answer",
            when="not above `--moe-moonep-timeout` (seconds), unless the backend is `collective`",
            refused=conditions.ends_before_ours(seconds),
            remedy="raise it, or lower --moe-moonep-timeout",
        )
        for field, seconds in (
            ("distributed_timeout_minutes", 60),
            ("distributed_timeout_seconds_after_init", 1),
        )
    ),
)

# Settings about experts that were read and may stay as they are.
_ALLOWED = {
    "what a layer is": """moe_token_dispatcher_type expert_model_parallel_size
        moe_router_topk moe_ffn_hidden_size moe_layer_freq moe_latent_size moe_grouped_gemm
        moe_use_grouped_tensor moe_single_grouped_weight moe_single_grouped_bias""",
    "honoured by our expert MLP": """gated_linear_unit glu_linear_offset moe_apply_probs_on_input
        moe_layer_recompute""",
    "the same function in another form": """bias_activation_fusion moe_permute_fusion
        use_fused_weighted_squared_relu""",
    "outside the dispatcher and the routed experts": """moe_router_load_balancing_type
        moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk
        moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function
        moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate
        moe_router_quantile_balancing_ema moe_router_force_load_balancing moe_router_fusion
        moe_enable_routing_replay moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps
        moe_per_layer_logging moe_grad_scale_func moe_shared_expert_intermediate_size
        moe_shared_expert_gate moe_shared_expert_glu_interleave_size
        use_grouped_gemm_for_shared_expert""",
    "without effect, as under alltoall": """moe_token_drop_policy moe_enable_deepep
        moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_deepep_num_sms
        moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_num_sms_preprocessing moe_permute_fusion_into_hybridep
        moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_static_shape moe_ncclep_zero_copy
        moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_buffer_size_factor_cpu inference_moe_token_dispatcher_type
        inference_moe_disable_fused_quant_kernels""",
}
ALLOWED = frozenset(name for names in _ALLOWED.values() for name in names.split())
_CONCERNS_EXPERTS = re.compile(r"moe|expert|glu|activation_func")


def concerns_experts(field: str) -> bool:
    """Whether a field of TransformerConfig is one that somebody must have decided on."""
    return bool(_CONCERNS_EXPERTS.search(field))


def _unread(transformer_config: Any) -> Iterable[str]:
    """Settings of a Megatron newer than this table, if the user changed them."""
    known = ALLOWED | {row.field for row in REFUSED}
    if not dataclasses.is_dataclass(transformer_config):
        return
    for field in dataclasses.fields(transformer_config):
        if field.name in known or not concerns_experts(field.name):
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        value = getattr(transformer_config, field.name)
        if value != default:
            yield (
                f"{field.name} = {value!r} is not supported: this version of moonep_megatron was "
                f"written before Megatron had it; leave it at {default!r}."
            )


def refusals(transformer_config: Any, moonep: MoonEPConfig, arguments: object = None) -> list[str]:
    """Every reason why `moonep` cannot run this configuration; empty if it can.

    A model without experts has no dispatcher, so nothing is refused for it.
    """
    if not getattr(transformer_config, "num_moe_experts", None):
        return []
    at = conditions.Settings(transformer_config, moonep, arguments)
    values = ((row, getattr(at, row.field)) for row in REFUSED)
    found = [row.message(value) for row, value in values if row.refused(value, at)]
    return found + list(_unread(transformer_config))


def markdown() -> str:
    """The table for the README, between its markers; `python -m moonep_megatron` prints it."""
    head = ["| setting | refused when | why | instead |", "| --- | --- | --- | --- |"]
    rows = [f"| `{r.label}` | {r.when} | {r.why} | {r.remedy} |" for r in REFUSED]
    return "\n".join([BEGIN, *head, *rows, END])
