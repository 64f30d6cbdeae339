"""Ragged random routings with everything that dispatch and combine should make of them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from harness import TIMEOUT_NS
from moonep_megatron.kernels import sync
from moonep_megatron.kernels.rows import RowMemory
from torch import Tensor

from moonep_megatron.backends.base import first_entry, receive_rows
from moonep_megatron.backends.memory import Regions, SymmetricMemory
from moonep_megatron.plan import destinations, make_plan

LOADS = ("even", "one expert", "hot rank", "zipf")
HOMES = 3
# What integers hold before an operation: no row, no rank, not "none" either.
POISON = -7


@dataclass(frozen=True)
class Case:
    """S, K, H and the row dtype."""

    tokens: int
    topk: int
    width: int
    dtype: torch.dtype


CASES = (
    Case(48, 8, 7168, torch.bfloat16),
    Case(33, 8, 8, torch.float32),
    Case(40, 8, 136, torch.float16),
    Case(70, 2, 136, torch.float16),
    Case(50, 1, 64, torch.bfloat16),
)
NBYTES = 32 << 20


def symmetric(group: dist.ProcessGroup, device: torch.device) -> SymmetricMemory:
    """Room for the regions of any case, laid out by `row_memory`."""
    return SymmetricMemory(
        group,
        NBYTES,
        device,
        control_ints=sync.CONTROL_INTS,
        fault_ints=len(sync.FAULT_FIELDS),
    )


def row_memory(memory: SymmetricMemory, case: Case) -> RowMemory:
    """The regions of a case. The flags lie in front in all of them, so they live on."""
    group = memory.group
    ranks, regions = group.size(), Regions()
    most, grouped = min(ranks, case.topk) * case.tokens, case.tokens * case.topk
    flags = regions.add((sync.STAGES, ranks), torch.int32)
    rows = RowMemory(
        memory=memory,
        flags=flags,
        receive=regions.add((most, case.width), case.dtype),
        combine=regions.add((most, case.width), case.dtype),
        rows_of=regions.add((most, case.topk), torch.int32),
        source_row=regions.add((grouped,), torch.int32),
        probs=regions.add((grouped,), torch.float32),
        d_probs=regions.add((grouped,), torch.float32),
        max_tokens=case.tokens,
        rank=group.rank(),
        ranks=ranks,
        timeout_ns=TIMEOUT_NS,
    )
    assert regions.nbytes <= NBYTES
    return rows


def poison(*tensors: Tensor) -> None:
    """NaN in floats, `POISON` in integers."""
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.dtype.is_floating_point else POISON)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    tensor = torch.empty(*shape, dtype=dtype, device=device)
    poison(tensor)
    return tensor


def noise(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same numbers on every rank; rows lie 16 bytes further apart than they are long."""
    generator = torch.Generator(device).manual_seed(seed)
    wide = torch.randn(
        *shape[:-1], shape[-1] + 16 // dtype.itemsize, generator=generator, device=device
    )
    return wide.to(dtype)[..., : shape[-1]]


def barrier(group: dist.ProcessGroup) -> None:
    """Every rank's kernels have ended."""
    torch.cuda.synchronize()
    dist.barrier(group)


def same(name: str, got: Tensor, expected: Tensor) -> None:
    """Bit for bit, NaN included."""
    kind = {2: torch.int16, 4: torch.int32}[got.dtype.itemsize]
    got_bits, bits = got.contiguous().view(kind), expected.contiguous().view(kind)
    if not torch.equal(got_bits, bits):
        assert got_bits.shape == bits.shape, f"{name}: {got.shape} for {expected.shape}"
        wrong = (got_bits != bits).nonzero()
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{name}: {len(wrong)} of {got.numel()} elements differ, first at {at}: "
            f"{got[at].item()} for {expected[at].item()}"
        )


