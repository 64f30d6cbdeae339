"""Dispatch, gather and presum over skewed routings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from moonep_megatron.kernels import dispatch as dispatch_kernel
from moonep_megatron.kernels import gather as gather_kernel
from moonep_megatron.kernels import presum as presum_kernel
from moonep_megatron.kernels import sync
from moonep_megatron.kernels.rows import RowMemory
from torch import Tensor

from kernel_bench.ceilings import presum_sms
from kernel_bench.measure import TIMEOUT_NS, Bench
from kernel_bench.ranks import Shape
from kernel_bench.routing import Route, route
from moonep_megatron.backends.memory import Regions

DTYPE = torch.bfloat16
# Bytes of an int32 or fp32.
WORD = 4


class Rows:
    """The symmetric memory of a shape, as tensors too."""

    def __init__(self, bench: Bench, shape: Shape) -> None:
        self.bench, self.shape = bench, shape
        self.grouped = shape.tokens * shape.topk
        most, ranks = min(bench.ranks, shape.topk) * shape.tokens, bench.ranks
        regions = Regions()
        places = {
            "flags": regions.add((sync.STAGES, ranks), torch.int32),
            "receive": regions.add((most, shape.width), DTYPE),
            "combine": regions.add((most, shape.width), DTYPE),
            "rows_of": regions.add((most, shape.topk), torch.int32),
            "source_row": regions.add((self.grouped,), torch.int32),
            "probs": regions.add((self.grouped,), torch.float32),
            "d_probs": regions.add((self.grouped,), torch.float32),
        }
        memory = bench.memory(regions)
        self.kernel = RowMemory(
            memory=memory,
            **places,
            max_tokens=shape.tokens,
            rank=bench.rank,
            ranks=ranks,
            timeout_ns=TIMEOUT_NS,
        )
        self.receive, self.combine, self.rows_of, self.source_row, self.probs, self.d_probs = (
            memory.local(region) for name, region in places.items() if name != "flags"
        )

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self.shape.width * DTYPE.itemsize

    def loads(self) -> Iterator[tuple[Route, Tensor, Tensor, dict[str, Any]]]:
        """Routes, this rank's destinations, and what a result says about them."""
        for maxvio in self.bench.options.loads:
            at = route(self.shape, self.bench.ranks, maxvio, self.bench.device)
            row = {"shape": str(self.shape), "load": maxvio, "maxvio": at.maxvio}
            yield at, at.rank[self.bench.rank], at.row[self.bench.rank], row


def bench_dispatch(bench: Bench) -> None:
    """With and without metadata."""
    for shape in bench.options.shapes:
        rows = Rows(bench, shape)
        form = {"topk": shape.topk, "by_token": bench.ranks <= shape.topk}
        kernels = [dispatch_kernel.Dispatch(**form, metadata=m) for m in (True, False)]
        bench.warm([*kernels, dispatch_kernel.FreeReceive()])
        x = [bench.noise((shape.tokens, shape.width), r) for r in range(bench.ranks)]
        probs = [
            bench.noise((shape.tokens, shape.topk), 100 + r, torch.float32)
            for r in range(bench.ranks)
        ]
        free = partial(dispatch_kernel.free_receive, rows.kernel)
        for at, rank_sK, row_sK, row in rows.loads():
            for metadata in (True, False):
                for sms in bench.options.sms:
                    step = partial(
                        dispatch_kernel.dispatch,
                        rows.kernel,
                        x[bench.rank],
                        rank_sK,
                        row_sK,
                        probs[bench.rank] if metadata else None,
                        sms=sms,
                    )
                    name = "with metadata" if metadata else "rows alone"
                    bench.measure(
                        row | {"form": name, "link": "push", "sms": sms},
                        _dispatch_bytes(rows, at, metadata),
                        step,
                        check=partial(
                            _check_dispatch, rows, at, x, probs if metadata else None, step, free
                        ),
                        after=free,
                    )


