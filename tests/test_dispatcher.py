"""The dispatcher alone, under Megatron's six methods, and expert ids that no routing map has."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, all_ranks, batch, weights
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from moe import build, expert_parameters, gradient, home_experts, stacked, transformer_config
from ranks import Layout, RankError, run_ranks
from reference import dense_moe, error
from torch import Tensor, nn
from user_case_ranks import outputs_with_nan_token

HIDDEN = 16


def _stand_alone(case: Case, max_tokens: int) -> Any:
    """moonep's dispatcher on its own; the order of home experts is the one of their ids."""
    from moonep_megatron import MoonEPConfig, enable
    from moonep_megatron.backends import make_backend
    from moonep_megatron.dispatcher import MoonEPTokenDispatcher

    settings = MoonEPConfig(max_tokens=max_tokens, **dict(case.moonep))
    enable(settings)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    n = case.experts // groups.ep.size()
    return MoonEPTokenDispatcher(
        transformer_config(case, "moonep"),
        groups,
        backend=make_backend(settings, groups.ep, case.experts),
        home_order_n=torch.arange(n, dtype=torch.int32) + groups.ep.rank() * n,
    )


def _permute(dispatcher: Any, hidden: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
    rows, probs = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    return dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, probs))


def _unpermute(dispatcher: Any, rows: Tensor) -> Tensor:
    return dispatcher.combine_postprocess(
        dispatcher.token_combine(dispatcher.combine_preprocess(rows))
    )


