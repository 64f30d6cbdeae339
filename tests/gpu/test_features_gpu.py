"""Features of Megatron's that need a GPU: CUDA graphs, streams of shared experts, latent experts.

A small GPT-MoE is trained twice by Megatron's schedule, by plain gradient steps: with the feature
and without it, or under moonep and under alltoall. Losses of all steps and the gradients of the
last one must agree. Each run with graphs has ranks of its own, because graphs change streams,
memory pools and random states of the whole process. Without a GPU the same runs go without graphs.

What fails says where: the step and the rank's traceback, or every tensor that is off and how far.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, device
from gpt import SEQUENCE, build, global_parameters, sequences
from layer_ranks import BACKEND, GPU, WAIT_S, Ranks, StaticPass, layer_case, ranks
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from moe import stand_in_for_fused_kernels
from reference import error
from torch import Tensor, nn

pytestmark = pytest.mark.timeout(900)  # a first run compiles every kernel

TE = GPU and find_spec("transformer_engine") is not None
needs_te = pytest.mark.skipif(not TE, reason="needs Transformer Engine")
SIZE, STEPS, MICROBATCHES, SEQUENCES = 2, 6, 2, 2
# Steps before Transformer Engine captures; Megatron's own graphs are captured after the first.
WARMUP = 2
RATE = 0.05
MOONEP = {"backend": BACKEND, "timeout": WAIT_S}
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "moe_ffn_hidden_size": 128,
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
    "cuda_graph_warmup_steps": WARMUP,
}
# Dispatchers add in different orders; in bf16 that changes some choices of the router.
FP32 = {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}
SHARED = {"moe_shared_expert_intermediate_size": 64}
GRAPHS: list[tuple[str, list[str], dict[str, Any]]] = [
    ("local", [], {}),
    ("local", [], {"gradient_accumulation_fusion": True}),
    ("local", [], SHARED | {"moe_shared_expert_overlap": True}),
    ("transformer_engine", [], {}),
    ("transformer_engine", [], {"gradient_accumulation_fusion": True}),
    ("transformer_engine", ["moe"], {}),
    ("transformer_engine", ["attn", "moe_router"], SHARED),
    ("transformer_engine", ["attn", "moe_router", "moe_preprocess"], SHARED),
]


@contextmanager
def fresh_ranks(size: int) -> Iterator[Ranks]:
    apex = "Apex" if layers._grad_accum_fusion_available else "no Apex"
    print(f"{size} ranks, {torch.cuda.device_count()} GPUs, Transformer Engine: {TE}, {apex}")
    some = Ranks(size, {})
    try:
        yield some
    finally:
        some.close()


def _seed(impl: str) -> None:
    """Random states that a graph may hold."""
    safe = {"te_rng_tracker": impl == "transformer_engine", "use_cudagraphable_rng": impl != "none"}
    model_parallel_cuda_manual_seed(1234, **(safe if GPU else {}), force_reset_rng=True)


def _forward_step(numbers: Any, model: nn.Module) -> tuple[Tensor, Any]:
    """The mask is explicit, because Transformer Engine's graphs put one in the place of none."""
    data = {name: tensor.to(device()) for name, tensor in sequences(next(numbers)).items()}
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=device()).triu(1)
    mask = mask.expand(SEQUENCES, 1, -1, -1).contiguous()
    output = model(data["tokens"], data["positions"], mask, labels=data["labels"])
    return output, lambda out: (out.float().mean(), {"loss": out.detach().float().mean()})


def _run_step(model: nn.Module, step: int) -> list[float]:
    first = 100 * step + 10 * dist.get_rank()
    numbers = [range(first + 2 * m, first + 2 * m + SEQUENCES) for m in range(MICROBATCHES)]
    reported = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iter(numbers),
        model=[model],
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=SEQUENCES,
        forward_only=False,
    )
    return [float(entry["loss"]) for entry in reported]


