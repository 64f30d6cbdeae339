"""Checks of the kernels from routing map to destinations, shared by the CPU and the GPU tests.

``k`` is the package of the kernels, or its emulated twin; everything else is the plain definition.
"""

from itertools import batched

import torch
from routings import random_counts, random_ids

from moonep_megatron.caps import caps
from moonep_megatron.plan import destinations, make_plan
from moonep_megatron.reuse import Held
from moonep_megatron.transfers import Transfer, pieces
from moonep_megatron.trees import KEYS, LIMITS, by_room, grow

FIELDS = ("cap_R", "foreign_expert_Rn", "group_expert_RG", "group_start_RG1", "rows_RE")


def equal(name, got, expected):
    got, expected = got.cpu(), expected.cpu().to(got.dtype)
    assert got.shape == expected.shape, f"{name}: {list(got.shape)} for {list(expected.shape)}"
    wrong = (got != expected).nonzero().tolist()
    assert not wrong, (
        f"{name}: {len(wrong)} of {got.numel()} differ, first at {wrong[0]}: "
        f"{got[tuple(wrong[0])].item()} for {expected[tuple(wrong[0])].item()}"
    )


def random_map(tokens, experts, topk, seed, most=None):
    """bool [s, E], up to ``most`` (default K) choices a token, and probabilities of all experts."""
    draw = torch.Generator().manual_seed(seed)
    score = torch.rand(tokens, experts, generator=draw)
    order = score.argsort(1).argsort(1)
    choices = torch.randint(0, min(most or topk, experts) + 1, (tokens, 1), generator=draw)
    full = torch.rand(tokens, 1, generator=draw) < 0.8
    choices = torch.where(full, min(most or topk, experts), choices)
    return order < choices, torch.rand(tokens, experts, generator=draw)


def ids_of(routing_map, topk):
    """int32 [s, K], ascending, -1 behind; and the choices beyond K."""
    experts = routing_map.shape[1]
    ids = torch.where(routing_map, torch.arange(experts), experts).sort(1).values
    ids = torch.nn.functional.pad(ids, (0, topk), value=experts)[:, :topk]
    ids = ids.masked_fill(ids == experts, -1).int()
    return ids, int(routing_map.sum() - (ids >= 0).sum())


def check_compact(k, device, tokens, experts, topk, dtype, seed=0, most=None):
    routing_map, probs = random_map(tokens, experts, topk, seed, most)
    probs = probs.to(dtype)
    expected, excess = ids_of(routing_map, topk)
    ids, chosen, places, counts = k.compact.compact(routing_map.to(device), probs.to(device), topk)
    equal("ids", ids, expected)
    picked = probs.float().gather(1, expected.clamp(min=0).long())
    equal("probs", chosen, picked.masked_fill(expected < 0, 0))
    check_counts(k, expected, experts, places, counts, excess)


def check_count(k, device, ids, experts):
    got, places, counts = k.counting.count(ids.to(device), experts)
    good = (ids >= -1) & (ids < experts)
    equal("ids", got.cpu()[good], ids[good])
    assert (((got.cpu() < -1) | (got.cpu() >= experts)) == ~good).all(), "bad ids stay bad"
    check_counts(k, ids, experts, places, counts, 0)


