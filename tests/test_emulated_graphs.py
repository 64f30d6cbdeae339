"""Megatron's loop trains the same with its own CUDA graphs as without them, bit for bit."""

from typing import Any

import emulated_graphs
import pytest
import torch
from gpt import Trainer, build, global_parameters
from megatron.core.package_info import __version__
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from moe import stand_in_for_fused_kernels
from packaging.version import Version
from ranks import run_ranks
from strict import strict
from test_features_models import hybrid_model
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(
    Version(__version__).release[:2] != (0, 19), reason="emulates what graphs of 0.19 ask of CUDA"
)
GRAPHS = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 2}
STEPS = 3


def _train(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    trainer, losses = Trainer(model), []
    first = 10 * torch.distributed.get_rank()
    for step in range(STEPS):
        numbers = range(100 * step + first, 100 * step + first + 4)
        losses += trainer.step([numbers[:2], numbers[2:]])
    return losses, {name: p.detach().clone() for name, p in global_parameters(model).items()}


def _graphs(model: nn.Module) -> int:
    """How many pairs of graphs were captured."""
    managers = [m for m in model.modules() if isinstance(m, CudaGraphManager)]
    runners = [runner for manager in managers for runner in manager.cudagraph_runners]
    assert all(runner.fwd_graph and runner.bwd_graph for runner in runners)
    return len(runners)


def _whole_layers(options: dict[str, Any]) -> list[tuple[list[float], dict[str, Tensor]]]:
    if "gradient_accumulation_fusion" in options:
        stand_in_for_fused_kernels()
    with strict():
        plain = _train(build("moonep", **options))
        emulated_graphs.enable()
        model = build("moonep", cuda_graph_modules=[], **GRAPHS, **options)
        graphed = _train(model)
    assert _graphs(model) == 2
    return [plain, graphed]


def _router() -> list[tuple[list[float], dict[str, Tensor]]]:
    """Router and preprocessing in a graph, the experts outside, what follows in another graph."""
    plain = _train(hybrid_model("moonep"))
    emulated_graphs.enable()
    model = hybrid_model("moonep", cuda_graph_modules=["moe_router", "moe_preprocess"], **GRAPHS)
    graphed = _train(model)
    assert _graphs(model) == 4
    return [plain, graphed]


def _assert_same(answers: list[Any]) -> None:
    for (losses, weights), (again, others) in answers:
        assert again == losses
        assert [name for name, w in weights.items() if not torch.equal(w, others[name])] == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_fusion": True},
        {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_overlap": True},
    ],
    ids=str,
)
def test_whole_layers(options: dict[str, Any]) -> None:
    _assert_same(run_ranks(2, _whole_layers, options, timeout=100))


def test_router_and_preprocessing() -> None:
    _assert_same(run_ranks(2, _router, timeout=100))
