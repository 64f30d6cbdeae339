"""The measuring tools measure: the dense reference, the routings, the comparison, the ranks."""

import time

import pytest
import torch
import torch.distributed as dist
from cases import ROUTINGS, Case, all_ranks, batch
from ranks import Failure, RankError, run_ranks
from reference import Expert, assert_as_good, dense_moe
from torch import Tensor

EXPERTS = [
    Expert(),
    Expert(gated=False, activation="squared_relu"),
    Expert(activation="quick_gelu", clamp=0.4, offset=1.0),
    Expert(gated=False, activation="gelu", probs_on_input=True),
]


@pytest.mark.parametrize("expert", EXPERTS, ids=lambda e: e.activation)
def test_gradients_of_the_reference_are_those_of_finite_differences(expert: Expert) -> None:
    g = torch.Generator().manual_seed(0)
    inner = 4 if expert.gated else 2
    draw = [(5, 3), (5, 2), (4, inner, 3), (4, 3, 2), (5, 3)]
    tokens, probs, fc1, fc2, grad = (
        torch.randn(shape, generator=g, dtype=torch.float64) for shape in draw
    )
    ids = torch.tensor([[0, 1], [1, 1], [-1, 3], [-1, -1], [3, 0]])

    def loss(values: list[Tensor]) -> float:
        x, p, w1, w2 = values
        return (dense_moe(expert, x, ids, p, w1, w2, grad).output_TH * grad).sum().item()

    values = [tokens, probs, fc1, fc2]
    dense = dense_moe(expert, tokens, ids, probs, fc1, fc2, grad)
    gradients = (
        dense.grad_tokens_TH,
        dense.grad_probs_TK,
        dense.grad_fc1_EIH,
        dense.grad_fc2_EHF,
    )
    for which, gradient in enumerate(gradients):
        along = torch.randn(values[which].shape, generator=g, dtype=torch.float64)
        step = 1e-6
        up, down = (
            [v + sign * step * along if i == which else v for i, v in enumerate(values)]
            for sign in (1, -1)
        )
        slope = (loss(up) - loss(down)) / (2 * step)
        assert slope == pytest.approx((gradient * along).sum().item(), rel=1e-6, abs=1e-8)


def test_a_choice_of_none_counts_nothing_and_a_repeat_counts_twice() -> None:
    x, fc1, fc2 = torch.ones(1, 2), torch.ones(2, 4, 2), torch.ones(2, 2, 2)
    probs = torch.tensor([[0.5, 0.5]])

    def output(ids: list[int]) -> Tensor:
        return dense_moe(Expert(), x, torch.tensor([ids]), probs, fc1, fc2, x).output_TH

    assert torch.equal(output([-1, -1]), torch.zeros(1, 2, dtype=torch.float64))
    assert torch.equal(output([1, 1]), 2 * output([-1, 1]))


def test_comparison_refuses_a_worse_result_a_nan_and_a_stray_gradient() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    theirs = torch.full((4,), 1 + 1e-5)
    assert_as_good("same", theirs, theirs, exact, torch.float32)
    for bad in (torch.full((4,), 1 + 2e-5), torch.full((4,), torch.nan)):
        with pytest.raises(AssertionError, match="relative error"):
            assert_as_good("worse", bad, theirs, exact, torch.float32)
    with pytest.raises(AssertionError, match="relative error"):
        stray = torch.full((4,), 1e-30)
        assert_as_good("idle expert", stray, torch.zeros(4), 0 * exact, torch.float32)


@pytest.mark.parametrize("name", ROUTINGS)
def test_routings_are_distinct_ascending_and_skewed_as_named(name: str) -> None:
    case = Case(name=name, ranks=6, experts=24, routing=(name,), tokens=((48,) * 6,))
    ids = all_ranks(case, 0).ids_sK
    assert (ids[:, 1:] > ids[:, :-1]).all()
    per_expert = torch.bincount(ids.flatten(), minlength=24)
    per_rank = per_expert.view(6, 4).sum(1)
    expected = {
        "balanced": lambda: per_expert.eq(24).all(),
        "hot_expert": lambda: per_expert[12] == 288,
        "hot_rank": lambda: per_rank[0] == 576,
        "last_rank": lambda: per_rank[5] == 576,
        "two_thirds_idle": lambda: per_rank[:2].sum() == 576 and per_rank.min() == 0,
        "zipf": lambda: per_expert.max() > 3 * per_expert.float().mean(),
        "uniform": lambda: per_expert.max() < 2 * per_expert.float().mean(),
    }
    assert expected[name]()


def test_balanced_generator_is_balanced() -> None:
    """Every rank alone must spread as well: a common start would leave half the ranks idle."""
    case = Case(name="", ranks=4, experts=16, routing=("balanced",), tokens=((8,) * 4,))
    for rank in range(4):
        assert torch.bincount(batch(case, 0, rank).ids_sK.flatten(), minlength=16).eq(1).all()
    case = Case(name="", ranks=4, experts=16, routing=("balanced",), tokens=((2,) * 4,))
    assert torch.bincount(all_ranks(case, 0).ids_sK.flatten(), minlength=16).eq(1).all()


def _sum_of_ranks() -> float:
    value = torch.ones(3) * dist.get_rank()
    dist.all_reduce(value)
    return value[0].item()


def _rank_one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("deliberate")
    dist.barrier()


def _rank_one_sleeps() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_ranks_work_together_and_the_first_failure_is_named() -> None:
    assert run_ranks(3, _sum_of_ranks) == [3.0, 3.0, 3.0]
    with pytest.raises(RankError, match=r"rank 1 raised(?s:.*)deliberate"):
        run_ranks(2, _rank_one_raises)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[1\] gave no answer"):
        run_ranks(2, _rank_one_sleeps, timeout=12)
    assert time.monotonic() - start < 30
    first, second = run_ranks(2, _rank_one_raises, failures=True)
    assert isinstance(second, Failure)
    assert second.message == "deliberate"
    assert isinstance(first, Failure), "a rank whose peer died must not succeed or hang"