def _dispatch_bytes(rows: Rows, at: Route, metadata: bool) -> int:
    nbytes_RR = at.tokens_RR * rows.row_bytes
    if metadata:
        # source_row and probs of entries, and rows_of: of all tokens with R <= K, else of those
        # that cross.
        tokens_RR = at.tokens_RR
        if at.by_token:
            tokens_RR = torch.full_like(tokens_RR, rows.shape.tokens)
        nbytes_RR = nbytes_RR + at.entries_RR * 2 * WORD + tokens_RR * rows.shape.topk * WORD
    return at.busiest(nbytes_RR)


def _check_dispatch(
    rows: Rows,
    at: Route,
    x: list[Tensor],
    probs: list[Tensor] | None,
    step: Callable[[], object],
    free: Callable[[], object],
) -> str:
    me = rows.bench.rank
    for tensor in (rows.receive, rows.probs):
        tensor.fill_(float("nan"))
    for tensor in (rows.rows_of, rows.source_row):
        tensor.fill_(-7)
    rows.bench.align()
    step()
    wrong = []
    for r in range(at.ranks):
        token, k = at.carriers(r, me).nonzero(as_tuple=True)
        if not torch.equal(rows.receive[at.receive[r][token, k].long()], x[r][token]):
            wrong.append(f"rows of rank {r}")
    if probs is not None:
        rows_of, cap = at.rows_of(me), at.caps[me]
        used = slice(None) if at.by_token else rows_of[:, 0] >= 0
        wanted = {
            "rows_of": (rows.rows_of[used], rows_of[used]),
            "source_row": (rows.source_row[:cap], at.on(me, at.receive)),
            "probs": (rows.probs[:cap], at.on(me, probs)),
        }
        wrong += [name for name, pair in wanted.items() if not torch.equal(*pair)]
    free()
    rows.bench.align()
    return ", ".join(wrong)


def bench_gather(bench: Bench) -> None:
    """With and without the gradients of the probabilities."""
    for shape in bench.options.shapes:
        rows = Rows(bench, shape)
        form = {"topk": shape.topk, "by_token": bench.ranks <= shape.topk, "dtype": "BFloat16"}
        kernels = [gather_kernel.Gather(**form, d_probs=d_probs) for d_probs in (True, False)]
        bench.warm([*kernels, presum_kernel.Presum(**form)])
        rows.combine.copy_(_combine(rows, bench.rank))
        rows.d_probs.copy_(_gradients(rows, bench.rank))
        bench.align()
        out = torch.empty(shape.tokens, shape.width, dtype=DTYPE, device=bench.device)
        d_probs = torch.empty(shape.tokens, shape.topk, device=bench.device)
        # The sums are there already: this presum has no rows, and only says so.
        signal = partial(
            presum_kernel.presum,
            rows.kernel,
            out[:1],
            rows.rows_of[:0],
            rows.source_row[:1],
            torch.zeros((), dtype=torch.int32, device=bench.device),
            sms=1,
        )
        for at, rank_sK, row_sK, row in rows.loads():
            expected = _gathered(rows, at)
            for name, target in (("with d_probs", d_probs), ("rows alone", None)):
                for sms in bench.options.sms:
                    step = partial(
                        gather_kernel.gather, rows.kernel, rank_sK, row_sK, out, target, sms=sms
                    )
                    nbytes_RR = at.tokens_RR * rows.row_bytes
                    if target is not None:
                        nbytes_RR = nbytes_RR + at.entries_RR * WORD
                    bench.measure(
                        row | {"form": name, "link": "pull", "sms": sms},
                        at.busiest(nbytes_RR),
                        step,
                        check=partial(
                            _check_gather, bench, (signal, step), (out, target), expected
                        ),
                        before=signal,
                    )


def _combine(rows: Rows, d: int) -> Tensor:
    return rows.bench.noise(rows.combine.shape, 200 + d)


def _gradients(rows: Rows, d: int) -> Tensor:
    return rows.bench.noise(rows.d_probs.shape, 300 + d, torch.float32)