@contextmanager
def _while(doing: str) -> Iterator[None]:
    """An error within says so: CUDA's own errors name a later call, and no step."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"while {doing}")
        raise


def _wrap(module: nn.Module) -> DistributedDataParallel:
    """DDP, made on a stream of its own, as Megatron's training loop makes it.

    It keeps autograd's node of each parameter, and with it the stream of now. Every capture of a
    backward pass joins that stream, which the default one does not allow.
    """
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        model = DistributedDataParallel(module.config, options, module)
    torch.cuda.current_stream().wait_stream(aside)
    return model


def _train(dispatcher: str, options: dict[str, Any]) -> SimpleNamespace:
    """Losses of all microbatches, the last step's gradients by name, and graphs in use."""
    impl = options.get("cuda_graph_impl", "none")
    _seed(impl)
    if not GPU:
        options = {k: v for k, v in options.items() if not k.startswith("cuda_graph")}
    if options.get("gradient_accumulation_fusion") and not layers._grad_accum_fusion_available:
        stand_in_for_fused_kernels()
    module = build(dispatcher, moonep=MOONEP, **(MODEL | options)).to(device())
    module.config.finalize_model_grads_func = finalize_model_grads
    model = _wrap(module)
    helper = None
    if GPU and impl == "transformer_engine":
        total = MICROBATCHES * SEQUENCES * dist.get_world_size()
        init_num_microbatches_calculator(
            dist.get_rank(), None, total, SEQUENCES, dist.get_world_size()
        )
        helper = TECudaGraphHelper([model], module.config, SEQUENCE, SEQUENCES)
    losses = []
    for step in range(STEPS):
        if helper is not None and step == WARMUP:
            with _while("Transformer Engine captures"):
                helper.create_cudagraphs()
        model.zero_grad_buffer()
        with _while(f"step {step} runs, with {_graphs(module)} graphs at its start"):
            losses += _run_step(model, step)
        parameters = global_parameters(module)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.sub_((RATE * parameter.main_grad).to(parameter.dtype))
    gradients = {name: p.main_grad.detach().cpu() for name, p in parameters.items()}
    return SimpleNamespace(losses=losses, gradients=gradients, graphs=_graphs(module))


def _graphs(model: nn.Module) -> int:
    """CUDA graphs that the model's layers hold."""
    count = 0
    for module in model.modules():
        count += len(getattr(module, "cuda_graphs", ()))
        runners = getattr(getattr(module, "cudagraph_manager", None), "cudagraph_runners", ())
        count += sum(runner.fwd_graph is not None for runner in runners)
    return count


def _answers(
    dispatcher: str, options: dict[str, Any], *, size: int = SIZE
) -> list[SimpleNamespace]:
    if "cuda_graph_impl" not in options:
        return ranks(size).call(_train, dispatcher, options)
    with fresh_ranks(size) as some:
        return some.call(_train, dispatcher, options)


@cache
def _eager(options: tuple[tuple[str, Any], ...] = (), size: int = SIZE) -> list[SimpleNamespace]:
    """What moonep gives without graphs, for all tests that compare with it."""
    return _answers("moonep", dict(options), size=size)


def assert_same_training(ours: list[SimpleNamespace], theirs: list[SimpleNamespace]) -> None:
    """The same function in the same dtype: what differs is the order of sums at most."""
    wrong = []
    for rank, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert b.losses[-1] < b.losses[0], f"the model does not learn: {b.losses}"
        if a.losses != pytest.approx(b.losses, rel=5e-3):
            wrong.append(f"rank {rank}: losses\n  {a.losses}, expected\n  {b.losses}")
        wrong += [f"rank {rank}: {text}" for text in _wrong_gradients(a.gradients, b.gradients)]
    assert not wrong, "\n".join(wrong)


def _wrong_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """All that are off; a ratio of norms near 0.5 or 2 is a sum gone wrong."""
    off = {name: error(ours[name], gradient.double()) for name, gradient in theirs.items()}
    return [
        f"gradient of {name} off by {off[name]:.1e}, "
        f"norm {ours[name].norm():.3e}, expected {theirs[name].norm():.3e}"
        for name in theirs
        if not off[name] < 3e-2
    ]


@pytest.mark.parametrize(
    "impl, modules, options",
    [
        pytest.param(*graph, marks=needs_te if graph[0] == "transformer_engine" else ())
        for graph in GRAPHS
    ],
    ids=str,
)
def test_graphs_of_layers(impl: str, modules: list[str], options: dict[str, Any]) -> None:
    """Layers captured by Megatron, replayed for microbatches routed in ways they have not seen."""
    captured = {"cuda_graph_impl": impl, "cuda_graph_modules": modules}
    graphed = _answers("moonep", options | captured)
    assert all(answer.graphs > 0 for answer in graphed) or not GPU
    eager = _eager(tuple(options.items()))
    assert all(answer.graphs == 0 for answer in eager)
    assert_same_training(graphed, eager)


