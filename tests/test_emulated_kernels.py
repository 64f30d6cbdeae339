"""The kernels from routing map to destinations, run from their sources without a GPU."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("greenlet", reason="the emulator's threads are greenlets")

import emulator
from plan_kernels import (
    check_compact,
    check_count,
    check_destinations,
    check_kept,
    check_plan,
    check_trees,
    compare_plans,
    equal,
    home_order,
    ids_of,
    random_map,
)
from routings import LOADS, random_counts

from moonep_megatron import caps
from moonep_megatron.plan import destinations, make_plan

CPU = torch.device("cpu")
BYTES = 4
ROUTING = Path(__file__).parents[2] / "shared" / "routing"


@pytest.fixture(scope="module")
def k():
    kernels = emulator.load_kernels("compact", "exchange", "plan", "destinations")
    # Two warps a block are enough to meet, and quicker.
    kernels.plan._THREADS = kernels.destinations._THREADS = 64
    return kernels


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "dtype"),
    [
        (0, 7, 2, torch.float32),
        (65, 7, 2, torch.float64),
        (9, 60, 4, torch.float16),
        (70, 64, 40, torch.bfloat16),
        (6, 896, 8, torch.float32),
    ],
)
def test_compact(k, tokens, experts, topk, dtype):
    check_compact(k, CPU, tokens, experts, topk, dtype)


def test_choices_beyond_k_are_counted_and_left_out(k):
    check_compact(k, CPU, 67, 16, 2, torch.float32, most=5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_count_of_odd_ids(k, dtype):
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(-3, 13, (70, 5), generator=draw, dtype=dtype)
    ids[3] = 4
    if dtype == torch.int64:
        ids[5, 1] = 2**32 + 3
    check_count(k, CPU, ids, 11)


@pytest.mark.parametrize("planner", ["best", "pairs", "chain", "peel", "trees"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 9])
def test_plan(k, ranks, planner):
    draw = random.Random(f"{ranks} {planner}")
    for load in draw.sample(LOADS, 1 if k.plan.PlanConfig(ranks, ranks, planner).trees else 2):
        homes = draw.choice([1, 2, 5, 9])
        counts = random_counts(load, ranks, ranks * homes, 3000, draw.randrange(1000))
        check_plan(k, CPU, counts, planner, draw.randint(1, homes), rank=draw.randrange(ranks))


def test_best_takes_every_rule(k):
    first = {}
    for seed, load in itertools.product(range(9), ("even", "heavy", "hot half", "zipf")):
        counts = random_counts(load, 5, 15, 500, seed)
        first.setdefault(make_plan(counts, slots=3).rule, counts)
    assert set(first) == set(k.plan.RULES)
    for counts in first.values():
        check_plan(k, CPU, counts, slots=3)


@pytest.mark.parametrize(
    ("ranks", "homes", "load", "rows", "seed"),
    [
        (2, 5, "hot rank", 9000, 2),
        # more than two experts at once: fills, passes, relays
        (4, 9, "hot rank", 400, 5),
        (4, 9, "sparse", 400, 0),
        (6, 9, "heavy", 400, 2),
        # experts above a cap
        (5, 4, "sparse", 9000, 1),
        (16, 2, "zipf", 9000, 2),
        # a giver that may only just send what it must
        (8, 9, "zipf", 9000, 2),
        (16, 4, "heavy", 9000, 2),
        # four warps
        (34, 2, "hot half", 9000, 2),
    ],
)
def test_every_tree(k, monkeypatch, ranks, homes, load, rows, seed):
    """Also those that are not the best."""
    monkeypatch.setattr(k.plan, "_THREADS", max(64, k.trees.warps(ranks) * 32))
    check_trees(k, CPU, random_counts(load, ranks, ranks * homes, rows, seed))


@pytest.mark.skipif(not ROUTING.is_dir(), reason="needs the recorded routing")
@pytest.mark.parametrize(("ranks", "planner"), [(8, "best"), (32, "trees")])
def test_recorded_routing(k, ranks, planner):
    ids = np.load(ROUTING / "law_topk.npy", mmap_mode="r")[ranks // 8]
    parts = np.array_split(np.asarray(ids), ranks)
    counts = np.stack([np.bincount(part.ravel(), minlength=64) for part in parts])
    check_plan(k, CPU, torch.from_numpy(counts), planner)


@pytest.mark.parametrize("slack", [1, 300, 10_000])
@pytest.mark.parametrize("ranks", [1, 2, 5, 9])
def test_plan_within_a_slack(k, ranks, slack):
    """Whole tiles fit the slack, or do not."""
    draw = random.Random(f"{ranks} {slack}")
    load, rows = draw.choice([("zipf", 3000), ("hot rank", 40), ("hot half", 9000)])
    homes, planner = draw.choice([1, 2, 5]), draw.choice(k.plan.PLANNERS)
    counts = random_counts(load, ranks, ranks * homes, rows, draw.randrange(1000))
    check_plan(k, CPU, counts, planner, rank=draw.randrange(ranks), slack=slack)


@pytest.mark.parametrize(
    ("ranks", "homes", "slots", "load"),
    [
        (2, 5, 5, "zipf"),
        (4, 9, 3, "hot rank"),
        (5, 3, 1, "heavy"),
        (9, 2, 2, "zipf"),
        (3, 8, 4, "one expert"),
    ],
)
def test_foreign_experts_stay_in_their_slots(k, ranks, homes, slots, load):
    check_kept(k, CPU, load, ranks, homes, slots, rows=600, steps=5, planner="pairs")


def test_slack_of_more_ranks_than_a_warp_has_lanes(k):
    check_plan(k, CPU, random_counts("zipf", 34, 34, 9000, 1), "pairs", slack=300)


def test_constants_of_a_slack(k):
    assert (k.caps.SLACK_UNIT, k.caps.TILE) == (caps.SLACK_UNIT, caps.TILE)


def test_slack_of_the_largest_counts(k):
    """As many rows as the kernels count, all of one rank: 31 bits are just enough."""
    for ranks in (1, 2):
        counts = torch.zeros(ranks, 2 * ranks, dtype=torch.int64)
        counts[0, :2] = torch.tensor([2**31 - 1 - 77, 77])
        check_plan(k, CPU, counts, slack=10_000)


def test_the_exact_plan_where_a_slack_costs(k):
    homes = torch.tensor([[7, 7, 6, 0, 1, 0, 0, 0, 1], [0] * 9, [0] * 9])
    _, plan = check_plan(k, CPU, homes, slack=3000)
    assert plan.cap_R.tolist() == [8, 7, 7], "the exact caps"


@pytest.mark.parametrize("planner", ["pairs", "best"])
def test_destinations(k, planner):
    check_destinations(k, CPU, random_counts("zipf", 4, 12, 90, 3), 3, planner)
    check_destinations(k, CPU, random_counts("one expert", 5, 5, 150, 4), 2, planner)
    check_destinations(k, CPU, random_counts("zipf", 3, 9, 90, 5), 2, planner, slack=2000)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_exchange_to_destinations(k, ranks):
    """Three exchanges in a row; ranks bring different numbers of tokens, down to none."""
    experts, topk, most = ranks * 17, 3, 130
    world = World(k, ranks, experts)
    order = home_order(ranks, 17, 0)
    planner = k.plan.Planner(
        ranks, experts, planner="best", slots=17, most_rows=ranks * most * topk, device=CPU
    )
    for epoch in range(3):
        tokens = [(0, most, 65)[(rank + epoch) % 3] for rank in range(ranks)]
        maps = [random_map(s, experts, topk, 10 * epoch + r) for r, s in enumerate(tokens)]
        done = [k.compact.compact(*one, topk) for one in maps]
        with emulator.together():
            results = [world.exchange(r, done[r][3], s, most) for r, s in enumerate(tokens)]
        ids = [ids_of(one, topk)[0] for one, _ in maps]
        counts = torch.stack([torch.bincount(i[i >= 0], minlength=experts) for i in ids])
        expected = make_plan(counts, home_order_Rn=order)
        for rank, (mine, _, places, _) in enumerate(done):
            equal("counts", results[rank].counts_RE, counts)
            plan = planner.plan(results[rank], order, rank)
            there = k.destinations.destinations(plan, mine, places, results[rank].first_CE, rank)
            compare_plans(k, plan, expected)
            for one, other in zip(
                there, destinations(expected, counts, ids[rank], rank), strict=True
            ):
                equal("destinations", one, other)


class World:
    """Symmetric memory of all ranks in one process."""

    def __init__(self, k, ranks, experts):
        self.k, sync = k, k.sync
        self.counts_offset = -(-sync.STAGES * ranks * BYTES // 256) * 256
        ints = self.counts_offset // BYTES + 2 * ranks * (experts + k.counting.HEADER)
        self.memory = [torch.zeros(ints, dtype=torch.int32) for _ in range(ranks)]
        self.control = [torch.zeros(sync.CONTROL_INTS, dtype=torch.int32) for _ in range(ranks)]
        self.fault = [torch.zeros(7, dtype=torch.int32) for _ in range(ranks)]
        self.peers = torch.tensor([memory.data_ptr() for memory in self.memory])

    def exchange(self, rank, counts_CE, tokens, most):
        return self.k.exchange.exchange(
            self.peers,
            counts_CE,
            tokens=tokens,
            max_tokens=most,
            rank=rank,
            layer=5,
            counts_offset=self.counts_offset,
            flags_offset=0,
            control=self.control[rank],
            fault=self.fault[rank],
            timeout_ns=10**12,
        )
