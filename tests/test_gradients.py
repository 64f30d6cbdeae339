"""Where weight gradients end: every way that Megatron keeps, reduces and applies them.

The duplicates' share must be in the home gradient before DDP's hook fires, in every microbatch; a
wrong place drops it without any error, so each way is held to the dense reference.
"""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, batch
from compare import assert_same_bits, check
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from moe import build, expert_parameters, run_case, stacked, wrap
from ranks import Layout, run_ranks
from reference import Expert, error
from torch import Tensor

OVERLAP = (("overlap_grad_reduce", True), ("bucket_size", 1))
DISTRIBUTED = (*OVERLAP, ("use_distributed_optimizer", True), ("overlap_param_gather", True))
SKEWED = ("hot_rank", "last_rank", "hot_expert")


@pytest.mark.parametrize("grads", ["plain", "main_grad", "fused", "bf16_main_grad"])
def test_every_place_of_gradients(grads: str) -> None:
    """Three microbatches in flight, in every form of weights."""
    dtypes = (torch.bfloat16,) if grads == "bf16_main_grad" else (torch.float32, torch.bfloat16)
    check(
        [
            Case(
                name=f"{grads} {form} {dtype} {dict(ddp)}",
                grads=grads,
                form=form,
                dtype=dtype,
                routing=SKEWED,
                ddp=ddp,
                hidden=32,
                ffn=32,
                tokens=((48, 48),) * 3,
            )
            for form in ("sequential", "grouped", "single")
            for dtype in dtypes
            for ddp in (((), OVERLAP) if grads != "plain" else ((),))
        ]
    )


def test_every_place_of_gradients_of_biases() -> None:
    """Autograd brings them, whatever becomes of the weights'."""
    check(
        [
            Case(
                name=f"{grads} {form} {dict(ddp)}",
                ranks=4,
                ep=2,
                expert=Expert(biased=True),
                grads=grads,
                form=form,
                routing=SKEWED,
                ddp=ddp,
                moonep=(("slots", slots),),
            )
            for grads, form, ddp, slots in (
                ("main_grad", "sequential", OVERLAP, 1),
                ("main_grad", "grouped", (), 4),
                ("fused", "grouped", OVERLAP, 4),
                ("fused", "single", OVERLAP, 2),
            )
        ]
    )


@pytest.mark.parametrize("grads", ["main_grad", "fused"])
def test_one_rank_has_no_foreign_experts(grads: str) -> None:
    """At EP=1 expert weights share the buffers of the dense ones."""
    check([Case(name=grads, ranks=1, grads=grads, ddp=OVERLAP, routing=SKEWED)])


def test_fused_into_bf16_main_grad() -> None:
    reduce_in_bf16 = (("grad_reduce_in_fp32", False), *OVERLAP)
    check(
        [
            Case(
                name=form,
                grads="fused",
                dtype=torch.bfloat16,
                form=form,
                routing=SKEWED,
                ddp=reduce_in_bf16,
                hidden=32,
                ffn=32,
                tokens=((48, 48),) * 3,
            )
            for form in ("sequential", "single")
        ]
    )


def test_fused_with_few_slots() -> None:
    """Several waves add into one ``main_grad``."""
    check(
        [
            Case(
                name=f"B={slots}",
                ranks=3,
                experts=12,
                grads=grads,
                ddp=OVERLAP,
                routing=SKEWED,
                moonep=(("slots", slots),),
            )
            for slots in (1, 2)
            for grads in ("fused", "main_grad")
        ]
    )


