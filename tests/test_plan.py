"""The plan: properties, slow independent references, recorded routing, bad input."""

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moonep_megatron.plan import PLANNERS, Plan, destinations, make_plan, plan_hash

ROOT = Path(__file__).parents[1]
ROUTING = ROOT.parent / "shared" / "routing"
LOADS = ("even", "zipf", "heavy", "sparse", "hot rank", "hot half", "last rank", "one expert")

lenient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def weights(load: str, ranks: int, experts: int, draw: np.random.Generator) -> np.ndarray:
    """Relative popularity of each expert."""
    homes = experts // ranks
    by_rank = np.full(ranks, 1e-3)
    if load == "hot rank":
        by_rank[draw.integers(ranks)] = 1
    elif load == "last rank":
        by_rank[-1] = 1
    elif load == "hot half":
        by_rank = np.where(draw.random(ranks) < 0.5, 1.8, 0.2)
    return {
        "even": np.ones(experts),
        "zipf": draw.permutation(1 / np.arange(1, experts + 1)),
        "heavy": np.exp(3 * draw.standard_normal(experts)),
        "sparse": (draw.random(experts) < 0.2) + 1e-9,
        "one expert": np.eye(experts)[draw.integers(experts)],
    }.get(load, np.repeat(by_rank, homes))


def random_counts(load: str, ranks: int, experts: int, rows: int, seed: int) -> torch.Tensor:
    """int64 [R, E]; the rows of the ranks differ, down to none."""
    draw = np.random.default_rng(seed)
    weight_E = weights(load, ranks, experts, draw)
    counts = [
        draw.multinomial(draw.integers(rows + 1), weight_E / weight_E.sum()) for _ in range(ranks)
    ]
    return torch.from_numpy(np.stack(counts))


