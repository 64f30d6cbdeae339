"""CUDA graphs of Megatron's, as far as CPUs go: what is refused, and state that crosses graphs.

A graph of router and preprocessing (`moe_router`, `moe_preprocess`) returns tensors; the rest of
the layer runs later, from these tensors alone. Replays of real graphs are in `gpu/`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, batch
from megatron.core.transformer.moe.moe_utils import MoECudaGraphPartialCaptureSignal
from moe import build, expert_parameters
from ranks import RankError, run_ranks
from strict import StrictBackend, strict
from torch import Tensor, nn

ROUTINGS = ("hot_rank", "zipf", "uniform")
ROUTER_GRAPH = (
    ("cuda_graph_impl", "transformer_engine"),
    ("cuda_graph_modules", ["moe_router", "moe_preprocess"]),
)


@pytest.mark.parametrize(
    "impl, modules",
    [("full_iteration", []), ("local", []), ("transformer_engine", []), ("local", ["attn"])],
)
def test_the_collective_backend_refuses_graphs_over_the_dispatch(impl: str, modules: list) -> None:
    """Also where `auto` has taken it, which is known only when the layer is built."""
    config = (("cuda_graph_impl", impl), ("cuda_graph_modules", modules))
    with pytest.raises(RankError, match=r"--cuda-graph-impl .*collective backend"):
        run_ranks(1, build, Case(name="", ranks=1, config=config), "moonep")


def test_router_graphs_need_no_special_backend() -> None:
    run_ranks(1, _build_for_router_graph)


def _build_for_router_graph() -> None:
    build(Case(name="", ranks=1, config=ROUTER_GRAPH), "moonep")


def test_products_on_the_host_are_refused_in_graphs() -> None:
    run_ranks(1, _build_with_dtypes)


def _build_with_dtypes() -> None:
    """A backend with its boundaries on the device, and experts that quack takes or not."""
    config = (("cuda_graph_impl", "full_iteration"), ("cuda_graph_modules", []))
    StrictBackend.device_bounds = True
    with strict():
        build(Case(name="", ranks=1, ffn=16, dtype=torch.bfloat16, config=config), "moonep")
        with pytest.raises(ValueError, match=r"--cuda-graph-impl .*float32.*wait for the host"):
            build(Case(name="", ranks=1, ffn=16, config=config), "moonep")


def _transformer_engine_form(layer: nn.Module, hidden: Tensor) -> Callable[[], Tensor]:
    """Router and preprocessing now; the rest when called, as Megatron's TE graphs are replayed."""
    probs, routing_map = layer.route(hidden)
    rows, probs = layer.preprocess(hidden, probs, routing_map)
    signal = MoECudaGraphPartialCaptureSignal(layer, "preprocess", hidden_states=rows, probs=probs)
    rows, probs, *crossing = signal.get_early_return_outputs(hidden, None)
    names = layer.token_dispatcher.valid_cudagraph_attrs

    def rest() -> Tensor:
        _restore(layer.token_dispatcher, names, crossing)
        layer.cudagraph_tensor_store.set(hidden_states=rows, probs=probs)
        output = layer(rows)[0]
        layer.cudagraph_tensor_store.clear()
        return output

    return rest


def _local_form(layer: nn.Module, hidden: Tensor) -> Callable[[], Tensor]:
    """The same for Megatron's own graphs, which cut the layer in three."""
    layer.fwd_execution_map = "route"
    rows, probs, shared = layer(hidden, intermediate_tensors=())
    names = layer.token_dispatcher.cudagraph_attrs
    crossing = [_attribute(layer.token_dispatcher, name) for name in names]

    def rest() -> Tensor:
        _restore(layer.token_dispatcher, names, crossing)
        layer.fwd_execution_map = "expert_compute"
        output, _ = layer(None, intermediate_tensors=(rows, probs))
        layer.fwd_execution_map = "postprocess"
        return layer(None, intermediate_tensors=(output, shared))

    return rest


def _attribute(owner: Any, name: str) -> Any:
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner


def _restore(dispatcher: Any, names: list[str], values: list[Tensor]) -> None:
    for name, value in zip(names, values, strict=True):
        owner, _, last = name.rpartition(".")
        setattr(_attribute(dispatcher, owner), last, value)


def _whole_and_in_parts() -> list[list[Tensor]]:
    """Outputs and gradients of three microbatches: plain, then in both forms of parts.

    All preprocessing comes before the rest of any, so that nothing but the listed tensors can
    carry a microbatch's choices across.
    """
    found = []
    for form in (None, _transformer_engine_form, _local_form):
        config = ROUTER_GRAPH if form is _transformer_engine_form else ()
        case = Case(name="parts", ranks=2, routing=ROUTINGS, config=config)
        layer = build(case, "moonep")
        inputs, begun = [], []
        for m in range(len(ROUTINGS)):
            layer.router.microbatch = m
            hidden = batch(case, m, dist.get_rank()).tokens_sH[:, None].requires_grad_()
            inputs.append(hidden)
            begun.append(form(layer, hidden) if form else layer(hidden)[0])
        outputs = [rest() if form else rest for rest in begun]
        sum(output.pow(2).sum() for output in outputs).backward()
        gradients = [hidden.grad for hidden in inputs] + [p.grad for p in layer.router.probs]
        weights = [p.grad for fc in expert_parameters(layer) for p in fc]
        found.append([output.detach() for output in outputs] + gradients + weights)
    return found


def test_state_crosses_from_a_graph_in_tensors_alone() -> None:
    for plain, *in_parts in run_ranks(2, _whole_and_in_parts):
        for tensors in in_parts:
            assert all(torch.equal(a, b) for a, b in zip(tensors, plain, strict=True))


def _hooked(module_name: str) -> str | None:
    """What a pass says while some module has hooked every module of the layer."""
    layer = build(Case(name="", ranks=1), "moonep")

    def hook(*_: object) -> None:
        pass

    hook.__module__ = module_name
    for module in layer.modules():
        module.register_forward_hook(hook)
    try:
        layer(batch(Case(name="", ranks=1), 0, 0).tokens_sH[:, None])
    except TypeError as error:
        return str(error)
    return None


def test_hooks_of_a_capture_may_watch_the_experts() -> None:
    """Transformer Engine hooks all modules while it warms up; other hooks would be bypassed."""
    assert run_ranks(1, _hooked, "transformer_engine.pytorch.graph") == [None]
    (refused,) = run_ranks(1, _hooked, "some.tool")
    assert "forward or backward hooks" in refused
