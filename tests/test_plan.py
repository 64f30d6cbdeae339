"""The plan and the destinations: properties, a slow independent reference, bad input."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from routings import LOADS, check_plan, lenient, random_counts, random_ids, routings

from moonep_megatron.plan import PLANNERS, Plan, destinations, make_plan, plan_hash

# Properties -----------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", PLANNERS)
@settings(lenient, max_examples=100)
@given(counts=routings())
@example(counts=random_counts("hot half", 64, 1024, 65536, 0))
@example(counts=random_counts("heavy", 63, 63, 65536, 0))
def test_plan_properties(planner: str, counts: torch.Tensor) -> None:
    plan = make_plan(counts, planner=planner)
    check_plan(plan, counts)
    if plan.rule == "chain":
        assert all(len({int(d) for d in receivers_of(plan, h)}) <= 1 for h in range(len(counts)))
    gave_way = planner in ("chain", "trees") and plan.rule == "pairs"
    assert plan.rule == planner or planner == "best" or gave_way


def receivers_of(plan: Plan, home: int) -> torch.Tensor:
    ranks, homes = plan.foreign_expert_Rn.shape
    mine_Rn = (plan.foreign_expert_Rn >= 0) & (plan.foreign_expert_Rn // homes == home)
    return torch.arange(ranks)[mine_Rn.any(1)]


@settings(lenient, max_examples=8)
@given(ranks=st.integers(65, 128), load=st.sampled_from(LOADS), seed=st.integers(0, 99))
def test_plan_properties_beyond_64_ranks(ranks: int, load: str, seed: int) -> None:
    counts = random_counts(load, ranks, ranks * 8, 4096, seed)
    check_plan(make_plan(counts), counts)


@settings(lenient, max_examples=30)
@given(counts=routings(), seed=st.integers(0, 99))
def test_home_order_moves_the_groups_only(counts: torch.Tensor, seed: int) -> None:
    ranks, experts = counts.shape
    draw = np.random.default_rng(seed)
    ids = np.arange(experts).reshape(ranks, -1)
    order = torch.from_numpy(draw.permuted(ids, axis=1)).int()
    plan, plain = make_plan(counts, home_order_Rn=order), make_plan(counts)
    check_plan(plan, counts, order)
    assert torch.equal(plan.rows_RE, plain.rows_RE)


# An independent reference -----------------------------------------------------------------------


def slow_destinations(plan: Plan, ids: list[torch.Tensor]) -> list[list[tuple[int, int]]]:
    """(rank, row) of all entries of all ranks, from lists of free rows."""
    ranks, groups = plan.group_expert_RG.shape
    free: dict[tuple[int, int], list[int]] = {}
    for d, g in itertools.product(range(ranks), range(groups)):
        start, end = plan.group_start_RG1[d, g : g + 2].tolist()
        free[d, int(plan.group_expert_RG[d, g])] = list(range(start, end))
    placed: list[list[tuple[int, int]]] = [[(-1, -1)] * x.numel() for x in ids]
    entries = [
        (r, i, e) for r, x in enumerate(ids) for i, e in enumerate(x.flatten().tolist()) if e >= 0
    ]
    moving = []
    for r, i, e in entries:
        if free.get((r, e)):
            placed[r][i] = (r, free[r, e].pop(0))
        else:
            moving.append((r, i, e))
    for r, i, e in moving:
        d = next(d for d in range(ranks) if free.get((d, e)))
        placed[r][i] = (d, free[d, e].pop(0))
    return placed


@settings(lenient, max_examples=100)
@given(
    ranks=st.integers(1, 16),
    homes=st.integers(1, 12),
    load=st.sampled_from(LOADS),
    rows=st.integers(0, 80),
    choices=st.sampled_from([1, 2, 3, 8]),
    planner=st.sampled_from(PLANNERS),
    seed=st.integers(0, 9999),
)
def test_destinations_against_the_slow_reference(
    ranks: int, homes: int, load: str, rows: int, choices: int, planner: str, seed: int
) -> None:
    counts = random_counts(load, ranks, ranks * homes, rows, seed)
    plan, ids = make_plan(counts, planner=planner), random_ids(counts, choices, seed)
    for r, placed in enumerate(slow_destinations(plan, ids)):
        rank_SK, row_SK = destinations(plan, counts, ids[r], r)
        assert rank_SK.dtype == row_SK.dtype == torch.int32
        assert rank_SK.shape == row_SK.shape == ids[r].shape
        assert (
            list(zip(rank_SK.flatten().tolist(), row_SK.flatten().tolist(), strict=True)) == placed
        )


@settings(lenient, max_examples=25)
@given(counts=routings(most_rows=500), seed=st.integers(0, 99))
@example(counts=random_counts("zipf", 64, 1024, 500, 1), seed=1)
def test_destinations_fill_every_row_once(counts: torch.Tensor, seed: int) -> None:
    plan, ids = make_plan(counts), random_ids(counts, 4, seed)
    expert_of_row = [
        plan.group_expert_RG[d].repeat_interleave(plan.group_start_RG1[d].diff())
        for d in range(len(counts))
    ]
    filled = [torch.zeros(int(cap), dtype=torch.int64) for cap in plan.cap_R]
    local = 0
    for r, ids_SK in enumerate(ids):
        rank_SK, row_SK = destinations(plan, counts, ids_SK, r)
        assert torch.equal(rank_SK < 0, ids_SK < 0) and torch.equal(row_SK < 0, ids_SK < 0)
        for d in rank_SK[rank_SK >= 0].unique().tolist():
            there = rank_SK == d
            assert torch.equal(expert_of_row[d][row_SK[there]], ids_SK[there].int())
            filled[d] += torch.bincount(row_SK[there], minlength=len(filled[d]))
        local += int((rank_SK == r).sum())
    assert all((count == 1).all() for count in filled)
    assert local == int(counts.minimum(plan.rows_RE).sum()), "as many stay as can"


# Same on every rank ---------------------------------------------------------------------------


@settings(lenient, max_examples=30)
@given(counts=routings())
def test_the_plan_depends_on_the_counts_alone(counts: torch.Tensor) -> None:
    before = counts.clone()
    reference = plan_hash(make_plan(counts))
    wide = torch.stack([counts, counts + 1], -1)[..., 0]
    for same in (counts.int(), counts.T.contiguous().T, wide):
        plan = make_plan(same)
        assert plan_hash(plan) == reference
    assert torch.equal(counts, before)
    # the plan sees only the totals, so it does not matter which rank brings the rows
    assert plan_hash(make_plan(counts.flip(0))) == reference


def test_the_hash_tells_plans_apart_and_is_the_same_everywhere() -> None:
    counts = torch.tensor([[9, 0, 0, 1], [5, 3, 0, 0]])
    plan = make_plan(counts, planner="pairs")
    assert plan.rows_RE.tolist() == [[6, 3, 0, 0], [8, 0, 0, 1]]
    reference = plan_hash(plan)
    assert reference == 6421367991849819906
    order = torch.tensor([[0, 1], [2, 3]])
    assert 0 <= reference < 2**63
    assert reference != plan_hash(make_plan(counts, planner="pairs", home_order_Rn=order))
    assert reference != plan_hash(make_plan(counts + 1, planner="pairs"))


# Ordinary but degenerate inputs ---------------------------------------------------------------


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    "counts",
    [
        pytest.param(torch.tensor([[3, 0, 5]]), id="one rank"),
        pytest.param(torch.zeros(1, 1, dtype=torch.int32), id="one rank, nothing"),
        pytest.param(torch.zeros(6, 12, dtype=torch.int32), id="no rows at all"),
        pytest.param(torch.full((4, 8), 3), id="balanced"),
        pytest.param(torch.tensor([[0, 0, 0], [4, 1, 9], [1, 1, 1]]), id="a rank with no tokens"),
        pytest.param(torch.eye(8, dtype=torch.int64)[[7] * 4] * 10, id="all rows on one expert"),
        pytest.param(torch.eye(9, dtype=torch.int64)[[0] * 9], id="one row a rank, E = R"),
        pytest.param(torch.tensor([[1, 0, 0, 0, 0]] + [[0] * 5] * 4), id="one row in all"),
        pytest.param(torch.tensor([[0, 0, 2, 0, 1]] * 5), id="odd, not divisible"),
    ],
)
def test_degenerate(counts: torch.Tensor, planner: str) -> None:
    plan, ids = make_plan(counts, planner=planner), random_ids(counts, 2, 0)
    check_plan(plan, counts)
    placed = slow_destinations(plan, ids)
    for r in range(len(counts)):
        rank_SK, row_SK = destinations(plan, counts, ids[r], r)
        assert (
            list(zip(rank_SK.flatten().tolist(), row_SK.flatten().tolist(), strict=True))
            == placed[r]
        )


def test_balanced_routing_moves_nothing() -> None:
    plan = make_plan(torch.full((8, 64), 5))
    assert plan.duplicates == plan.busiest == plan.waves(1) == 0


def test_no_tokens_at_all_and_int32_ids() -> None:
    counts = torch.tensor([[0, 0], [1, 1]])
    plan = make_plan(counts)
    empty = torch.empty(0, 4, dtype=torch.int32)
    assert [x.shape for x in destinations(plan, counts, empty, 0)] == [empty.shape] * 2
    ids = torch.tensor([[1, -1, 0]], dtype=torch.int32)
    for wide, narrow in zip(
        destinations(plan, counts, ids.long(), 1),
        destinations(plan, counts.int(), ids, 1),
        strict=True,
    ):
        assert torch.equal(wide, narrow)


def test_totals_beyond_int32() -> None:
    """Every rank can hold its rows, the expert's total alone needs 64 bits."""
    counts = torch.zeros(8, 16, dtype=torch.int32)
    counts[:, 3] = 2**30
    check_plan(make_plan(counts), counts.long())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_same_plan_and_destinations_on_a_gpu() -> None:
    counts = random_counts("zipf", 16, 128, 500, 0)
    ids, gpu = random_ids(counts, 4, 0), counts.cuda()
    plan, there = make_plan(counts), make_plan(gpu)
    assert there.rows_RE.is_cuda and plan_hash(plan) == plan_hash(there)
    for r in range(16):
        moved = destinations(there, gpu, ids[r].cuda(), r)
        assert all(
            torch.equal(a, b.cpu())
            for a, b in zip(destinations(plan, counts, ids[r], r), moved, strict=True)
        )


