"""Grouped products whose row boundaries are on the device: quack's grouped GEMM for Hopper.

The kernels read the boundaries themselves, so nothing waits for them and groups need no padding.
The tile schedule is always dynamic: a static one would make the blocks on SMs that a push or pull
occupies wait for its end and then do their whole share, which doubles the time of the product.

Letters as in `moonep_megatron.gemm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Tile of a block, blocks of a cluster, schedule: quack's own default. Fixed, never timed while
# training, so that all ranks and runs choose alike.
TILE = {"tile_M": 128, "tile_N": 192, "cluster_M": 2, "cluster_N": 1, "pingpong": True}
DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 8  # elements: rows of 16 bytes


def refusal(dtype: torch.dtype, *widths: int) -> str | None:
    """Why quack cannot take rows of this dtype and these widths; None where it can."""
    if dtype not in DTYPES:
        return f"it multiplies {' or '.join(map(str, DTYPES))}, not {dtype}"
    if any(width % _ALIGNMENT for width in widths):
        return f"it takes widths that are multiples of {_ALIGNMENT}, not {list(widths)}"
    return None


def rows_times_weights(
    rows: Tensor, weights_goi: Tensor, out: Tensor, bounds: Tensor, index: Tensor | None
) -> None:
    """See `moonep_megatron.gemm.rows_times_weights`; ``bounds`` int32 [g + 1] on the device."""
    _launch(rows, weights_goi, out, index, cu_seqlens_m=bounds)


def add_weight_gradients(
    d_out: Tensor,
    rows: Tensor,
    grads_goi: Tensor,
    bounds: Tensor,
    *,
    accumulate: bool,
    out_index: Tensor | None = None,
    row_index: Tensor | None = None,
) -> None:
    """See `moonep_megatron.gemm.add_weight_gradients`; ``bounds`` int32 [g + 1] on the device.

    Only one of the operands may be read by index.
    """
    a, b, out, index = d_out.mT, rows.mT, grads_goi, out_index
    if row_index is not None:  # only the first operand is gathered, so compute the transpose
        assert out_index is None
        a, b, out, index = rows.mT, d_out.mT, grads_goi.mT, row_index
    _launch(a, b, out, index, cu_seqlens_k=bounds, add_to_output=accumulate)


def _launch(a: Tensor, b: Tensor, out: Tensor, index: Tensor | None, **varlen: object) -> None:
    from quack.gemm import gemm  # noqa: PLC0415 - needs a GPU build of the package

    gemm(
        a,
        b,
        out,
        None,
        torch.zeros(1, dtype=torch.int32, device=a.device),
        **TILE,
        is_dynamic_persistent=True,
        A_idx=index,
        **varlen,
    )
