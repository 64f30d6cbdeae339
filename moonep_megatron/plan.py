"""The plan of one layer and microbatch: which rank computes which rows of which expert.

This plain torch version is the definition; faster ones are tested against it. Letters:
S tokens of this rank, K experts of a token, E experts, R expert-parallel ranks, n = E/R home
experts of a rank (the home of expert e is rank e // n), G = 2n row groups of a rank, T[r,e] rows
that rank r routes to expert e, M all routed rows, N routed entries of this rank, U duplicates.
"""

import hashlib
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from moonep_megatron.caps import SLACK_UNIT
from moonep_megatron.reuse import Held
from moonep_megatron.rules import PLANNERS, RULES, solve_within
from moonep_megatron.transfers import Piece

__all__ = ["PLANNERS", "Plan", "destinations", "make_plan", "plan_hash"]

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What every rank computes. All tensors are int32, on the device of the counts.

    A *duplicate* is a pair (rank, foreign expert): one copy of weights out, one gradient home.
    """

    rows_RE: Tensor
    """[R, E] rows of expert e computed on rank d."""
    cap_R: Tensor
    """[R] rows of each rank: M // R, plus one on the first M % R ranks; with slack about as many,
    see `moonep_megatron.caps`."""
    foreign_expert_Rn: Tensor
    """[R, n] foreign experts of each rank, ascending, then -1 for empty; where slots held some, in
    the order of their slots, also with -1 between."""
    group_expert_RG: Tensor
    """[R, 2n] expert of each row group: the home experts in home order, then the foreign ones."""
    group_start_RG1: Tensor
    """[R, 2n+1] row at which each group starts; the last entry is the cap."""
    rule_1: Tensor
    """[1] index into ``RULES`` of the rule that made this plan."""

    def to(self, device: torch.device) -> "Plan":
        """The same plan on another device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    @property
    def rule(self) -> str:
        """Name of the rule that made this plan; waits for the device."""
        return RULES[int(self.rule_1)]

    @property
    def received_R(self) -> Tensor:
        """int32 [R], duplicates that each rank holds."""
        return (self.foreign_expert_Rn >= 0).sum(1, dtype=torch.int32)

    @property
    def sent_R(self) -> Tensor:
        """int32 [R], duplicates of each rank's home experts on other ranks."""
        ranks, homes = self.foreign_expert_Rn.shape
        # Empty places count for a rank that is cut off; nothing here waits for the device.
        home = torch.where(self.foreign_expert_Rn < 0, ranks, self.foreign_expert_Rn // homes)
        ones = torch.ones_like(self.foreign_expert_Rn).view(-1)
        return ones.new_zeros(ranks + 1).scatter_add_(0, home.view(-1).long(), ones)[:ranks]

    @property
    def duplicates(self) -> int:
        """U, the number of (rank, foreign expert) pairs; waits for the device."""
        return int(self.received_R.sum())

    @property
    def busiest_rank(self) -> Tensor:
        """D as a scalar on the device."""
        return torch.maximum(self.sent_R, self.received_R).max()

    @property
    def busiest(self) -> int:
        """D, the most duplicates that any rank sends or holds; waits for the device."""
        return int(self.busiest_rank)

    def waves(self, slots: int) -> int:
        """Rounds that the busiest receiver needs with ``slots`` duplicates at a time."""
        _check_slots(slots, self.foreign_expert_Rn.shape[1])
        return -(-int(self.received_R.max()) // slots)


def make_plan(
    counts_RE: Tensor,
    *,
    planner: str = "best",
    slots: int | None = None,
    slack: int = 0,
    home_order_Rn: Tensor | None = None,
    held: Held | None = None,
    prefer: bool = True,
) -> Plan:
    """Balance the routed rows over the ranks, exactly or within a slack.

    Args:
        counts_RE: int32 or int64 [R, E], T[r,e] >= 0.
        planner: one of ``PLANNERS``.
        slots: duplicates a rank can hold at a time, 1..n (default n). Any value gives an exact
            plan; it changes only what ``best`` prefers.
        slack: how far above an equal share a rank may be, in parts of ``caps.SLACK_UNIT``.
        home_order_Rn: integers [R, n], the home experts of each rank in the order of their row
            groups (default: descending ids, because weights lie last expert first).
        held: what the slots of all ranks hold already; held experts stand in their slots.
        prefer: held experts are also preferred where that costs nothing.

    The rules run on the host, so a call with counts on a GPU waits for them.

    Raises:
        ValueError: an argument is out of its range; the message names it and its value.
    """
    device = counts_RE.device
    counts_RE = counts_RE.cpu()
    ranks, homes = _check_counts(counts_RE)
    slots = homes if slots is None else slots
    _check_slots(slots, homes)
    if planner not in PLANNERS:
        raise ValueError(f"planner {planner!r} is unknown: use one of {', '.join(PLANNERS)}")
    if not 0 <= slack <= SLACK_UNIT:
        raise ValueError(f"slack {slack} is outside 0..{SLACK_UNIT}, parts of {SLACK_UNIT}")
    home_Rn = _home_order(home_order_Rn, ranks, homes)
    total_Rn = counts_RE.sum(0, dtype=torch.int64).view(ranks, homes)
    rule, caps, parts = solve_within(
        total_Rn.tolist(), slack=slack, planner=planner, slots=slots, held=held if prefer else None
    )
    if max(caps) > INT32_MAX:
        raise ValueError(f"counts_RE gives a rank {max(caps)} rows: at most {INT32_MAX} fit int32")
    rows_RE, foreign_Rn = _lay_out(total_Rn, parts)
    if held is not None:
        placed = [held.placed(d, foreign) for d, foreign in enumerate(foreign_Rn.tolist())]
        foreign_Rn = torch.tensor(placed)
    return _on(device, rows_RE, caps, foreign_Rn, home_Rn, RULES.index(rule))


def _on(
    device: torch.device,
    rows_RE: Tensor,
    caps: list[int],
    foreign_Rn: Tensor,
    home_Rn: Tensor,
    rule: int,
) -> Plan:
    """The plan on its device."""
    group_RG = torch.cat([home_Rn, foreign_Rn], 1)
    group_rows_RG = rows_RE.gather(1, group_RG.clamp(min=0)).masked_fill(group_RG < 0, 0)
    start_RG1 = torch.nn.functional.pad(group_rows_RG.cumsum(1), (1, 0))
    return Plan(
        rows_RE=rows_RE.to(device, torch.int32),
        cap_R=torch.tensor(caps, dtype=torch.int32, device=device),
        foreign_expert_Rn=foreign_Rn.to(device, torch.int32),
        group_expert_RG=group_RG.to(device, torch.int32),
        group_start_RG1=start_RG1.to(device, torch.int32),
        rule_1=torch.tensor([rule], dtype=torch.int32, device=device),
    )


def destinations(plan: Plan, counts_RE: Tensor, ids_SK: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Rank and row of each of this rank's routed entries.

    Where rank d computes expert e, its own first min(T[d,e], rows[d,e]) entries in (token, k) order
    stay, at the start of the group. The others fill the free rows of the ranks in ascending order,
    in (source rank, token, k) order. A repeated id in one token is two entries.

    Args:
        plan: made from ``counts_RE``.
        counts_RE: int32 or int64 [R, E], T[r,e].
        ids_SK: int32 or int64 [S, K], the experts of this rank's tokens, -1 for none.
        rank: this rank, 0..R-1.

    Returns:
        (rank_SK, row_SK), int32, -1 where the id is -1.

    Raises:
        ValueError: an id is out of range, or the ids do not have the counts ``counts_RE[rank]``.
    """
    ranks, experts = plan.rows_RE.shape
    _check_ids(ids_SK, counts_RE, (ranks, experts), rank)
    rows_RE, counts_RE = plan.rows_RE.long(), counts_RE.long()
    local_RE = torch.minimum(counts_RE, rows_RE)

    # Entries in (expert, token, k) order, those without an expert first; an entry's place is among
    # its own rank's of that expert. Shapes never depend on the ids, so nothing here waits for them.
    flat_N = ids_SK.reshape(-1)
    sorted_N, entry_N = flat_N.sort(stable=True)
    expert_N = sorted_N.clamp(min=0).long()
    first_E = counts_RE[rank].cumsum(0) - counts_RE[rank] + (flat_N < 0).sum()
    place_N = torch.arange(len(flat_N), device=flat_N.device) - first_E[expert_N]

    # Number the free rows in (expert, rank) order and the leftover entries of all ranks in (expert,
    # source rank, token, k) order: equal numbers meet.
    free_ER, left_ER = (rows_RE - local_RE).T, (counts_RE - local_RE).T
    free_end_ER = free_ER.reshape(-1).cumsum(0).view_as(free_ER)
    free_start_ER = free_end_ER - free_ER
    left_start_ER = left_ER.reshape(-1).cumsum(0).view_as(left_ER) - left_ER
    beyond_N = place_N - local_RE[rank, expert_N]
    number_N = beyond_N + left_start_ER[expert_N, rank]
    stays_N = beyond_N < 0
    to_N = torch.searchsorted(free_end_ER.view(-1), number_N, right=True) % ranks
    to_N = torch.where(stays_N, rank, to_N)
    offset_N = number_N - free_start_ER[expert_N, to_N] + local_RE[to_N, expert_N]
    row_N = _group_start(plan)[to_N, expert_N] + torch.where(stays_N, place_N, offset_N)
    # back to (token, k) order
    both_2N = torch.stack([to_N, row_N]).int().masked_fill(sorted_N < 0, -1)
    rank_SK, row_SK = torch.empty_like(both_2N).index_copy_(1, entry_N, both_2N)
    return rank_SK.view(ids_SK.shape), row_SK.view(ids_SK.shape)


def plan_hash(plan: Plan) -> int:
    """63 bits that are equal on two ranks where their plans are equal, on any device."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in (
        plan.rows_RE,
        plan.cap_R,
        plan.foreign_expert_Rn,
        plan.group_expert_RG,
        plan.group_start_RG1,
    ):
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def _lay_out(total_Rn: Tensor, parts: list[Piece]) -> tuple[Tensor, Tensor]:
    """int64 (rows_RE, foreign_expert_Rn) of homes that keep all but the given pieces."""
    ranks, homes = total_Rn.shape
    rows_RE = torch.zeros(ranks, ranks * homes, dtype=torch.int64)
    rank_E = torch.arange(ranks).repeat_interleave(homes)
    expert_E = torch.arange(ranks * homes)
    rows_RE[rank_E, expert_E] = total_Rn.reshape(-1)
    foreign_Rn = torch.full((ranks, homes), -1, dtype=torch.int64)
    if parts:
        rank_U, donor_U, local_U, rows_U = torch.tensor(parts).unbind(1)
        expert_U = donor_U * homes + local_U
        rows_RE[rank_U, expert_U] = rows_U
        rows_RE.index_put_((donor_U, expert_U), -rows_U, accumulate=True)
        order_U = (rank_U * ranks * homes + expert_U).argsort()
        rank_U, expert_U = rank_U[order_U], expert_U[order_U]
        received_R = torch.bincount(rank_U, minlength=ranks)
        first_R = received_R.cumsum(0) - received_R
        foreign_Rn[rank_U, torch.arange(len(parts)) - first_R[rank_U]] = expert_U
    return rows_RE, foreign_Rn


def _group_start(plan: Plan) -> Tensor:
    """int64 [R, E+1], row at which the group of expert e starts on rank d (where it has one)."""
    ranks, experts = plan.rows_RE.shape
    start_RE1 = plan.rows_RE.new_zeros(ranks, experts + 1, dtype=torch.int64)
    # empty groups write into the extra column
    column_RG = plan.group_expert_RG.long().masked_fill(plan.group_expert_RG < 0, experts)
    return start_RE1.scatter_(1, column_RG, plan.group_start_RG1[:, :-1].long())


def _check_counts(counts_RE: Tensor) -> tuple[int, int]:
    """Refuse counts that are no routing; return (R, n)."""
    if counts_RE.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"counts_RE has dtype {counts_RE.dtype}: give int32 or int64")
    if counts_RE.ndim != 2 or 0 in counts_RE.shape:
        raise ValueError(f"counts_RE has shape {list(counts_RE.shape)}: give [ranks, experts]")
    ranks, experts = counts_RE.shape
    if experts % ranks:
        raise ValueError(
            f"counts_RE has {experts} experts on {ranks} ranks: "
            "the number of experts must be a multiple of the number of ranks"
        )
    least, most = int(counts_RE.min()), int(counts_RE.max())
    if least < 0 or most > INT32_MAX:
        raise ValueError(f"counts_RE holds {least}..{most}: counts are 0..{INT32_MAX}")
    return ranks, experts // ranks


def _check_slots(slots: int, homes: int) -> None:
    if not 1 <= slots <= homes:
        raise ValueError(f"slots {slots} is outside 1..{homes}, the experts of a rank")


def _home_order(home_order_Rn: Tensor | None, ranks: int, homes: int) -> Tensor:
    """int64 [R, n] on the host: the given order, refused if it is none, or descending ids."""
    ascending_Rn = torch.arange(ranks * homes).view(ranks, homes)
    if home_order_Rn is None:
        return ascending_Rn.flip(1)
    if list(home_order_Rn.shape) != [ranks, homes]:
        raise ValueError(
            f"home_order_Rn has shape {list(home_order_Rn.shape)}: give {[ranks, homes]}"
        )
    home_order_Rn = home_order_Rn.cpu().long()
    if not torch.equal(home_order_Rn.sort(1).values, ascending_Rn):
        raise ValueError(
            f"home_order_Rn {home_order_Rn.tolist()} is not, in each row, "
            "a permutation of that rank's experts"
        )
    return home_order_Rn


def _check_ids(ids_SK: Tensor, counts_RE: Tensor, shape: tuple[int, int], rank: int) -> None:
    ranks, experts = shape
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is outside 0..{ranks - 1}")
    if tuple(counts_RE.shape) != shape:
        raise ValueError(f"counts_RE has shape {list(counts_RE.shape)}: the plan has {list(shape)}")
    if ids_SK.ndim != 2 or ids_SK.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"ids_SK has shape {list(ids_SK.shape)} and dtype {ids_SK.dtype}: "
            "give [tokens, experts per token] as int32 or int64"
        )
    valid_SK = (ids_SK >= -1) & (ids_SK < experts)
    # +1 makes room for -1 (and ids that are refused below) in front of the experts
    column_N = (ids_SK.reshape(-1).long() + 1) * valid_SK.reshape(-1)
    own_E1 = torch.zeros(experts + 1, dtype=torch.int64, device=ids_SK.device)
    own_E1.scatter_add_(0, column_N, torch.ones_like(column_N))
    # one wait for the device, and a closer look only where something is wrong
    if valid_SK.all() & (own_E1[1:] == counts_RE[rank]).all():
        return
    if not valid_SK.all():
        raise ValueError(
            f"ids_SK holds {int(ids_SK.min())}..{int(ids_SK.max())}: "
            f"ids are 0..{experts - 1}, or -1 for none"
        )
    raise ValueError(f"ids_SK of rank {rank} do not have the counts in counts_RE[{rank}]")