@pytest.mark.parametrize("grads", ["main_grad", "fused"])
def test_expert_data_parallel(grads: str) -> None:
    """EP=2 x EDP=2: both copies of an expert end with the sum over all four ranks."""
    check(
        [
            Case(
                name=f"EP=2 EDP=2 {dict(ddp)}",
                ranks=4,
                ep=2,
                grads=grads,
                ddp=ddp,
                routing=SKEWED,
                tokens=((24, 5, 0, 24), (3, 24, 24, 7), (24,) * 4),
            )
            for ddp in ((), OVERLAP)
        ]
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step: its output [m*s,1,H], and the home weights that its forward used."""

    output: Tensor
    fc1: Tensor
    fc2: Tensor


def test_optimizer_steps_equal_those_of_alltoall() -> None:
    """DDP and the distributed optimizer, each with its overlaps, EP=2 x EDP=2.

    With ``overlap_param_gather`` a weight is whole only after the hooks that forward runs: the
    outputs of every step show that ours ran before weights were used or pushed.
    """
    base = Case(name="", ranks=4, ep=2, routing=SKEWED, grads="main_grad")
    cases = [
        dataclasses.replace(
            base, name=f"{grads} {form} {dict(ddp)}", ddp=ddp, grads=grads, form=form
        )
        for grads, form in (("main_grad", "sequential"), ("fused", "grouped"))
        for ddp in (OVERLAP, (("use_distributed_optimizer", True),), DISTRIBUTED)
    ]
    biased = Expert(biased=True)
    cases.append(dataclasses.replace(cases[-1], name="bf16", dtype=torch.bfloat16))
    cases.append(dataclasses.replace(cases[2], name="biased", expert=biased))
    for rank in run_ranks(4, _train, cases, 4, layout=Layout(ep=2, expert_tp=1), timeout=120):
        for case, trained in zip(cases, rank, strict=True):
            close = 2e-5 if case.dtype == torch.float32 else 2e-2
            steps = list(zip(trained["moonep"], trained["alltoall"], strict=True))
            for number, (ours, theirs) in enumerate(steps):
                for name in ("output", "fc1", "fc2"):
                    off = error(getattr(ours, name), getattr(theirs, name).double())
                    assert off < close, f"{case.name}: {name} of step {number} is off by {off:.1e}"
            moved = error(steps[-1][0].fc1, steps[0][0].fc1.double())
            assert moved > 5 * close, "the steps are too small to show anything"


def _train(cases: list[Case], steps: int) -> list[dict[str, list[Step]]]:
    return [{d: _train_one(case, d, steps) for d in ("alltoall", "moonep")} for case in cases]


def _train_one(case: Case, dispatcher: str, steps: int) -> list[Step]:
    layer = build(case, dispatcher)
    model = wrap(layer, case)
    options = dict(case.ddp)
    # A large epsilon keeps Adam smooth: without it tiny gradients would be blown up to signs.
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.05,
        adam_eps=0.1,
        weight_decay=0.0,
        clip_grad=0.0,
        bf16=case.dtype == torch.bfloat16,
        params_dtype=case.dtype,
        use_distributed_optimizer=bool(options.get("use_distributed_optimizer")),
        overlap_param_gather=bool(options.get("overlap_param_gather")),
    )
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    return [_step(case, layer, model, optimizer) for _ in range(steps)]


def _step(case: Case, layer: torch.nn.Module, model: torch.nn.Module, optimizer: Any) -> Step:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    last, outputs = len(case.routing) - 1, []
    for m in range(last + 1):
        part = batch(case, m, dist.get_rank())
        layer.router.microbatch = m
        with model.no_sync() if m < last else nullcontext():
            outputs.append(model(part.tokens_sH[:, None])[0])
            outputs[m].backward(part.grad_sH[:, None])
    model.finish_grad_sync()
    fc1, fc2 = (stacked([p.data.clone() for p in fc]) for fc in expert_parameters(layer))
    assert optimizer.step()[0]
    return Step(output=torch.cat(outputs).detach(), fc1=fc1, fc2=fc2)


def test_recompute_moe() -> None:
    """Selective recompute of the layer gives the bits of no recompute."""
    cases = [
        Case(name=f"{dtype} {grads}", ranks=3, experts=6, routing=SKEWED, dtype=dtype, grads=grads)
        for dtype in (torch.float32, torch.bfloat16)
        for grads in ("plain", "fused")
    ]
    for rank in run_ranks(3, _with_and_without_recompute, cases):
        for plain, again in rank:
            assert_same_bits([plain], [again])


RECOMPUTE = (("recompute_granularity", "selective"), ("recompute_modules", ["moe"]))


def _with_and_without_recompute(cases: list[Case]) -> list[list[SimpleNamespace]]:
    return [
        [run_case(c, "moonep") for c in (case, dataclasses.replace(case, config=RECOMPUTE))]
        for case in cases
    ]


def test_plan_bitwise_on_recompute() -> None:
    """Recompute plans anew, and gets the plan of the forward pass of the same microbatch."""
    for hashes in run_ranks(3, _plan_hashes):
        assert len(hashes) == 6
        assert hashes[:3] == hashes[3:]
        assert len(set(hashes)) == 3


def _plan_hashes() -> list[int]:
    from moonep_megatron.backends import collective
    from moonep_megatron.plan import plan_hash

    plain, hashes = collective.make_plan, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        plan = plain(*args, **kwargs)
        hashes.append(plan_hash(plan))
        return plan

    collective.make_plan = noted
    case = Case(name="plans", ranks=3, experts=6, routing=SKEWED, config=RECOMPUTE)
    run_case(case, "moonep")
    return hashes
