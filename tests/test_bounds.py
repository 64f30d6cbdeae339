"""Lower bounds against brute force and an exact solver; planners against both."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from exact_plan import best_of_all, least_busiest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from routings import lenient, routings

from moonep_megatron.bounds import bounds, component_bound, receiver_bound, sender_bound
from moonep_megatron.plan import make_plan

ROUTING = Path(__file__).parents[2] / "shared" / "routing"


def busiest(total_E: list[int], ranks: int, planner: str) -> int:
    counts = torch.zeros(ranks, len(total_E), dtype=torch.int64)
    counts[0] = torch.tensor(total_E)
    return make_plan(counts, planner=planner).busiest


@st.composite
def small(draw: st.DrawFn) -> tuple[list[int], int]:
    """Totals that brute force can go through, and R."""
    ranks, homes, rows = draw(st.sampled_from([(2, 1, 12), (2, 2, 9), (2, 3, 7), (3, 1, 9)]))
    return draw(
        st.lists(st.integers(0, rows), min_size=ranks * homes, max_size=ranks * homes)
    ), ranks


@settings(lenient, max_examples=80)
@given(case=small())
@example(case=([9, 0, 0], 3))
@example(case=([3, 3, 1, 1, 0, 2], 3))
@example(case=([4, 0, 0, 2, 1, 1, 0, 0], 4))
@example(case=([0, 0], 2))
def test_bounds_against_brute_force(case: tuple[list[int], int]) -> None:
    total_E, ranks = case
    least = bounds(total_E, ranks)
    best_d, best_u, received, sent = best_of_all(total_E, ranks)
    assert least.busiest <= best_d and least.duplicates <= best_u
    # what one rank must receive or send, alone, the bounds know exactly
    assert least.received == received
    assert all(a <= b for a, b in zip(least.sent, sent, strict=True))
    if ranks == 2:
        assert least.sent == sent and least.busiest == best_d


@settings(lenient, max_examples=40)
@given(case=small())
def test_the_exact_solver_against_brute_force(case: tuple[list[int], int]) -> None:
    total_E, ranks = case
    assert least_busiest(total_E, ranks) == best_of_all(total_E, ranks)[0]


def most_parts(surplus: list[int]) -> int:
    """The most balanced parts, by trying every set that holds the first rank."""
    if not surplus:
        return 0
    found = [-len(surplus)]
    for size in range(len(surplus)):
        for others in itertools.combinations(range(1, len(surplus)), size):
            if surplus[0] + sum(surplus[d] for d in others) == 0:
                rest = [s for d, s in enumerate(surplus) if d and d not in others]
                found.append(1 + most_parts(rest))
    return max(found)


@settings(lenient, max_examples=60)
@given(surplus=st.lists(st.integers(-3, 3), min_size=0, max_size=7))
def test_the_component_bound_against_all_partitions(surplus: list[int]) -> None:
    surplus = [*surplus, -sum(surplus)]
    assert component_bound(surplus) == len(surplus) - most_parts(surplus)


def test_bounds_by_hand() -> None:
    # cap 11: rank 0 gives 29 rows in parts of at most 11; the others lack 7, 11 and 11
    assert bounds([40, 0, 0, 4, 0, 0, 0, 0], 4).sent == (3, 0, 0, 0)
    assert bounds([40, 0, 0, 4, 0, 0, 0, 0], 4).received == (0, 1, 1, 1)
    # rank 1 lacks 8 rows, in experts of 4
    assert bounds([4, 4, 4, 4, 0, 0, 0, 0], 2).busiest == 2
    assert bounds([1, 1, 1, 1], 4).busiest == bounds([0] * 8, 4).duplicates == 0
    # three balanced pairs need three duplicates, six ranks that only balance as a whole five
    assert component_bound([5, -5, 7, -7, 9, -9]) == 3
    assert component_bound([1, 2, 4, 8, 16, -31]) == 5
    assert receiver_bound([9, 9, 0, 0], [9, -9]) == (0, 1)
    assert sender_bound([[9, 9], [0, 0]], [9, -9], 9) == (1, 0)
    with pytest.raises(ValueError, match="3 experts on 2 ranks"):
        bounds([1, 2, 3], 2)


@settings(lenient, max_examples=60)
@given(counts=routings())
def test_no_plan_is_below_the_bounds(counts: torch.Tensor) -> None:
    least = bounds(counts.sum(0).tolist(), len(counts))
    for planner in ("best", "trees"):
        plan = make_plan(counts, planner=planner)
        assert plan.busiest >= least.busiest and plan.duplicates >= least.duplicates
        assert all(a >= b for a, b in zip(plan.received_R.tolist(), least.received, strict=True))
        assert all(a >= b for a, b in zip(plan.sent_R.tolist(), least.sent, strict=True))


# Recorded routing -------------------------------------------------------------------------------


def recorded() -> list[tuple[str, list[int]]]:
    """Layers of recorded routing: every fourth per-token one, and all that were only counted."""
    layers = []
    for name in ("law", "intent"):
        ids = np.load(ROUTING / f"{name}_topk.npy")
        layers += [
            (f"{name} {i}", np.bincount(ids[i].ravel(), minlength=64).tolist())
            for i in range(2, len(ids), 4)
        ]
    for domain in ("arxiv", "wikipedia", "c4"):
        counts = json.loads((ROUTING / f"olmoe_1b7b_{domain}.json").read_text())["logical_count"]
        layers += [(f"{domain} {i}", total_E) for i, total_E in enumerate(counts)]
    return layers


@pytest.mark.skipif(not ROUTING.is_dir(), reason="needs the recorded routing")
def test_eight_ranks_against_the_exact_solver() -> None:
    """No plan has a less busy rank than ``best`` on any layer."""
    layers = recorded()
    for name, total_E in layers:
        least = least_busiest(total_E, 8)
        assert bounds(total_E, 8).busiest <= least, name
        assert busiest(total_E, 8, "best") == least, name
    assert len(layers) >= 20