def _restored(tp: int, ep: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Experts that do nothing and weights 1/K: (result, expected) of values and gradients."""
    case = Case(name="", ep=ep, tp=tp, experts=8, dtype=dtype)
    dispatcher = _stand_alone(case, max_tokens=6 * 4)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    router = TopKRouter(transformer_config(case, "alltoall"), pg_collection=groups)
    nn.init.normal_(router.weight)
    g = torch.Generator().manual_seed(dist.get_rank())
    hidden = torch.randn(6, 4, HIDDEN, generator=g).to(dtype).requires_grad_()
    probs, routing_map = router(hidden)
    rows, counts, row_probs = _permute(
        dispatcher, hidden, torch.full_like(probs, 1 / case.topk), routing_map
    )
    assert len(rows) == len(row_probs) == 24 * case.topk, "the number of rows is not static"
    assert counts.sum() == 24 * case.topk, "the rows are not balanced"
    output = _unpermute(dispatcher, (rows * row_probs[:, None]).to(dtype))
    output.backward(hidden.detach())
    return [(output.detach(), hidden.detach()), (hidden.grad, hidden.detach())]


@pytest.mark.parametrize("tp, ep", [(1, 1), (1, 8), (4, 2), (8, 1), (2, 4)])
def test_idle_experts_give_the_tokens_back(tp: int, ep: int) -> None:
    """Megatron's own test of a dispatcher: combine undoes dispatch, and so does its backward."""
    world = max(tp * ep, 1) if tp > 1 else ep
    layout = Layout(tp=tp, ep=ep, expert_tp=1)
    for dtype in (torch.float32, torch.bfloat16):
        for rank in run_ranks(world, _restored, tp, ep, dtype, layout=layout):
            for actual, expected in rank:
                torch.testing.assert_close(actual, expected)


def _rows_of(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Expert, source rank, token and probability of every row computed here."""
    dispatcher = _stand_alone(case, max_tokens=30)
    part = batch(case, 0, dist.get_rank())
    label = torch.zeros(len(part.ids_sK), 1, HIDDEN)
    label[:, 0, 0] = dist.get_rank()
    label[:, 0, 1] = torch.arange(len(label))
    rows, counts, probs = _permute(
        dispatcher, label, part.dense_probs(case.experts), part.routing_map(case.experts)
    )
    assert len(rows) == len(probs) == 30 * case.topk
    plan = dispatcher.route.plan
    experts = plan.group_expert_RG[dist.get_rank()].long().repeat_interleave(counts)
    real = len(experts)
    return experts, rows[:real, 0].long(), rows[:real, 1].long(), probs[:real].detach()


def test_every_entry_is_computed_once_by_its_expert() -> None:
    """Rows carry the label of their token: each choice arrives once, with its own probability."""
    for routing in ("zipf", "hot_rank", "uniform"):
        tokens = ((30, 0, 17),)
        case = Case(name=routing, ranks=3, experts=12, topk=3, tokens=tokens, routing=(routing,))
        found = {}
        for experts, sources, numbers, probs in run_ranks(3, _rows_of, case):
            keys = zip(experts.tolist(), sources.tolist(), numbers.tolist(), strict=True)
            for key, prob in zip(keys, probs.tolist(), strict=True):
                assert key not in found, "an entry is computed twice"
                found[key] = prob
        wanted = {}
        for rank in range(3):
            part = batch(case, 0, rank)
            for token, (ids, probs) in enumerate(zip(part.ids_sK, part.probs_sK, strict=True)):
                for expert, prob in zip(ids.tolist(), probs.tolist(), strict=True):
                    wanted[expert, rank, token] = prob
        assert found == wanted


def _tail_of_nans() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and input gradient, with and without NaN in the rows beyond the sum of counts."""
    case = Case(name="", ranks=3, experts=6, tokens=((9, 2, 4),), routing=("hot_rank",))
    part = batch(case, 0, dist.get_rank())
    found = []
    for tail in (0.0, torch.nan):
        dispatcher = _stand_alone(case, max_tokens=12)
        hidden = part.tokens_sH[:, None].clone().requires_grad_()
        rows, counts, probs = _permute(
            dispatcher, hidden, part.dense_probs(case.experts), part.routing_map(case.experts)
        )
        beyond = torch.arange(len(rows)) >= counts.sum()
        assert beyond.any()
        output = _unpermute(dispatcher, torch.where(beyond[:, None], tail, rows * probs[:, None]))
        output.backward(part.grad_sH[:, None])
        found += [output.detach(), hidden.grad]
    return tuple(found)


def test_rows_beyond_the_counts_are_not_read() -> None:
    for plain, plain_grad, poisoned, poisoned_grad in run_ranks(3, _tail_of_nans):
        assert torch.equal(plain, poisoned)
        assert torch.equal(plain_grad, poisoned_grad)


def test_tensor_parallel_experts_are_refused_by_flag() -> None:
    with pytest.raises(RankError, match="--expert-tensor-parallel-size 1"):
        run_ranks(2, _build_with_expert_tp, layout=Layout(tp=2))


def _build_with_expert_tp() -> None:
    build(Case(name="", ep=1, tp=2, config=(("expert_tensor_parallel_size", 2),)), "moonep")


def _by_ids(case: Case, id_dtype: torch.dtype) -> dict[str, Any]:
    """One pass of a layer that starts from ids; the layer's own steps follow."""
    layer = build(case, "moonep")
    part = batch(case, 0, dist.get_rank())
    hidden = part.tokens_sH[:, None].clone().requires_grad_()
    probs = part.probs_sK.clone().requires_grad_()
    rows = layer.token_dispatcher.route_ids(hidden, part.ids_sK.to(id_dtype))
    sums, _ = layer.routed_experts_compute(*layer.dispatch(rows, probs))
    output = layer.postprocess(layer.combine(sums), None)
    output.backward(part.grad_sH[:, None])
    fc1, fc2 = (stacked([gradient(p) for p in fc]) for fc in expert_parameters(layer))
    return {
        "own": home_experts(layer),
        "output": output.detach()[:, 0],
        "fc1": fc1,
        "fc2": fc2,
        "tokens": hidden.grad[:, 0],
        "probs": probs.grad,
    }


def _check_ids(case: Case, id_dtype: torch.dtype) -> None:
    whole = all_ranks(case, 0)
    dense = dense_moe(
        case.expert, whole.tokens_sH, whole.ids_sK, whole.probs_sK, *weights(case), whole.grad_sH
    )
    answers = run_ranks(case.ranks, _by_ids, case, id_dtype)
    exact = {
        "output": dense.output_TH,
        "tokens": dense.grad_tokens_TH,
        "probs": dense.grad_probs_TK,
        "fc1": dense.grad_fc1_EIH,
        "fc2": dense.grad_fc2_EHF,
    }
    for name, value in exact.items():
        found = torch.cat([answer[name] for answer in answers])
        # alltoall cannot run these: in fp64 the order of sums leaves a few ulps.
        assert error(found, value) < 1e-14, f"{case.name}: {name}"


def _odd_ids(ranks: int, topk: int, routing: str) -> Case:
    return Case(
        name=f"{routing} R={ranks} K={topk}",
        ranks=ranks,
        experts=12,
        topk=topk,
        routing=(routing,),
        tokens=((20, 7, 11)[:ranks],),
        dtype=torch.float64,
        probs_dtype=torch.float64,
    )


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_dup_topk(id_dtype: torch.dtype) -> None:
    """One expert several times in a token, as a router over NaN may choose: as many choices."""
    _check_ids(_odd_ids(3, 4, "repeats"), id_dtype)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_minus_one_ids(id_dtype: torch.dtype) -> None:
    """No choice: nothing is sent or counted for it, and its probability has no gradient."""
    for ranks, topk in ((3, 2), (2, 8)):
        _check_ids(_odd_ids(ranks, topk, "gaps"), id_dtype)


def test_nan_logits() -> None:
    """A token of NaNs is NaN at the end, and no other token notices."""
    case = Case(name="", ranks=2, experts=8, dtype=torch.float64)
    for clean, poisoned in run_ranks(2, outputs_with_nan_token, case):
        others = torch.arange(len(clean)) != 3
        assert poisoned[3].isnan().all()
        torch.testing.assert_close(poisoned[others], clean[others], rtol=1e-12, atol=1e-12)


def test_ids_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(RankError, match="--moe-router-topk"):
        run_ranks(1, _ids_of_three_columns)


def _ids_of_three_columns() -> None:
    dispatcher = _stand_alone(Case(name="", ranks=1, topk=2), max_tokens=4)
    dispatcher.route_ids(torch.zeros(4, 1, HIDDEN), torch.zeros(4, 3, dtype=torch.int32))
