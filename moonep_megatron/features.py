"""What of Megatron works under `moonep`: the table that the README shows.

A feature is supported, and then names the tests that show it; or it is unproven: it is allowed, and
its tests, which need a GPU, have not passed on one yet; or it is refused, and then names its rows
of `moonep_megatron.refusals.REFUSED`, which are what the check reads and where the reason stands.
`tests/test_features.py` holds the table to the tests and rows that exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonep_megatron.refusals import REFUSED, Refusal

BEGIN, END = "<!-- features:begin -->", "<!-- features:end -->"


@dataclass(frozen=True)
class Feature:
    """One line of the table.

    Attributes:
        name: what Megatron calls it.
        setting: the flags that switch it on, as a user writes them; empty where none does.
        tests: `file::function` below `tests/`, for a supported feature; those in `gpu/` need one.
        rows: fields of rows of `REFUSED`, for a refused one.
        unproven: some of its tests have not passed yet.
    """

    name: str
    setting: str
    tests: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    unproven: bool = False

    @property
    def supported(self) -> bool:
        """Whether it works; else it is refused when the configuration is built."""
        return bool(self.tests)

    @property
    def refusals(self) -> list[Refusal]:
        """The rows that refuse it."""
        return [_ROWS[field] for field in self.rows]

    @property
    def line(self) -> str:
        """Its line of the Markdown table."""
        setting = f"`{self.setting}`" if self.setting else ""
        if self.supported:
            status = "unproven" if self.unproven else "yes"
            return f"| {self.name} | {setting} | {status} | {_code(self.tests)} |"
        why = "; ".join(dict.fromkeys(row.why for row in self.refusals))
        return f"| {self.name} | {setting} | refused | {why} |"


_ROWS = {row.field: row for row in REFUSED}


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _yes(name: str, setting: str, *tests: str) -> Feature:
    return Feature(name, setting, tests=tests)


def _unproven(name: str, setting: str, *tests: str) -> Feature:
    return Feature(name, setting, tests=tests, unproven=True)


def _refused(name: str, setting: str, *rows: str) -> Feature:
    return Feature(name, setting, rows=rows)


FEATURES: tuple[Feature, ...] = (
    # Parallelism
    _yes(
        "tensor and sequence parallelism, expert TP 1",
        "--tensor-model-parallel-size N --sequence-parallel --expert-tensor-parallel-size 1",
        "test_layer.py::test_sequence_parallel_ranks_bring_their_own_tokens",
    ),
    _refused(
        "tensor parallelism without sequence parallelism",
        "--tensor-model-parallel-size N",
        "sequence_parallel",
    ),
    _refused(
        "tensor-parallel experts",
        "--expert-tensor-parallel-size N",
        "expert_tensor_parallel_size",
        "expert_tensor_parallel_num_weight_shards",
        "expert_gtp_weight_remat_size",
    ),
    _yes(
        "pipeline parallelism",
        "--pipeline-model-parallel-size N",
        "test_training.py::test_pipeline_keeps_microbatches_in_flight",
    ),
    _yes(
        "virtual pipeline, interleaved",
        "--num-layers-per-virtual-pipeline-stage N",
        "test_features_training.py::test_virtual_pipeline",
    ),
    _yes(
        "expert data parallelism",
        "",
        "test_gradients.py::test_expert_data_parallel",
    ),
    _yes(
        "context parallelism",
        "--context-parallel-size N",
        "test_features_models.py::test_context_parallel",
    ),
    _refused("dynamic context parallelism", "--hybrid-context-parallel", "hybrid_context_parallel"),
    _refused("FSDP", "--use-megatron-fsdp", "use_megatron_fsdp", "use_torch_fsdp2"),
    # Optimizer and gradients
    _yes(
        "DDP and the distributed optimizer, both overlaps",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "test_gradients.py::test_optimizer_steps_equal_those_of_alltoall",
        "gpu/test_moe_layer.py::test_optimizer_steps_equal_those_of_alltoall",
    ),
    _refused(
        "layer-wise optimizers",
        "--optimizer muon --use-distributed-optimizer",
        "use_layer_wise_distributed_optimizer",
    ),
    _yes(
        "fused, unfused, fp32 and bf16 gradient accumulation",
        "--no-gradient-accumulation-fusion --grad-reduce-in-bf16",
        "test_gradients.py::test_every_place_of_gradients",
        "gpu/test_moe_layer.py::test_every_place_of_gradients",
    ),
    _yes("frozen experts", "", "test_weights.py::test_frozen_experts_get_no_gradient"),
    _yes(
        "checkpoints that move between dispatchers and EP sizes",
        "--save --load",
        "test_checkpoint.py::test_ckpt_roundtrip",
    ),
    _yes(
        "upcycling of a dense model",
        "--moe-use-upcycling",
        "test_features_models.py::test_upcycling",
    ),
    _refused(
        "delayed weight gradients",
        "--delay-wgrad-compute",
        "delay_wgrad_compute",
        "overlap_dispatch_backward_with_experts_wgrad",
    ),
    # The layer
    _yes(
        "experts of SequentialMLP and TEGroupedMLP",
        "--moe-grouped-gemm",
        "test_layer.py::test_activations_in_every_form_of_weights",
        "gpu/test_moe_layer.py::test_weights_of_transformer_engine",
    ),
    _yes(
        "SwiGLU, GEGLU, quick-GEGLU, squared ReLU, GELU",
        "--swiglu --quick-geglu --squared-relu",
        "test_layer.py::test_activations_in_every_form_of_weights",
        "gpu/test_moe_layer.py::test_activations",
    ),
    _yes(
        "clamp and offset of gated experts, probabilities on their input",
        "--activation-func-clamp-value --glu-linear-offset --moe-apply-probs-on-input",
        "test_layer.py::test_clamp_offset_and_probabilities_on_the_input",
    ),
    _refused(
        "other forms of the expert MLP",
        "--use-te-activation-func --use-transformer-engine-op-fuser --moe-mlp-glu-interleave-size",
        "use_te_activation_func",
        "use_transformer_engine_op_fuser",
        "moe_mlp_glu_interleave_size",
        "activation_func",
        "activation_func_fp8_input_store",
    ),
    _yes(
        "experts with biases (collective backend)",
        "",
        "test_layer.py::test_biases",
        "test_gradients.py::test_every_place_of_gradients_of_biases",
    ),
    _unproven("experts with biases (symmetric backend)", "", "gpu/test_moe_layer.py::test_biases"),
    _yes(
        "duplicates kept between microbatches (collective backend)",
        "--moe-moonep-reuse",
        "test_reuse.py::test_layers_against_the_dense_reference",
        "test_reuse.py::test_stale_copies_are_never_used",
    ),
    _unproven(
        "duplicates kept between microbatches (symmetric backend)",
        "--moe-moonep-reuse",
        "test_emulated_push.py::test_every_slot_holds_its_expert",
        "gpu/test_reuse_gpu.py::test_layers_against_the_dense_reference",
        "gpu/test_reuse_gpu.py::test_stale_copies_are_never_used",
    ),
    _yes(
        "fp32, fp16 and bf16",
        "--fp16 --bf16",
        "test_layer.py::test_dtype_matrix",
        "gpu/test_moe_layer.py::test_dtypes",
    ),
    _refused(
        "fp8 and fp4", "--fp8-format --fp4-format", "fp8", "fp4", "quant_recipe", "use_kitchen"
    ),
    _refused(
        "rows of 8 bits on the wire",
        "--moe-dispatch-fwd-dtype --moe-combine-bwd-dtype",
        "moe_dispatch_fwd_dtype",
        "moe_combine_bwd_dtype",
    ),
    _yes(
        "shared experts",
        "--moe-shared-expert-intermediate-size --moe-shared-expert-gate",
        "test_training.py::test_loss_parity_dispatchers",
        "test_features_training.py::test_shared_experts",
    ),
    _yes(
        "shared experts overlapped with dispatch and combine (collective backend)",
        "--moe-shared-expert-overlap",
        "test_features_training.py::test_shared_experts",
        "test_features_models.py::test_sequence_parallel_shared_experts",
    ),
    _unproven(
        "shared experts overlapped with dispatch and combine (symmetric backend)",
        "--moe-shared-expert-overlap",
        "gpu/test_features_gpu.py::test_overlapped_shared_experts",
    ),
    _refused(
        "the same over latent experts",
        "--moe-shared-expert-overlap --moe-latent-size",
        "moe_shared_expert_overlap",
    ),
    _unproven(
        "latent experts (Transformer Engine)",
        "--moe-latent-size N",
        "gpu/test_features_gpu.py::test_latent_experts",
    ),
    _yes(
        "hybrid models",
        "--hybrid-layer-pattern",
        "test_features_models.py::test_hybrid_model",
        "test_enable.py::test_forked",
    ),
    _yes(
        "multi-token prediction, also by one repeated layer",
        "--mtp-num-layers N --mtp-use-repeated-layer",
        "test_training.py::test_loss_parity_dispatchers",
        "test_features_training.py::test_repeated_prediction_layer",
    ),
    # Routing
    _yes(
        "auxiliary losses of every kind, z-loss, sinkhorn",
        "--moe-router-load-balancing-type --moe-aux-loss-coeff --moe-z-loss-coeff",
        "test_training.py::test_loss_parity_dispatchers",
        "test_features_training.py::test_routers",
    ),
    _yes(
        "group-limited routing",
        "--moe-router-num-groups --moe-router-group-topk",
        "test_features_training.py::test_routers",
    ),
    _yes(
        "expert bias",
        "--moe-router-enable-expert-bias",
        "test_training.py::test_loss_parity_dispatchers",
    ),
    _refused(
        "capacity factor, dropping, padding to capacity",
        "--moe-expert-capacity-factor --moe-pad-expert-input-to-capacity",
        "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity",
        "moe_expert_rank_capacity_factor",
        "moe_token_dropping",
    ),
    _refused(
        "router padding",
        "--moe-router-padding-for-quantization",
        "moe_router_padding_for_quantization",
        "moe_router_padding_for_fp8",
    ),
    _yes(
        "ranks with different numbers of tokens, also none",
        "",
        "test_layer.py::test_ragged_rank_s",
        "gpu/test_moe_layer.py::test_ragged_tokens",
    ),
    _yes(
        "variable sequence lengths, up to a longest microbatch",
        "--moe-moonep-max-tokens N",
        "test_features_training.py::test_lengths_that_vary",
    ),
    _refused(
        "variable sequence lengths of unknown bound",
        "TransformerConfig.variable_seq_lengths",
        "variable_seq_lengths",
    ),
    # Memory and schedules
    _yes(
        "recompute of `moe`, `moe_act` or whole layers",
        "--recompute-granularity --recompute-modules",
        "test_training.py::test_recompute_moe_full",
        "gpu/test_moe_layer.py::test_recompute_and_redispatch_give_the_same_bits",
    ),
    _unproven(
        "fine-grained offload outside the experts",
        "--fine-grained-activation-offloading --offload-modules core_attn mlp_norm",
        "gpu/test_features_gpu.py::test_fine_grained_offload",
    ),
    _refused(
        "fine-grained offload of the experts' activations",
        "--offload-modules expert_fc1 moe_act",
        "offload_modules",
    ),
    _refused("CPU offload of layers", "--cpu-offloading-num-layers", "cpu_offloading"),
    _refused("paged stash", "--moe-paged-stash", "moe_paged_stash"),
    _refused(
        "expert-parallel overlap",
        "--overlap-moe-expert-parallel-comm",
        "overlap_moe_expert_parallel_comm",
    ),
    _unproven(
        "CUDA graphs of whole layers, or of `moe` (symmetric backend)",
        "--cuda-graph-impl local, transformer_engine --cuda-graph-modules moe",
        "test_emulated_graphs.py::test_whole_layers",
        "gpu/test_features_gpu.py::test_graphs_of_layers",
        "gpu/test_features_gpu.py::test_graphs_of_one_rank",
    ),
    _unproven(
        "CUDA graphs of router and preprocessing",
        "--cuda-graph-modules moe_router moe_preprocess",
        "test_features_graphs.py::test_state_crosses_from_a_graph_in_tensors_alone",
        "test_emulated_graphs.py::test_router_and_preprocessing",
        "gpu/test_features_gpu.py::test_graphs_of_layers",
    ),
    _unproven(
        "CUDA graph of the whole iteration (symmetric backend)",
        "--cuda-graph-impl full_iteration",
        "gpu/test_graph.py::test_capture_fwd_bwd",
        "gpu/test_features_gpu.py::test_graph_of_an_iteration",
    ),
    _refused(
        "graphs over the dispatch on the collective backend",
        "--cuda-graph-impl --moe-moonep-backend collective",
        "cuda_graph_impl",
    ),
    _refused(
        "graphs that cut overlapped shared experts",
        "--cuda-graph-modules moe_preprocess --moe-shared-expert-overlap",
        "cuda_graph_modules",
    ),
    _refused("batch-invariant mode", "--batch-invariant-mode", "batch_invariant_mode"),
    # Inference
    _yes(
        "evaluation",
        "",
        "test_layer.py::test_inference_needs_no_gradients",
        "gpu/test_moe_layer.py::test_inference_and_strided_tokens",
    ),
    _yes(
        "generation",
        "",
        "test_features_models.py::test_generation",
    ),
    _refused(
        "generation under tensor parallelism",
        "--tensor-model-parallel-size N",
        "sequence_parallel",
    ),
    _refused(
        "inference-optimized layers", "--transformer-impl inference_optimized", "transformer_impl"
    ),
)


def markdown() -> str:
    """The table for the README, between its markers; `python -m moonep_megatron` prints it."""
    head = ["| feature | setting | supported | test, or why not |", "| --- | --- | --- | --- |"]
    return "\n".join([BEGIN, *head, *(feature.line for feature in FEATURES), END])