# Bad input ------------------------------------------------------------------------------------

GOOD = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (GOOD[0], r"counts_RE has shape \[4\]"),
        (GOOD[None], r"counts_RE has shape \[1, 2, 4\]"),
        (GOOD[:0], r"counts_RE has shape \[0, 4\]"),
        (GOOD[:, :3], r"3 experts on 2 ranks"),
        (GOOD[:, :1], r"1 experts on 2 ranks"),
        (GOOD - 2, r"counts_RE holds -1\.\.2"),
        (GOOD * 2**31, r"counts_RE holds 2147483648\.\.8589934592"),
        (GOOD.float(), r"counts_RE has dtype torch.float32"),
        (GOOD * float("nan"), r"counts_RE has dtype torch.float32"),
        (GOOD > 1, r"counts_RE has dtype torch.bool"),
        (torch.full((2, 4), 2**30), r"gives a rank 4294967296 rows"),
    ],
)
def test_bad_counts(counts: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(counts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, r"slots 0 is outside 1\.\.2"),
        ({"slots": 3}, r"slots 3 is outside 1\.\.2"),
        ({"planner": "fastest"}, r"planner 'fastest' is unknown: use one of best, pairs"),
        ({"home_order_Rn": torch.tensor([[0, 1]])}, r"home_order_Rn has shape \[1, 2\]"),
        ({"home_order_Rn": torch.tensor([[0, 0], [2, 3]])}, r"home_order_Rn .* a permutation"),
        ({"home_order_Rn": torch.tensor([[2, 3], [0, 1]])}, r"home_order_Rn .* a permutation"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(GOOD, **options)
    with pytest.raises(ValueError, match="slots 9 is outside"):
        make_plan(GOOD).waves(9)


@pytest.mark.parametrize(
    ("ids", "rank", "message"),
    [
        (torch.tensor([[0, 4]]), 0, r"ids_SK holds 0\.\.4: ids are 0\.\.3, or -1"),
        (torch.tensor([[0, -2]]), 0, r"ids_SK holds -2\.\.0"),
        (torch.tensor([[2**40, 0]]), 0, r"ids_SK holds 0\.\.1099511627776"),
        (torch.tensor([[0, 1]]), 0, r"ids_SK of rank 0 do not have the counts in counts_RE\[0\]"),
        (torch.tensor([[0.0]]), 0, r"ids_SK has .* torch.float32"),
        (torch.tensor([0]), 0, r"ids_SK has shape \[1\]"),
        (torch.tensor([[0]]), 2, r"rank 2 is outside 0\.\.1"),
    ],
)
def test_bad_ids(ids: torch.Tensor, rank: int, message: str) -> None:
    plan = make_plan(GOOD)
    with pytest.raises(ValueError, match=message):
        destinations(plan, GOOD, ids, rank)
    with pytest.raises(ValueError, match=r"counts_RE has shape \[4, 4\]: the plan has \[2, 4\]"):
        destinations(plan, GOOD.repeat(2, 1), ids, rank % 2)
