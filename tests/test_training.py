"""A whole GPT-MoE trained by Megatron's own loop: moonep's losses are those of alltoall."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt import MTP_NEEDS_TE, Trainer, build, global_parameters
from ranks import Layout, run_ranks

STEPS = 3
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared experts": {"moe_shared_expert_intermediate_size": 20},
    "auxiliary losses": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.01,
    },
    "expert bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
    },
    "multi-token prediction": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5},
}
if MTP_NEEDS_TE:
    del VARIANTS["multi-token prediction"]
RECOMPUTE: dict[str, dict[str, Any]] = {
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    # Asks for nothing new: the activation is always computed again in backward.
    "moe_act": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
        "moe_grouped_gemm": True,
    },
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def _train(dispatcher: str, overlap: bool, options: dict[str, Any]) -> tuple[list[float], Any]:
    """Losses of a few steps of two microbatches, and the weights after them."""
    trainer = Trainer(build(dispatcher, **options), overlap=overlap)
    rank, found = dist.get_rank(), []
    for step in range(STEPS):
        first = 100 * step + 10 * rank
        found += trainer.step([(first, first + 1), (first + 2, first + 3)])
    if overlap:
        trainer.model.start_param_sync(force_sync=True)
    weights = global_parameters(trainer.model.module)
    return found, {name: weight.detach().clone() for name, weight in weights.items()}


def _train_variants(names: list[str], overlap: bool) -> list[list[tuple[list[float], Any]]]:
    return [[_train(d, overlap, VARIANTS[n]) for d in ("alltoall", "moonep")] for n in names]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_loss_parity_dispatchers(overlap: bool) -> None:
    """EP=2 x EDP=2 with the distributed optimizer; every variant of the layer that is supported."""
    names = ["plain", "shared experts"] if overlap else list(VARIANTS)
    for rank in run_ranks(4, _train_variants, names, overlap, layout=Layout(ep=2)):
        for name, ((theirs, their_weights), (ours, our_weights)) in zip(names, rank, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5), name
            assert min(theirs) < theirs[0] - 0.01, f"{name}: the model does not learn"
            assert our_weights.keys() == their_weights.keys()
            for parameter, theirs_now in their_weights.items():
                off = (our_weights[parameter] - theirs_now).norm() / theirs_now.norm()
                assert off < 2e-4, f"{name}: {parameter} is off by {off:.1e}"


def test_recompute_moe_full() -> None:
    """Selective and full recompute end, after several steps, in the bits of no recompute."""
    for plain, *recomputing in run_ranks(2, _train_recomputing):
        assert len(recomputing) == len(RECOMPUTE)
        for losses, weights in recomputing:
            assert losses == plain[0]
            assert all(torch.equal(weights[name], plain[1][name]) for name in weights)


def _train_recomputing() -> list[tuple[list[float], Any]]:
    return [_train("moonep", False, options) for options in ({}, *RECOMPUTE.values())]


def test_tie_logits_recompute() -> None:
    """A router whose scores are all equal chooses the same experts again in recompute."""
    for plain, again in run_ranks(2, _train_on_ties):
        assert plain == again


def _train_on_ties() -> list[list[float]]:
    found = []
    for options in ({}, RECOMPUTE["moe"]):
        model = build("moonep", **options)
        for name, parameter in model.named_parameters():
            if name.endswith("router.weight"):
                parameter.data.zero_()
        trainer = Trainer(model)
        found.append([loss for step in range(STEPS) for loss in trainer.step([(step, step + 50)])])
    return found


def test_pipeline_keeps_microbatches_in_flight() -> None:
    """PP=2 x EP=2: several microbatches are between forward and backward on the first stage."""
    answers = run_ranks(4, _train_pipeline, layout=Layout(ep=2, pp=2))
    for (theirs, their_weights), (ours, our_weights), again in answers:
        assert ours == pytest.approx(theirs, rel=2e-5)
        assert again[0] == ours, "bitwise_twice"
        for name, weight in their_weights.items():
            assert (our_weights[name] - weight).norm() < 2e-4 * weight.norm(), name
            assert torch.equal(our_weights[name], again[1][name])


def _train_pipeline() -> list[tuple[list[float], Any]]:
    return [_train(dispatcher, False, {}) for dispatcher in ("alltoall", "moonep", "moonep")]