class Routing:
    """The destinations of every rank's tokens, the same on every rank, on the device.

    Attributes:
        rank, row, receive: int32 [s_r, K] of each rank r; ``receive`` is the receive row.
        caps: grouped rows of each rank.
    """

    def __init__(self, case: Case, ranks: int, epoch: int, device: torch.device) -> None:
        self.case, self.ranks, self.device = case, ranks, device
        self.by_token = ranks <= case.topk
        self.most, self.grouped = min(ranks, case.topk) * case.tokens, case.tokens * case.topk
        generator = torch.Generator().manual_seed(1000 * epoch + ranks)
        experts = ranks * HOMES
        ids = [self._ids(r, epoch, experts, generator) for r in range(ranks)]
        counts = torch.stack([torch.bincount(i[i >= 0], minlength=experts) for i in ids])
        plan = make_plan(counts)
        self.caps = plan.cap_R.tolist()
        there = [destinations(plan, counts, ids[r], r) for r in range(ranks)]
        self.rank = [rank.to(device) for rank, _ in there]
        self.row = [row.to(device) for _, row in there]
        self.receive = [
            receive_rows(rank, row, r, ranks, case.tokens)
            for r, (rank, row) in enumerate(zip(self.rank, self.row, strict=True))
        ]

    def _ids(self, rank: int, epoch: int, experts: int, generator: torch.Generator) -> Tensor:
        """Repeats, entries without an expert, tokens without entries, ranks with 0 and S tokens."""
        load = LOADS[epoch % len(LOADS)]
        popularity = {
            "even": torch.ones(experts),
            "one expert": torch.eye(experts)[epoch % experts],
            "hot rank": torch.ones(experts) * 0.01,
            "zipf": 1 / torch.arange(1.0, experts + 1),
        }[load]
        if load == "hot rank":
            popularity[-HOMES:] = 1
        most = self.case.tokens
        tokens = int(torch.randint(most + 1, (), generator=generator))
        tokens = {0: most, 1: 0}.get((rank + epoch) % 4, tokens)
        ids = torch.multinomial(
            popularity, tokens * self.case.topk + 1, replacement=True, generator=generator
        )[1:].view(tokens, self.case.topk)
        ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
        ids[:1] = -1
        return ids

    def per_rank(self, kind: int, epoch: int, dtype: torch.dtype, width: int) -> list[Tensor]:
        """Noise [s_r, width] of every rank."""
        return [
            noise(len(rank), width, seed=97 * epoch + 7 * r + kind, dtype=dtype, device=self.device)
            for r, rank in enumerate(self.rank)
        ]

    def received(self, d: int, x: list[Tensor]) -> Tensor:
        """Receive rows of rank d; those without a token hold poison."""
        out = poisoned(self.most, self.case.width, dtype=self.case.dtype, device=self.device)
        for r in range(self.ranks):
            token, k = (self.rank[r] == d).nonzero(as_tuple=True)
            out[self.receive[r][token, k].long()] = x[r][token]
        return out

    def rows_of(self, d: int) -> Tensor:
        """``rows_of`` of rank d; with R > K, rows that no token arrives in hold poison."""
        out = poisoned(self.most, self.case.topk, dtype=torch.int32, device=self.device)
        if self.by_token:
            out.fill_(-1)
        for r in range(self.ranks):
            here = self.rank[r] == d
            token, k = here.nonzero(as_tuple=True)
            m = self.receive[r][token, k].long()
            out[m] = -1
            out[m, (here.cumsum(1) - 1)[token, k]] = self.row[r][token, k]
        return out

    def source_row(self, d: int) -> Tensor:
        """``source_row`` of rank d, poison behind its cap."""
        return self._grouped(d, self.receive, torch.int32)

    def probs(self, d: int, probs: list[Tensor]) -> Tensor:
        """``probs`` of rank d, poison behind its cap."""
        return self._grouped(d, probs, torch.float32)

    def _grouped(self, d: int, values: list[Tensor], dtype: torch.dtype) -> Tensor:
        out = poisoned(self.grouped, dtype=dtype, device=self.device)
        for r in range(self.ranks):
            here = self.rank[r] == d
            out[self.row[r][here].long()] = values[r][here]
        return out

    def presummed(self, d: int, rows: Tensor) -> Tensor:
        """Combine rows of rank d: fp32 sums in order of k, rounded once; elsewhere poison."""
        rows_of = self.rows_of(d)
        out = poisoned(self.most, self.case.width, dtype=self.case.dtype, device=self.device)
        sums = torch.zeros(self.most, self.case.width, device=self.device)
        for column in rows_of.unbind(1):
            (m,) = (column >= 0).nonzero(as_tuple=True)
            sums[m] += rows[column[m].long()].float()
        (m,) = (rows_of[:, 0] >= 0).nonzero(as_tuple=True)
        out[m] = sums[m].to(out.dtype)
        return out

    def gathered(self, r: int, combine: list[Tensor]) -> Tensor:
        """Rows of rank r's tokens: fp32 sums over destinations in ascending order, rounded once."""
        rank, receive = self.rank[r], self.receive[r]
        carries = first_entry(rank) == torch.arange(self.case.topk, device=self.device)
        sums = torch.zeros(len(rank), self.case.width, device=self.device)
        for d in range(self.ranks):
            token, k = (carries & (rank == d)).nonzero(as_tuple=True)
            sums[token] += combine[d][receive[token, k].long()].float()
        return sums.to(self.case.dtype)

    def returned(self, r: int, d_probs: list[Tensor]) -> Tensor:
        """Each entry's element of ``d_probs`` on its rank, 0 for none."""
        out = torch.zeros(self.rank[r].shape, device=self.device)
        for d in range(self.ranks):
            here = self.rank[r] == d
            out[here] = d_probs[d][self.row[r][here].long()]
        return out
