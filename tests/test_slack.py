"""Plans within a slack: what every rank computes, what it saves, and whole layers."""

import itertools
from fractions import Fraction

import pytest
import torch
from cases import Case
from compare import check
from exact_plan import best_of_all
from hypothesis import example, given, settings
from hypothesis import strategies as st
from moe import build, run_layer
from ranks import run_ranks
from routings import LOADS, check_plan, lenient, random_counts, routings

from moonep_megatron.bounds import bounds
from moonep_megatron.caps import SLACK_UNIT, caps, most_rows, slack_parts
from moonep_megatron.plan import PLANNERS, make_plan, plan_hash
from moonep_megatron.rules import solve
from moonep_megatron.transfers import cost

SLACKS = st.sampled_from([1, 50, 100, 500, 2000, SLACK_UNIT])


def slow_caps(loads: list[int], slack: int) -> list[int]:
    """Sorted lists and fractions: the largest surplus to the roomiest rank, one at a time."""
    mean = -(-sum(loads) // len(loads))
    high = max(mean, int(Fraction(sum(loads), len(loads)) * (1 + Fraction(slack, 10_000))))
    over = sorted((high - load, d) for d, load in enumerate(loads) if load > high)
    under = sorted((-min(high - load, mean), d) for d, load in enumerate(loads) if load < high)
    found = list(loads)
    while over:
        (minus_surplus, h), (minus_room, d) = over.pop(0), under.pop(0)
        tiles = -(minus_surplus // 128) * 128
        whole = tiles + minus_surplus <= high - mean and tiles <= -minus_room
        rows = min(tiles if whole else -minus_surplus, -minus_room)
        found[h], found[d] = found[h] - rows, found[d] + rows
        if rows < -minus_surplus:
            over.append((minus_surplus + rows, h))
        under.append((minus_room + rows, d))
        over.sort()
        under.sort()
    return found


@settings(lenient, max_examples=300)
@given(
    loads=st.lists(st.sampled_from([0, 1, 5, 99, 128, 700, 1000, 5000]), min_size=1, max_size=40),
    slack=SLACKS,
)
@example(loads=[1000, 0, 0, 0, 0, 0, 0, 0], slack=1)
@example(loads=[1, 1, 0], slack=1)
@example(loads=[0, 0], slack=100)
# one tile more than the surplus leaves a rank less than the mean: not allowed
@example(loads=[1000, 990, 980], slack=100)
def test_caps_against_the_slow_reference(loads: list[int], slack: int) -> None:
    found, total, ranks = caps(loads, slack), sum(loads), len(loads)
    assert found == slow_caps(loads, slack)
    assert sum(found) == total
    mean = -(-total // ranks)
    high = max(mean, total * (SLACK_UNIT + slack) // (SLACK_UNIT * ranks))
    for load, cap in zip(loads, found, strict=True):
        assert mean <= cap <= high if load > high else load <= cap <= min(high, load + mean)


@settings(lenient, max_examples=100)
@given(loads=st.lists(st.integers(0, 999), min_size=1, max_size=20))
def test_no_slack_is_an_exact_share(loads: list[int]) -> None:
    assert caps(loads) == [len(range(d, sum(loads), len(loads))) for d in range(len(loads))]


@settings(lenient, max_examples=200)
@given(share=st.integers(0, 2**31), slack=st.integers(0, SLACK_UNIT), ranks=st.integers(1, 64))
def test_buffers_hold_what_a_rank_may_get(share: int, slack: int, ranks: int) -> None:
    """ceil((1 + tau) S K) rows are enough for all rows that R ranks with S*K each may bring."""
    rows = most_rows(share, slack)
    assert rows - 1 < share * Fraction(SLACK_UNIT + slack, SLACK_UNIT) <= rows
    for total in (ranks * share, max(ranks * share - 1, 0)):
        loads = [total] + [0] * (ranks - 1)
        assert max(caps(loads, slack)) <= rows
    assert most_rows(share, 0) == share


@pytest.mark.parametrize("planner", PLANNERS)
@settings(lenient, max_examples=20)
@given(counts=routings(), slack=SLACKS)
@example(counts=random_counts("hot half", 64, 1024, 65536, 0), slack=100)
@example(counts=random_counts("one expert", 63, 63, 65536, 0), slack=100)
@example(counts=random_counts("heavy", 40, 40, 3, 1), slack=100)
def test_plans_within_the_slack(planner: str, counts: torch.Tensor, slack: int) -> None:
    plan = make_plan(counts, planner=planner, slack=slack)
    check_plan(plan, counts, slack=slack)
    ranks, experts = counts.shape
    brought = int(counts.sum(1).max())
    assert max(plan.cap_R.tolist()) <= most_rows(brought, slack), "S*K is the most that one brings"
    loads = counts.sum(0).view(ranks, -1).sum(1).tolist()
    exact = make_plan(counts, planner=planner)
    assert plan.cap_R.tolist() in (caps(loads, slack), exact.cap_R.tolist())
    now, before = ((p.waves(experts // ranks), p.busiest, p.duplicates) for p in (plan, exact))
    assert now <= before, "slack never costs"
    high = max(-(-sum(loads) // ranks), sum(loads) * (10_000 + slack) // 10_000 // ranks)
    if max(loads) <= high:
        assert plan.duplicates == 0, "nobody is above the slack"
    least = bounds(counts.sum(0).tolist(), ranks, slack)
    assert plan.busiest >= least.busiest and plan.duplicates >= least.duplicates


@settings(lenient, max_examples=40)
@given(counts=routings())
def test_slack_zero_is_the_exact_plan(counts: torch.Tensor) -> None:
    assert plan_hash(make_plan(counts, slack=0)) == plan_hash(make_plan(counts))


def test_a_plan_by_hand() -> None:
    """High is 110: rank 0 sheds 30 rows to the roomiest rank, 3; rank 2 is 5 short and stays so."""
    counts = torch.tensor([[100, 40, 60, 50, 85, 10, 55, 0]] + [[0] * 8] * 3)
    exact, plan = (make_plan(counts, planner="pairs", slack=slack) for slack in (0, 1000))
    assert exact.cap_R.tolist() == [100] * 4 and exact.duplicates == 3
    assert plan.cap_R.tolist() == [110, 110, 95, 85] and plan.duplicates == 1
    assert plan.rows_RE[0].tolist() == [70, 40, 0, 0, 0, 0, 0, 0]
    assert plan.rows_RE[3].tolist() == [30, 0, 0, 0, 0, 0, 55, 0]


def test_the_exact_plan_is_kept_where_it_is_cheaper() -> None:
    """Filling a rank up to 9 rows takes two experts of rank 0, an exact share of 7 takes one."""
    homes = [[7, 7, 6], [0, 1, 0], [0, 0, 1]]
    loads = [20, 1, 1]
    assert caps(loads, 3000) == [9, 9, 4]
    prices = [
        cost(3, solve(homes, caps(loads, slack), planner="best", slots=3)[1], 3)
        for slack in (0, 3000)
    ]
    assert prices == [(1, 2, 2), (1, 3, 3)]
    counts = torch.tensor(homes).view(1, 9) * torch.tensor([[1], [0], [0]])
    plan = make_plan(counts, slack=3000)
    assert (plan.cap_R.tolist(), plan.duplicates) == ([8, 7, 7], 2)


@settings(lenient, max_examples=60)
@given(
    shape=st.sampled_from([(2, 1, 12), (2, 2, 9), (3, 1, 9)]),
    slack=st.sampled_from([500, 2000, 5000, SLACK_UNIT]),
    data=st.data(),
)
def test_bounds_within_a_slack_against_brute_force(
    shape: tuple[int, int, int], slack: int, data: st.DataObject
) -> None:
    ranks, homes, rows = shape
    total_E = data.draw(
        st.lists(st.integers(0, rows), min_size=ranks * homes, max_size=ranks * homes)
    )
    most = max(
        -(-sum(total_E) // ranks), sum(total_E) * (SLACK_UNIT + slack) // (SLACK_UNIT * ranks)
    )
    least = bounds(total_E, ranks, slack)
    best_d, best_u, received, sent = best_of_all(total_E, ranks, most)
    assert least.busiest <= best_d and least.duplicates <= best_u
    assert all(a <= b for a, b in zip(least.received, received, strict=True))
    assert all(a <= b for a, b in zip(least.sent, sent, strict=True))


@pytest.mark.parametrize("ranks", [8, 16, 32])
def test_slack_saves_duplicates(ranks: int) -> None:
    """Over many loads together; a single one may need more, for no exact rule is the best."""
    sums = []
    for slack in (0, 50, 200, 1000):
        plans = [
            make_plan(random_counts(load, ranks, ranks * 8, 65536, seed), slack=slack)
            for load, seed in itertools.product(LOADS, range(3))
        ]
        sums.append((sum(p.duplicates for p in plans), sum(p.busiest for p in plans)))
    for name, numbers in zip(("duplicates", "busiest"), zip(*sums, strict=True), strict=True):
        assert list(numbers) == sorted(numbers, reverse=True), f"{name} grow with slack: {numbers}"
    assert sums[-1][0] < 0.9 * sums[0][0]


def test_few_duplicates_are_less_than_a_tile() -> None:
    """Where the slack has room for whole tiles a surplus leaves in them."""
    loads = [66_000 + 37, 65_000, 64_000, 63_000]
    exact, tiled = caps(loads, 0), caps(loads, 100)
    assert (loads[0] - tiled[0]) % 128 == 0 and loads[0] > tiled[0]
    assert sum(tiled) == sum(exact) and tiled[1:3] == loads[1:3]


@pytest.mark.parametrize(("slack", "parts"), [(0, 0), (0.01, 100), (0.0001, 1), (1, 10_000)])
def test_slack_in_parts(slack: float, parts: int) -> None:
    assert slack_parts(slack) == parts


@pytest.mark.parametrize("slack", [-0.1, 1.5, float("nan"), float("inf"), 0.00015])
def test_bad_slack(slack: float) -> None:
    with pytest.raises(ValueError, match=r"slack .* is no number 0\.\.1 in steps of 0\.0001"):
        slack_parts(slack)


def test_bad_slack_of_a_plan() -> None:
    for slack in (-1, 10_001):
        with pytest.raises(ValueError, match=rf"slack {slack} is outside 0\.\.10000"):
            make_plan(torch.ones(2, 4, dtype=torch.int32), slack=slack)


# Whole layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_layers_against_the_dense_reference(ranks: int) -> None:
    """R below, at and above K, several waves, every planner; two microbatches in flight."""
    cases = [
        Case(
            name=f"R={ranks} K={topk} slack {slack} {skew} {planner} B={slots}",
            ranks=ranks,
            experts=4 * ranks,
            topk=topk,
            tokens=((24, *[23] * (ranks - 1)), (0, *[7] * (ranks - 1))),
            routing=(skew, "zipf"),
            moonep=(("slack", slack), ("planner", planner), ("slots", slots), ("check_plan", True)),
        )
        for topk, slack, skew, planner, slots in (
            (2, 0.05, "zipf", "best", 4),
            (3, 0.25, "hot_rank", "pairs", 4),
            (4, 1.0, "last_rank", "chain", 2),
            (1, 0.5, "hot_expert", "peel", 1),
            (2, 0.25, "uniform", "best", 1),
        )
    ]
    check(cases)


def test_rows_are_static_and_hold_the_slack() -> None:
    """N = ceil((1 + slack) S K) rows whatever the router does, and a rank that fills them."""
    for shapes, most, duplicates in run_ranks(2, _shapes_with_slack):
        assert shapes == [(60, 48)] * 3, "grouped and receive rows"
        assert most == 60
        assert duplicates[0] >= 1 > duplicates[1]


def _shapes_with_slack() -> tuple[list[tuple[int, int]], int, list[int]]:
    shapes, rows, duplicates = [], 0, []
    for routing in ("hot_rank", "balanced", "zipf"):
        case = Case(name="", routing=(routing,), moonep=(("slack", 0.25), ("max_tokens", 24)))
        layer = build(case, "moonep")
        exchange = layer.token_dispatcher.backend.exchange
        routes = []
        layer.token_dispatcher.backend.exchange = lambda *args, e=exchange, r=routes: (
            r.append(e(*args)) or r[-1]
        )
        record = run_layer(layer, layer, case, "moonep").records[0]
        rows = max(rows, *record["rows_per_rank"])
        duplicates.append(record["duplicates"])
        shapes.append((routes[0].source_row_N.numel(), routes[0].receive_rows))
    return shapes, rows, duplicates