def _gathered(rows: Rows, at: Route) -> tuple[Tensor, Tensor]:
    """Rows and gradients of this rank's tokens: sums by ascending rank, rounded once."""
    me = rows.bench.rank
    sums = torch.zeros(rows.shape.tokens, rows.shape.width, device=rows.bench.device)
    gradients = torch.zeros(rows.shape.tokens, rows.shape.topk, device=rows.bench.device)
    for d in range(at.ranks):
        token, k = at.carriers(me, d).nonzero(as_tuple=True)
        sums[token] += _combine(rows, d)[at.receive[me][token, k].long()].float()
        here = at.rank[me] == d
        gradients[here] = _gradients(rows, d)[at.row[me][here].long()]
    return sums.to(DTYPE), gradients


def _check_gather(
    bench: Bench,
    launches: tuple[Callable[[], object], ...],
    outputs: tuple[Tensor, Tensor | None],
    expected: tuple[Tensor, Tensor],
) -> str:
    for tensor in outputs:
        if tensor is not None:
            tensor.fill_(float("nan"))
    bench.align()
    for launch in launches:
        launch()
    wrong = [
        name
        for name, got, wanted in zip(("rows", "d_probs"), outputs, expected, strict=True)
        if got is not None and not torch.equal(got, wanted)
    ]
    bench.align()
    return ", ".join(wrong)


def bench_presum(bench: Bench) -> None:
    """Local memory alone; ranks run side by side."""
    for shape in bench.options.shapes:
        rows, me = Rows(bench, shape), bench.rank
        form = {"topk": shape.topk, "by_token": bench.ranks <= shape.topk, "dtype": "BFloat16"}
        bench.warm([presum_kernel.Presum(**form), gather_kernel.Gather(**form, d_probs=False)])
        grouped = bench.noise((rows.grouped, shape.width), 400 + me)
        out = torch.empty(shape.tokens, shape.width, dtype=DTYPE, device=bench.device)
        for at, rank_sK, row_sK, row in rows.loads():
            rows.rows_of.copy_(at.rows_of(me))
            rows.source_row[: at.caps[me]] = at.on(me, at.receive)
            cap = torch.tensor(at.caps[me], dtype=torch.int32, device=bench.device)
            # The sums are not fetched: this gather has no tokens, and only says that they were.
            signal = partial(
                gather_kernel.gather, rows.kernel, rank_sK[:0], row_sK[:0], out[:0], sms=1
            )
            expected = _presummed(rows, grouped)
            for sms in presum_sms(bench.all_sms):
                step = partial(
                    presum_kernel.presum,
                    rows.kernel,
                    grouped,
                    rows.rows_of,
                    rows.source_row,
                    cap,
                    sms=sms,
                )
                bench.measure(
                    row | {"form": "read and written", "link": "local", "sms": sms},
                    _presum_bytes(rows, at),
                    step,
                    check=partial(_check_presum, rows, (step, signal), expected),
                    after=signal,
                )


def _presum_bytes(rows: Rows, at: Route) -> int:
    """Of the rank that moves most: grouped rows, sums, and the table of rows."""
    arriving_R = at.tokens_RR.sum(0).tolist()
    moved = max(cap + tokens for cap, tokens in zip(at.caps, arriving_R, strict=True))
    return moved * rows.row_bytes + rows.rows_of.numel() * WORD


def _presummed(rows: Rows, grouped: Tensor) -> Tensor:
    """The sums of the receive rows that have grouped rows, in order of k, rounded once."""
    table = rows.rows_of[rows.rows_of[:, 0] >= 0].long()
    sums = torch.zeros(len(table), rows.shape.width, device=grouped.device)
    for column in table.unbind(1):
        (m,) = (column >= 0).nonzero(as_tuple=True)
        sums[m] += grouped[column[m]].float()
    return sums.to(DTYPE)


def _check_presum(rows: Rows, launches: tuple[Callable[[], object], ...], expected: Tensor) -> str:
    rows.combine.fill_(float("nan"))
    rows.bench.align()
    for launch in launches:
        launch()
    same = torch.equal(rows.combine[rows.rows_of[:, 0] >= 0], expected)
    rows.bench.align()
    return "" if same else "sums"
