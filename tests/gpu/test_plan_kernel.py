"""Plans and destinations on the device, element by element against their definition."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="needs the extra: pip install 'moonep-megatron[gpu]'")

import moonep_megatron.kernels.counting
import moonep_megatron.kernels.destinations
import moonep_megatron.kernels.plan  # noqa: F401 - used through the package
from plan_kernels import check_destinations, check_kept, check_plan, check_trees
from routings import LOADS, random_counts

from moonep_megatron import kernels
from moonep_megatron.rules import PLANNERS

CUDA = torch.device("cuda")
ROUTING = Path(__file__).parents[3] / "shared" / "routing"
# R, experts of a rank
SIZES = ((1, 8), (2, 32), (3, 5), (4, 16), (8, 112), (16, 4), (64, 14), (128, 8))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory without values holds the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("ranks", "homes"), SIZES)
def test_best(ranks, homes):
    solvers, rules = {}, set()
    for seed, load in enumerate(LOADS * 2):
        for rows in (0, 3, 500, 65536):
            counts = random_counts(load, ranks, ranks * homes, rows, seed)
            made, _ = check_plan(
                kernels, CUDA, counts, seed=seed, rank=seed % ranks, planners=solvers
            )
            rules.add(int(made.rule))
    print(f"R={ranks} n={homes}: {[kernels.plan.RULES[r] for r in sorted(rules)]}")


@pytest.mark.parametrize("planner", PLANNERS[1:])
@pytest.mark.parametrize(("ranks", "homes"), [(8, 8), (16, 4), (64, 2)])
def test_each_rule(ranks, homes, planner):
    solvers = {}
    for seed in range(40):
        counts = random_counts(LOADS[seed % len(LOADS)], ranks, ranks * homes, 4000, seed)
        check_plan(kernels, CUDA, counts, planner, seed=seed, planners=solvers)


@pytest.mark.parametrize("slack", [1, 100, 2000])
@pytest.mark.parametrize(("ranks", "homes"), SIZES)
def test_within_a_slack(ranks, homes, slack):
    solvers = {}
    for seed, load in enumerate(LOADS):
        for rows in (3, 500, 65536):
            counts = random_counts(load, ranks, ranks * homes, rows, seed)
            rank = seed % ranks
            check_plan(kernels, CUDA, counts, rank=rank, planners=solvers, slack=slack)


@pytest.mark.parametrize(("ranks", "homes"), SIZES)
def test_every_tree(ranks, homes):
    """Whether it is the best or not."""
    solvers = {}
    for seed, load in enumerate(LOADS * 2):
        for rows in (40, 9000):
            counts = random_counts(load, ranks, ranks * homes, rows, seed)
            check_trees(kernels, CUDA, counts, planners=solvers)


@pytest.mark.parametrize("slots", [1, 4, None])
@pytest.mark.parametrize(("ranks", "homes"), SIZES)
def test_foreign_experts_stay_in_their_slots(ranks, homes, slots):
    solvers, slots = {}, min(slots or homes, homes)
    for load in LOADS:
        for rows in (3, 500, 65536):
            check_kept(kernels, CUDA, load, ranks, homes, slots, rows, 4, planners=solvers)


def test_slots_change_what_best_takes():
    solvers, rules = {}, []
    for slots in (1, 2, 8):
        for seed in range(30):
            counts = random_counts("heavy", 8, 64, 4000, seed)
            made, _ = check_plan(kernels, CUDA, counts, slots=slots, planners=solvers)
            rules.append(int(made.rule))
    assert rules[:30] != rules[-30:]


def test_no_rows_and_very_many():
    check_plan(kernels, CUDA, torch.zeros(8, 64, dtype=torch.int64))
    counts = torch.zeros(8, 64, dtype=torch.int64)
    counts[:, 5] = 2**28 - 1
    counts[7, 63] = 7
    check_plan(kernels, CUDA, counts)


@pytest.mark.parametrize(("ranks", "homes", "topk"), [(1, 8, 2), (4, 16, 8), (8, 112, 8)])
def test_destinations(ranks, homes, topk):
    for seed, load in enumerate(("even", "zipf", "hot rank", "one expert")):
        counts = random_counts(load, ranks, ranks * homes, 20000, seed)
        check_destinations(kernels, CUDA, counts, topk, seed=seed)


def test_destinations_of_many_ranks():
    for seed, load in enumerate(("zipf", "hot rank", "one expert")):
        counts = random_counts(load, 128, 1024, 5000, seed)
        check_destinations(kernels, CUDA, counts, 6, seed=seed, ranks=(0, 31, 64, 127))


def test_twice_the_same_bits():
    counts = random_counts("heavy", 64, 896, 65536, 1)
    first, _ = check_plan(kernels, CUDA, counts)
    for _ in range(20):
        again, _ = check_plan(kernels, CUDA, counts)
        end = first.rows_RE.storage_offset()
        assert torch.equal(first.memory[:end], again.memory[:end])


@pytest.mark.skipif(not ROUTING.exists(), reason="no recorded routing")
@pytest.mark.parametrize("ranks", [8, 16, 32, 64])
def test_recorded_routing(ranks):
    solvers = {}
    for path in sorted(ROUTING.glob("*_topk.npy")):
        for layer in np.load(path, mmap_mode="r"):
            parts = np.array_split(np.asarray(layer), ranks)
            counts = np.stack([np.bincount(p.ravel(), minlength=64) for p in parts])
            check_plan(kernels, CUDA, torch.from_numpy(counts), planners=solvers)
    for path in sorted(ROUTING.glob("olmoe*.json")):
        draw = np.random.default_rng(0)
        for layer in json.loads(path.read_text())["logical_count"]:
            share = np.array(layer) / sum(layer)
            counts = np.stack([draw.multinomial(65536, share) for _ in range(ranks)])
            check_plan(kernels, CUDA, torch.from_numpy(counts), planners=solvers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 129, "experts": 129}, "128 ranks"),
        ({"ranks": 2, "experts": 1026}, "1024"),
        ({"ranks": 3, "experts": 8}, "multiple"),
        ({"planner": "worst"}, "unknown"),
        ({"most_rows": 2**31}, "max-tokens"),
    ],
)
def test_refused_by_name(arguments, message):
    usual = {"ranks": 2, "experts": 8, "planner": "best", "slots": 4, "most_rows": 9}
    usual["device"] = CUDA
    with pytest.raises(ValueError, match=message):
        kernels.plan.Planner(**(usual | arguments))