def check_counts(k, ids, experts, places, counts, excess):
    chunk = k.counting.CHUNK
    assert len(counts) == max(-(-len(ids) // chunk), 1)
    total_excess = 0
    for c in range(-(-len(ids) // chunk)):
        flat = ids[c * chunk : (c + 1) * chunk].reshape(-1).long()
        legal = (flat >= 0) & (flat < experts)
        hot = torch.nn.functional.one_hot(flat[legal], experts)
        equal(f"counts of chunk {c}", counts[c, :experts], hot.sum(0))
        earlier = (hot.cumsum(0) - hot).gather(1, flat[legal][:, None])[:, 0]
        got = places[c * chunk : (c + 1) * chunk].reshape(-1).cpu()
        equal(f"places of chunk {c}", got[legal], earlier)
        tokens, bad, over, zero = counts[c, experts:].tolist()
        assert tokens == len(ids[c * chunk : (c + 1) * chunk])
        assert bad == int(((flat < -1) | (flat >= experts)).sum())
        assert zero == 0
        total_excess += over
    assert total_excess == excess


def home_order(ranks, homes, seed):
    """int32 [R, n], another random order on every rank."""
    draw = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(homes, generator=draw) + d * homes for d in range(ranks)]
    return torch.stack(orders).int()


def exchanged(k, counts_RE, rank, device, counts_CE=None):
    """What an exchange of these counts leaves on a rank."""
    first = None
    if counts_CE is not None:
        first = (counts_CE.cumsum(0) - counts_CE).int()
    totals = torch.stack([counts_RE.sum(0), counts_RE[:rank].sum(0)])
    return k.exchange.Exchanged(
        first_CE=first,
        counts_RE=counts_RE.to(device, torch.int32).contiguous(),
        totals_2E=totals.to(device, torch.int32),
    )


def check_plan(
    k,
    device,
    counts_RE,
    planner="best",
    slots=None,
    seed=0,
    rank=0,
    planners=None,
    slack=0,
    held_RB=None,
):
    """The plan, but ``rows_RE``, against the definition; returns both.

    Args:
        planners: a dict in which solvers are kept for other calls.
        held_RB: the experts that slots hold, for foreign experts that stay in them.
    """
    ranks, experts = counts_RE.shape
    slots = slots or experts // ranks
    order = home_order(ranks, experts // ranks, seed)
    options = {"planner": planner, "slots": slots, "slack": slack}
    keeps = held_RB is not None
    key = (ranks, experts, *options.values(), keeps)
    planners = {} if planners is None else planners
    if key not in planners:
        planners[key] = k.plan.Planner(
            ranks, experts, **options, keeps=keeps, most_rows=1, device=device
        )
    there = held_RB.to(device) if keeps else None
    counts = exchanged(k, counts_RE, rank, device)
    got = planners[key].plan(counts, order.to(device), rank, there)
    held = Held(held_RB.tolist()) if keeps else None
    expected = make_plan(counts_RE, **options, home_order_Rn=order, held=held, prefer=False)
    compare_plans(k, got, expected, FIELDS[:-1])
    return got, expected


def check_kept(k, device, load, ranks, homes, slots, rows, steps, planner="best", planners=None):
    """A plan after the other, each for slots that hold what the ones before left there."""
    held = torch.full((ranks, slots), -1, dtype=torch.int32)
    for step in range(steps):
        counts = random_counts(load, ranks, ranks * homes, rows, 1)
        counts += random_counts("even", ranks, ranks * homes, rows // 4, step)
        if step == 2 and slots > 1:
            held[:, -1] = held[:, 0]  # an expert twice
        _, plan = check_plan(
            k, device, counts, planner, slots, step, step % ranks, planners, held_RB=held
        )
        # Of several waves the last one stays; which does not matter here.
        for wave in plan.foreign_expert_Rn.split(slots, 1):
            pushed = torch.nn.functional.pad(wave, (0, slots - wave.shape[1]), value=-1)
            held = torch.where(pushed < 0, held, pushed).contiguous()
    return plan


def check_trees(k, device, counts_RE, planners=None):
    """Every tree, whether it is the best or not: whether it exists, and which experts move."""
    ranks, experts = counts_RE.shape
    own = counts_RE.sum(0).view(ranks, -1).tolist()
    order, known = by_room(own, caps([sum(home) for home in own]))
    planners = {} if planners is None else planners
    check_plan(k, device, counts_RE, "trees", planners=planners)
    (planner,) = planners.values()
    count = len(KEYS) * LIMITS
    assert planner.config.trees == count
    records = planner._scratch[4:].cpu().view(-1, planner.config.record)[:count].tolist()
    for number, record in enumerate(records):
        more, key = divmod(number, len(KEYS))
        tree = grow(known._replace(limit=known.limit + more), KEYS[key])
        assert record[0] == (tree is not None), f"tree {number} exists"
        if tree is None:
            continue
        expected = pieces(own, [Transfer(order[a], order[b], rows) for a, b, rows in tree])
        place, got = len(record) - 2 * experts, []
        for d, received in enumerate(record[4 : 4 + ranks]):
            start = place + 2 * d * (experts // ranks)
            numbers = record[start : start + 2 * received]
            got += [(d, *divmod(e, len(own[0])), rows) for e, rows in batched(numbers, 2)]
        assert sorted(got) == sorted(expected), f"tree {number}"
        assert record[3] == len(expected)


def compare_plans(k, got, expected, fields=FIELDS):
    assert k.plan.RULES[int(got.rule)] == expected.rule
    for field in fields:
        equal(field, getattr(got, field), getattr(expected, field))


def check_destinations(k, device, counts_RE, topk, planner="best", seed=0, ranks=None, slack=0):
    """Plan, dense rows and destinations of some ranks (default: all)."""
    ids = random_ids(counts_RE, topk, seed)
    for rank in range(len(counts_RE)) if ranks is None else ranks:
        got, expected = check_plan(k, device, counts_RE, planner, seed=seed, rank=rank, slack=slack)
        mine, places, counts_CE = k.counting.count(ids[rank].int().to(device), counts_RE.shape[1])
        first = exchanged(k, counts_RE, rank, device, counts_CE).first_CE
        there = k.destinations.destinations(got, mine, places, first, rank)
        equal("rows_RE", got.rows_RE, expected.rows_RE)
        for name, one, other in zip(
            ("rank", "row"), there, destinations(expected, counts_RE, ids[rank], rank), strict=True
        ):
            equal(f"{name} of rank {rank}'s entries", one, other)
