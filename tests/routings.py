"""Random routing of many kinds, and the properties that every plan must have."""

import itertools

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from moonep_megatron.plan import Plan

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
    plan: Plan,
    counts_RE: torch.Tensor,
    home_order_Rn: torch.Tensor | None = None,
    slack: int = 0,
) -> None:
    """Every property a plan has whatever the rule; ``slack`` in parts of 10 000."""
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
    assert plan.cap_R.tolist() == plan.rows_RE.sum(1).tolist()
    if slack:
        most = max(-(-total // ranks), total * (10_000 + slack) // (10_000 * ranks))
        assert max(plan.cap_R.tolist()) <= most, "within the slack"
    else:
        assert plan.cap_R.tolist() == caps, "exact capacity"
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
