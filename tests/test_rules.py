"""The planning rules against slow references and brute force."""

import itertools

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from routings import LOADS, check_plan, lenient, random_counts, routings

from moonep_megatron.bounds import sender_bound
from moonep_megatron.plan import PLANNERS, make_plan, plan_hash
from moonep_megatron.rules import peel
from moonep_megatron.transfers import cost, pieces
from moonep_megatron.trees import KEYS, trees


@settings(lenient, max_examples=60)
@given(counts=routings(), fraction=st.floats(0, 1))
# with one slot pairs needs one wave and the chain two, though its busiest rank has less to do
@example(counts=random_counts("zipf", 4, 16, 100, 0), fraction=0)
def test_best_takes_the_lowest_waves_then_busiest_then_all(
    counts: torch.Tensor, fraction: float
) -> None:
    homes = counts.shape[1] // counts.shape[0]
    slots = 1 + round(fraction * (homes - 1))
    rules = [make_plan(counts, planner=rule, slots=slots) for rule in PLANNERS[1:]]
    costs = [(plan.waves(slots), plan.busiest, plan.duplicates) for plan in rules]
    best = make_plan(counts, slots=slots)
    winner = rules[costs.index(min(costs))]
    assert (best.waves(slots), best.busiest, best.duplicates) == min(costs)
    assert plan_hash(best) == plan_hash(winner) and best.rule == winner.rule
    assert make_plan(counts).busiest <= rules[0].busiest, "never above pairs with n slots"


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
# two where the fewest experts in all are not those of the least busy
@example(ranks=5, homes=6, load="even", rows=30, seed=84)
@example(ranks=5, homes=4, load="zipf", rows=30, seed=235)
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


# Trees ------------------------------------------------------------------------------------------


@settings(lenient, max_examples=250)
@given(
    ranks=st.integers(1, 40),
    homes=st.integers(1, 8),
    load=st.sampled_from(LOADS),
    rows=st.sampled_from([4, 30, 1000, 65536]),
    extra=st.integers(0, 2),
    seed=st.integers(0, 9999),
)
def test_trees_move_what_they_say(
    ranks: int, homes: int, load: str, rows: int, extra: int, seed: int
) -> None:
    """Carried out one transfer after the other: exact, within one limit, the giver's own rows."""
    counts = random_counts(load, ranks, ranks * homes, rows, seed).sum(0)
    own = counts.view(ranks, homes).tolist()
    caps = [len(range(d, int(counts.sum()), ranks)) for d in range(ranks)]
    # the bound of the senders, so that the limit itself is put to the test
    surplus = [sum(home) - cap for home, cap in zip(own, caps, strict=True)]
    most = max(sender_bound(own, surplus, max(caps))) + extra
    found = trees(own, caps, 1 + extra)
    assert len(found) <= len(KEYS)
    for tree in found:
        left, taken = [list(home) for home in own], [0] * ranks
        sent, received = [0] * ranks, [0] * ranks
        for donor, receiver, rows_moved in tree:
            assert rows_moved > 0 and taken[receiver] == 0, "a rank receives at most once"
            taken[receiver] = todo = rows_moved
            while todo:
                expert = max(range(homes), key=left[donor].__getitem__)
                part = min(todo, left[donor][expert])
                assert part, "the giver has the rows"
                left[donor][expert] -= part
                todo -= part
                sent[donor] += 1
                received[receiver] += 1
        assert [sum(h) + t for h, t in zip(left, taken, strict=True)] == caps
        assert max(*sent, *received) <= most


def test_trees_give_a_hot_rank_receivers_of_the_right_size() -> None:
    """Cap 8: rank 0 has one expert of 24 rows; the others lack 4, in pairs they lack 8."""
    homes = [[24, 0], *[[4, 0]] * 4]
    caps = [8] * 5
    assert cost(5, pieces(homes, peel(homes, caps)), 2)[1] == 3
    (first, *_) = trees(homes, caps)
    assert cost(5, pieces(homes, first), 2)[1] == 2
