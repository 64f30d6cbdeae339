"""Megatron's loop trains the same with its own CUDA graphs over whole layers as without them."""

from typing import Any

import emulated_graphs
import pytest
import torch
from gpt import Trainer, build, global_parameters
from moe import stand_in_for_fused_kernels
from ranks import run_ranks
from strict import strict
from torch import Tensor

WHOLE_LAYERS = {"cuda_graph_impl": "local", "cuda_graph_modules": [], "cuda_graph_warmup_steps": 2}
STEPS = 3


def _train(options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    model = build("moonep", **options)
    trainer, losses = Trainer(model), []
    first = 10 * torch.distributed.get_rank()
    for step in range(STEPS):
        numbers = range(100 * step + first, 100 * step + first + 4)
        losses += trainer.step([numbers[:2], numbers[2:]])
    for layer in model.decoder.layers:
        runners = layer.cudagraph_manager.cudagraph_runners if "cuda_graph_impl" in options else []
        assert all(runner.fwd_graph and runner.bwd_graph for runner in runners)
    return losses, {name: p.detach().clone() for name, p in global_parameters(model).items()}


def _train_twice(options: dict[str, Any]) -> list[tuple[list[float], dict[str, Tensor]]]:
    if "gradient_accumulation_fusion" in options:
        stand_in_for_fused_kernels()
    with strict():
        plain = _train(options)
        emulated_graphs.enable()
        return [plain, _train(options | WHOLE_LAYERS)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_fusion": True},
        {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_overlap": True},
    ],
    ids=str,
)
def test_same_training(options: dict[str, Any]) -> None:
    for (losses, weights), (again, others) in run_ranks(2, _train_twice, options, timeout=100):
        assert again == losses
        assert [name for name, w in weights.items() if not torch.equal(w, others[name])] == []