@st.composite
def routings(draw: st.DrawFn, most_rows: int = 65536) -> torch.Tensor:
    """Counts of up to 64 ranks and 1024 experts."""
    ranks = draw(st.integers(1, 64))
    homes = draw(st.integers(1, 1024 // ranks))
    rows = min(most_rows, draw(st.sampled_from([0, 3, 50, 1000, 65536])))
    return random_counts(
        draw(st.sampled_from(LOADS)), ranks, ranks * homes, rows, draw(st.integers(0, 999))
    )


def random_ids(counts_RE: torch.Tensor, choices: int, seed: int) -> list[torch.Tensor]:
    """ids [S_r, K] of every rank with these counts: shuffled, so ids repeat, and -1 fills up."""
    draw = np.random.default_rng(seed)
    ids = []
    for count_E in counts_RE.numpy():
        flat = np.repeat(np.arange(len(count_E)), count_E)
        tokens = -(-len(flat) // choices) + draw.integers(3)
        flat = np.concatenate([flat, np.full(tokens * choices - len(flat), -1)])
        ids.append(torch.from_numpy(draw.permutation(flat).reshape(tokens, choices)))
    return ids


def check_plan(
    plan: Plan, counts_RE: torch.Tensor, home_order_Rn: torch.Tensor | None = None
) -> None:
    """Every property a plan has whatever the rule."""
    ranks, experts = counts_RE.shape
    homes, total = experts // ranks, int(counts_RE.sum())
    tensors = (
        plan.rows_RE,
        plan.cap_R,
        plan.foreign_expert_Rn,
        plan.group_expert_RG,
        plan.group_start_RG1,
    )
    assert all(tensor.dtype == torch.int32 for tensor in tensors)
    rows = plan.rows_RE.tolist()
    assert (plan.rows_RE >= 0).all()
    assert plan.rows_RE.sum(0).tolist() == counts_RE.sum(0).tolist(), "conservation"
    caps = [len(range(d, total, ranks)) for d in range(ranks)]
    assert plan.cap_R.tolist() == plan.rows_RE.sum(1).tolist() == caps, "exact capacity"
    for d in range(ranks):
        foreign = [e for e in range(experts) if rows[d][e] and e // homes != d]
        assert len({e // homes for e in foreign}) <= 1, "one donor home a receiver"
        assert plan.foreign_expert_Rn[d].tolist() == foreign + [-1] * (homes - len(foreign))
        own = list(range(d * homes, (d + 1) * homes))[::-1]
        own = own if home_order_Rn is None else home_order_Rn[d].tolist()
        groups = plan.group_expert_RG[d].tolist()
        assert groups == own + plan.foreign_expert_Rn[d].tolist()
        sizes = [rows[d][e] if e >= 0 else 0 for e in groups]
        assert plan.group_start_RG1[d].tolist() == [0, *itertools.accumulate(sizes)]
    received = (plan.foreign_expert_Rn >= 0).sum(1)
    sent = torch.tensor([int((plan.foreign_expert_Rn // homes == h).sum()) for h in range(ranks)])
    assert plan.received_R.tolist() == received.tolist() and plan.sent_R.tolist() == sent.tolist()
    assert plan.duplicates == int(sent.sum()) == int(received.sum())
    assert plan.busiest == max(sent.max(), received.max())
    for slots in {1, (homes + 1) // 2, homes}:
        assert plan.waves(slots) == -(-int(received.max()) // slots)


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
    assert plan.rule == planner or planner == "best" or (planner, plan.rule) == ("chain", "pairs")


def receivers_of(plan: Plan, home: int) -> torch.Tensor:
    ranks, homes = plan.foreign_expert_Rn.shape
    mine_Rn = (plan.foreign_expert_Rn >= 0) & (plan.foreign_expert_Rn // homes == home)
    return torch.arange(ranks)[mine_Rn.any(1)]


@settings(lenient, max_examples=8)
@given(ranks=st.integers(65, 128), load=st.sampled_from(LOADS), seed=st.integers(0, 99))
def test_plan_properties_beyond_64_ranks(ranks: int, load: str, seed: int) -> None:
    counts = random_counts(load, ranks, ranks * 8, 4096, seed)
    check_plan(make_plan(counts), counts)


@settings(lenient, max_examples=60)
@given(counts=routings(), data=st.data())
def test_best_takes_the_lowest_waves_then_busiest_then_all(
    counts: torch.Tensor, data: st.DataObject
) -> None:
    homes = counts.shape[1] // counts.shape[0]
    slots = data.draw(st.integers(1, homes))
    rules = [make_plan(counts, planner=rule) for rule in PLANNERS if rule != "best"]
    costs = [(plan.waves(slots), plan.busiest, plan.duplicates) for plan in rules]
    best = make_plan(counts, slots=slots)
    winner = rules[costs.index(min(costs))]
    assert (best.waves(slots), best.busiest, best.duplicates) == min(costs)
    assert plan_hash(best) == plan_hash(winner) and best.rule == winner.rule
    assert make_plan(counts).busiest <= rules[0].busiest, "never above pairs with n slots"


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


# Independent references -----------------------------------------------------------------------


def slow_pairs(counts_RE: torch.Tensor) -> list[list[int]]:
    """rows[d][e] of the pairs rule, one row at a time."""
    ranks, experts = counts_RE.shape
    homes, totals = experts // ranks, counts_RE.sum(0).tolist()
    rows = [[totals[e] if e // homes == d else 0 for e in range(experts)] for d in range(ranks)]
    caps = [len(range(d, sum(totals), ranks)) for d in range(ranks)]
    while any(sum(row) != cap for row, cap in zip(rows, caps, strict=True)):
        over = [sum(row) - cap for row, cap in zip(rows, caps, strict=True)]
        donor, receiver = over.index(max(over)), over.index(min(over))
        expert = None
        while sum(rows[receiver]) < caps[receiver]:
            if expert is None or rows[donor][expert] == 0:
                own = range(donor * homes, (donor + 1) * homes)
                # an expert that this receiver already took from is empty, so this is a new one
                expert = max(own, key=lambda e: (rows[donor][e], -e))
            rows[donor][expert] -= 1
            rows[receiver][expert] += 1
    return rows


@settings(lenient, max_examples=100)
@given(
    ranks=st.integers(1, 10),
    homes=st.integers(1, 6),
    load=st.sampled_from(LOADS),
    rows=st.integers(0, 60),
    seed=st.integers(0, 9999),
)
def test_pairs_against_the_slow_reference(
    ranks: int, homes: int, load: str, rows: int, seed: int
) -> None:
    counts = random_counts(load, ranks, ranks * homes, rows, seed)
    assert make_plan(counts, planner="pairs").rows_RE.tolist() == slow_pairs(counts)


def best_chain(counts_RE: torch.Tensor) -> tuple[int, int] | None:
    """(most experts that a rank passes on, all) of the best row of ranks, by trying every one."""
    ranks = len(counts_RE)
    home_Rn = counts_RE.sum(0).view(ranks, -1).tolist()
    total = sum(map(sum, home_Rn))
    caps = [len(range(d, total, ranks)) for d in range(ranks)]
    found = []
    for row in itertools.permutations(range(ranks)):
        flow, passed = 0, []
        for d in row:
            flow += sum(home_Rn[d]) - caps[d]
            if not 0 <= flow <= sum(home_Rn[d]):
                break
            sizes, experts = sorted(home_Rn[d]), 0
            while sum(sizes[len(sizes) - experts :]) < flow:
                experts += 1
            passed.append(experts)
        else:
            found.append((max(passed), sum(passed)))
    return min(found, default=None)


@settings(lenient, max_examples=150)
@given(
    ranks=st.integers(1, 5),
    homes=st.integers(1, 6),
    load=st.sampled_from(LOADS),
    rows=st.sampled_from([4, 30, 1000]),
    seed=st.integers(0, 9999),
)
@example(ranks=7, homes=4, load="heavy", rows=200, seed=2)
@example(ranks=6, homes=5, load="hot half", rows=200, seed=0)
def test_chain_is_the_best_of_all_rows(
    ranks: int, homes: int, load: str, rows: int, seed: int
) -> None:
    counts = random_counts(load, ranks, ranks * homes, rows, seed)
    plan, best = make_plan(counts, planner="chain"), best_chain(counts)
    if best is None:
        assert plan.rule == "pairs"
    else:
        assert (plan.rule, plan.busiest, plan.duplicates) == ("chain", *best)


def test_chain_without_an_admissible_row_uses_pairs() -> None:
    """Surpluses 6, 6, 6 and deficits 9, 9 at cap 10: no row of ranks can carry them."""
    counts = torch.diag(torch.tensor([16, 16, 16, 1, 1]))
    assert best_chain(counts) is None
    chain, pairs = (make_plan(counts, planner=rule) for rule in ("chain", "pairs"))
    assert chain.rule == "pairs" and plan_hash(chain) == plan_hash(pairs)
    check_plan(make_plan(counts, planner="peel"), counts)


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


# Recorded routing -----------------------------------------------------------------------------


def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_plan", ROOT / "scripts" / "bench_plan.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not ROUTING.is_dir(), reason="needs the recorded routing")
@pytest.mark.parametrize(("ranks", "most"), [(8, 1.3), (16, 1.5), (32, 1.5)])
def test_recorded_routing(ranks: int, most: float) -> None:
    result = bench().bench_quality(ROUTING, ranks)
    assert result["total"]["layers"] >= 70
    assert result["layers_above_pairs"] == 0
    assert result["total"]["bound"] <= result["total"]["best"] <= most * result["total"]["bound"]


def test_the_bound_of_the_benchmark() -> None:
    # cap 11: rank 0 gives 29 rows, in parts of at most 11
    assert bench().bound([40, 0, 0, 4, 0, 0, 0, 0], 4) == 3
    assert bench().bound([1, 1, 1, 1], 4) == 0
    # rank 1 lacks 8 rows, in experts of 4
    assert bench().bound([4, 4, 4, 4, 0, 0, 0, 0], 2) == 2


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