def test_graphs_of_one_rank() -> None:
    """Nothing is duplicated there, so no stream runs beside: a capture must not wait for one."""
    captured = {"cuda_graph_impl": "local", "cuda_graph_modules": []}
    graphed = _answers("moonep", captured, size=1)
    assert all(answer.graphs > 0 for answer in graphed) or not GPU
    assert_same_training(graphed, _eager(size=1))


@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gated"])
def test_overlapped_shared_experts(gate: bool) -> None:
    """On a stream of their own, beside our kernels, in both directions; twice the same bits."""
    options = SHARED | {"moe_shared_expert_gate": gate, "moe_shared_expert_overlap": True}
    assert_same_training(_answers("moonep", options | FP32), _answers("alltoall", options | FP32))
    for one, other in zip(_answers("moonep", options), _answers("moonep", options), strict=True):
        assert one.losses == other.losses
        pairs = ((name, g, other.gradients[name]) for name, g in one.gradients.items())
        assert [name for name, a, b in pairs if not torch.equal(a, b)] == []


def test_fine_grained_offload() -> None:
    """Activations of everything but the experts leave for the host and come back."""
    offloaded = {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"],
        "min_offloaded_tensor_size": 1024,
    }
    assert_same_training(_answers("moonep", offloaded if GPU else {}), _eager())


@needs_te
def test_latent_experts() -> None:
    options = FP32 | {"moe_latent_size": 128}
    assert_same_training(_answers("moonep", options), _answers("alltoall", options))


def _iterations(case: Case) -> list[str]:
    """Where Megatron's wrapper of whole iterations gives other bits than plain passes.

    Compared are the output and the gradients of every microbatch.
    """
    _seed("full_iteration")
    static = StaticPass(case, fused=False)
    warmup = 2 if GPU else STEPS + 1

    def forward_backward(data_iterator: Sequence[Iterator[Any]], **_: Any) -> list[Tensor]:
        found = []
        for data in data_iterator[0]:
            with torch.no_grad():
                for name in ("tokens", "grad", "probs", "map"):
                    getattr(static, name).copy_(data[name])
            found += static.run()
        return found

    wrapped = FullCudaGraphWrapper(forward_backward, cuda_graph_warmup_steps=warmup)
    replayed, plain = [], []
    for step in range(STEPS):
        numbers = range(step * MICROBATCHES, (step + 1) * MICROBATCHES)
        with _while(f"iteration {step} runs"):
            result = wrapped(
                model=[static.layer],
                data_iterator=iter([_inputs(static, m) for m in numbers]),
                num_microbatches=MICROBATCHES,
                seq_length=SEQUENCE,
                forward_only=False,
            )
        replayed.append([tensor.clone() for tensor in result])
    for step in range(STEPS):
        found = []
        for m in range(step * MICROBATCHES, (step + 1) * MICROBATCHES):
            static.load(m)
            found += static.run()
        plain.append(found)
    assert not GPU or FullCudaGraphWrapper.cuda_graph["training"] is not None
    return [
        f"step {step}, tensor {i} (output, gradients of tokens, probabilities and weights; again)"
        for step, (one, other) in enumerate(zip(replayed, plain, strict=True))
        for i, (a, b) in enumerate(zip(one, other, strict=True))
        if not torch.equal(a, b)
    ]


def _inputs(static: StaticPass, m: int) -> dict[str, Tensor]:
    part = static.batches[m]
    return {
        "tokens": part.tokens_sH[:, None],
        "grad": part.grad_sH[:, None],
        "probs": static.forced.probs[m].detach(),
        "map": static.forced.maps[m],
    }


def test_graph_of_an_iteration() -> None:
    """Two microbatches in one graph; the bits are those of plain passes."""
    skews = ("hot_rank", "uniform", "hot_expert", "zipf", "last_rank", "balanced")
    count = STEPS * MICROBATCHES
    routing = tuple(skews[m % len(skews)] for m in range(count))
    with fresh_ranks(SIZE) as some:
        for wrong in some.call(_iterations, layer_case("iteration", SIZE, routing=routing)):
            assert wrong == []
