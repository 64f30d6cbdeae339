"""Grouped products over row groups with one weight each.

Row groups are consecutive: group i of a launch is rows ``bounds[i]`` to ``bounds[i+1]`` (absolute
rows). Boundaries on the device go to `moonep_megatron.quack_gemm`. With boundaries on the host it
is ``torch.nn.functional.grouped_mm`` where it takes the dtype and the strides, otherwise one
product a group.

Letters: N grouped rows, M receive rows, g groups of a launch, [out, in] a weight's shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from moonep_megatron import quack_gemm
from moonep_megatron.backends.base import Bounds

_GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes; grouped_mm refuses other strides


def rows_times_weights(
    rows: Tensor, weights_goi: Tensor, out: Tensor, bounds: Bounds, index: Tensor | None
) -> None:
    """``out[group] = rows[group] @ weight.T`` for every group.

    Args:
        rows: [N, in], or [M, in] with ``index`` [N] naming the row of each grouped row.
        weights_goi: [g, out, in], any strides whose last two dimensions are dense. The transposed
            view ``weights.mT`` gives the data gradient.
        out: [N, out], written in bounds[0]..bounds[-1] only.
        bounds: g + 1 ascending rows.
    """
    if isinstance(bounds, Tensor):
        quack_gemm.rows_times_weights(rows, weights_goi, out, bounds, index)
        return
    first, last = bounds[0], bounds[-1]
    if first == last:
        return
    x = _read(rows, first, last, index)
    if _groupable(x, weights_goi):
        ends = torch.tensor(bounds[1:], dtype=torch.int32, device=x.device) - first
        out[first:last] = F.grouped_mm(x, weights_goi.mT, offs=ends)
        return
    for i, a, b in _groups(bounds):
        torch.mm(x[a - first : b - first], weights_goi[i].mT, out=out[a:b])


def add_weight_gradients(
    d_out: Tensor,
    rows: Tensor,
    grads_goi: Tensor,
    bounds: Bounds,
    *,
    accumulate: bool,
    out_index: Tensor | None = None,
    row_index: Tensor | None = None,
) -> None:
    """``grad[group] (+)= d_out[group].T @ rows[group]``, in the gradient's own precision.

    Args:
        d_out: [N, out], or [M, out] with ``out_index`` [N].
        rows: [N, in], or [M, in] with ``row_index`` [N].
        grads_goi: [g, out, in], any strides; an empty group adds nothing.
        accumulate: add to the gradient, or overwrite it; then what lies behind the last group with
            rows is zero or as before, and nobody may read it.
    """
    if isinstance(bounds, Tensor):
        quack_gemm.add_weight_gradients(
            d_out,
            rows,
            grads_goi,
            bounds,
            accumulate=accumulate,
            out_index=out_index,
            row_index=row_index,
        )
        return
    if not accumulate:
        grads_goi.zero_()
    for i, a, b in _groups(bounds):
        d, x = _read(d_out, a, b, out_index), _read(rows, a, b, row_index)
        grads_goi[i] += wide_product(d.mT, x, grads_goi.dtype)


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` rounded once to ``dtype``, never through a narrower one."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    wide = torch.promote_types(a.dtype, dtype)
    return (a.to(wide) @ b.to(wide)).to(dtype)


def _read(rows: Tensor, first: int, last: int, index: Tensor | None) -> Tensor:
    """Grouped rows first..last, read through ``index`` where given."""
    return rows[first:last] if index is None else rows.index_select(0, index[first:last])


def _groups(bounds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The groups that have rows: (i, first row, last row + 1)."""
    return ((i, a, b) for i, (a, b) in enumerate(pairwise(bounds)) if a < b)


def _groupable(x: Tensor, weights_goi: Tensor) -> bool:
    strides = [s * x.itemsize for t in (x, weights_goi) for s in t.stride() if s != 1]
    return x.dtype in _GROUPED_DTYPES and all(s % _ALIGNMENT == 0 for s in strides)
