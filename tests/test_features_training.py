"""Features of Megatron's around the experts, in a small GPT-MoE that Megatron's own loop trains.

Every variant is trained under alltoall and under moonep: losses of all steps, and all weights
behind them, must agree.
"""

from typing import Any

import pytest
from ranks import Layout, run_ranks
from test_training import _train
from torch import Tensor

Trained = tuple[list[float], dict[str, Tensor]]
SHARED = {"moe_shared_expert_intermediate_size": 20}
OVERLAPPED = SHARED | {"moe_shared_expert_overlap": True}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}

ROUTERS: dict[str, dict[str, Any]] = {
    "losses of a sequence and of all ranks": {
        "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss", "aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.05, 0.1],
        "moe_z_loss_coeff": 0.01,
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    "groups of experts": {
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 1.7,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
    },
    "softmax before the choice": {"moe_router_pre_softmax": True},
}
SHARED_EXPERTS: dict[str, dict[str, Any]] = {
    "overlapped": OVERLAPPED,
    "overlapped, gated": OVERLAPPED | {"moe_shared_expert_gate": True},
    "overlapped, recomputed": OVERLAPPED | RECOMPUTED,
    "gated, recomputed": SHARED
    | {"moe_shared_expert_gate": True}
    | {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]},
}


def _train_both(variants: list[dict[str, Any]], overlap: bool = False) -> list[list[Trained]]:
    return [[_train(d, overlap, options) for d in ("alltoall", "moonep")] for options in variants]


def check(variants: dict[str, dict[str, Any]], layout: Layout, world: int = 4) -> list[Any]:
    """Train every variant under both dispatchers; what moonep's rank 0 gave of each."""
    answers = run_ranks(world, _train_both, list(variants.values()), layout=layout, timeout=120)
    for rank in answers:
        for name, ((theirs, their_weights), (ours, our_weights)) in zip(
            variants, rank, strict=True
        ):
            assert ours == pytest.approx(theirs, rel=2e-5), name
            assert our_weights.keys() == their_weights.keys()
            for parameter, weight in their_weights.items():
                off = (our_weights[parameter] - weight).norm() / weight.norm()
                assert off < 2e-4, f"{name}: {parameter} is off by {off:.1e}"
    return [both[1] for both in answers[0]]


def test_routers() -> None:
    check(ROUTERS, Layout(ep=2))


def test_shared_experts() -> None:
    """Overlapped or not, they are the same function."""
    trained = check(SHARED_EXPERTS | {"plain": SHARED}, Layout(ep=2))
    assert trained[0][0] == pytest.approx(trained[-1][0], rel=2e-5)
