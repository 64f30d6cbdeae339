"""Features of Megatron's around the experts, in a small GPT-MoE that Megatron's own loop trains.

Every variant is trained under alltoall and under moonep: losses of all steps, and all weights
behind them, must agree.
"""

from typing import Any

import pytest
import torch
from gpt import MTP_NEEDS_TE, SEQUENCE, Trainer, build, global_parameters, sequences
from megatron.core import parallel_state
from ranks import Layout, run_ranks
from test_training import _train
from torch import Tensor, nn

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


def _train_both(variants: list[dict[str, Any]], overlap: bool) -> list[list[Trained]]:
    return [[_train(d, overlap, options) for d in ("alltoall", "moonep")] for options in variants]


def assert_same_training(name: str, theirs: Trained, ours: Trained) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=2e-5), name
    assert ours[1].keys() == theirs[1].keys()
    for parameter, weight in theirs[1].items():
        off = (ours[1][parameter] - weight).norm() / weight.norm()
        assert off < 2e-4, f"{name}: {parameter} is off by {off:.1e}"


def check(
    variants: dict[str, dict[str, Any]], layout: Layout, *, overlap: bool = False
) -> list[Trained]:
    """Train every variant under both dispatchers; what moonep's rank 0 gave of each."""
    all_options = list(variants.values())
    answers = run_ranks(4, _train_both, all_options, overlap, layout=layout, timeout=120)
    for rank in answers:
        for name, (theirs, ours) in zip(variants, rank, strict=True):
            assert_same_training(name, theirs, ours)
    return [both[1] for both in answers[0]]


def _varying_step(data: Any, model: nn.Module) -> tuple[Tensor, Any]:
    """A forward step over one numbered sequence, cut to the length that comes with it."""
    number, length = next(data)
    whole = sequences([number])
    tokens, positions, labels = (whole[k][:, :length] for k in ("tokens", "positions", "labels"))
    output = model(tokens, positions, None, labels=labels)
    return output, lambda out: (out.mean(), {"loss": out.mean().detach()})


def _train_on_lengths(steps: int) -> list[Trained]:
    """A few steps of microbatches whose lengths differ in a step and between ranks."""
    found = []
    for dispatcher in ("alltoall", "moonep"):
        trainer = Trainer(build(dispatcher, variable_seq_lengths=True))
        trainer.forward_step = _varying_step
        losses = []
        for step in range(steps):
            seed = 10 * step + parallel_state.get_data_parallel_rank()
            g = torch.Generator().manual_seed(seed)
            lengths = torch.randint(1, SEQUENCE + 1, (3,), generator=g).tolist()
            losses += trainer.step([(seed + m, length) for m, length in enumerate(lengths)])
        weights = global_parameters(trainer.model.module)
        found.append((losses, {name: weight.detach().clone() for name, weight in weights.items()}))
    return found


def test_lengths_that_vary() -> None:
    """PP=2 x EP=2, with the stages telling each other the shapes."""
    for theirs, ours in run_ranks(4, _train_on_lengths, 3, layout=Layout(ep=2, pp=2)):
        assert_same_training("lengths", theirs, ours)


def _train_virtual_pipeline(overlap: bool) -> list[Trained]:
    """Two chunks of two layers on each of two stages; four microbatches a step."""
    found = []
    options = {"num_layers": 8, "virtual_pipeline_model_parallel_size": 2}
    for dispatcher in ("alltoall", "moonep", "moonep"):
        chunks = [build(dispatcher, vp_stage=stage, **options) for stage in range(2)]
        trainer = Trainer(*chunks, overlap=overlap)
        first = 10 * parallel_state.get_data_parallel_rank()
        losses = []
        for step in range(2):
            numbers = range(100 * step + first, 100 * step + first + 4)
            losses += trainer.step([(number,) for number in numbers])
        if overlap:
            for chunk in trainer.chunks:
                chunk.start_param_sync(force_sync=True)
        weights: dict[str, Tensor] = {}
        for chunk in chunks:
            weights |= {n: w.detach().clone() for n, w in global_parameters(chunk).items()}
        found.append((losses, weights))
    return found


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_virtual_pipeline(overlap: bool) -> None:
    """PP=2 x VPP=2 x EP=2, interleaved; twice the same bits."""
    layout = Layout(ep=2, pp=2, vpp=2)
    for theirs, ours, again in run_ranks(4, _train_virtual_pipeline, overlap, layout=layout):
        assert_same_training("virtual pipeline", theirs, ours)
        assert ours[0] == again[0]
        assert all(torch.equal(weight, again[1][name]) for name, weight in ours[1].items())


MTP: dict[str, dict[str, Any]] = {
    "one layer used twice": {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
    "one layer used twice, recomputed": RECOMPUTED
    | {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
}


@pytest.mark.skipif(MTP_NEEDS_TE, reason="this Megatron builds the layer with Transformer Engine")
def test_repeated_prediction_layer() -> None:
    """Two passes of one layer, and so two plans, before its backward; DDP overlapped."""
    check(MTP, Layout(ep=2), overlap=True)


def test_routers() -> None:
    check(ROUTERS, Layout(ep=2))


def test_shared_experts() -> None:
    """Overlapped or not, they are the same function."""
    trained = check(SHARED_EXPERTS | {"plain": SHARED}, Layout(ep=2))
    assert trained[0][0] == pytest.approx(trained[-1][0], rel=2e-5)
