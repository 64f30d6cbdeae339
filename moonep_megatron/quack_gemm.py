"""Grouped products whose row boundaries are on the device: quack's grouped GEMM for Hopper.

The kernels read the boundaries themselves, so nothing waits for them and groups need no padding.
The tile schedule is always dynamic: a static one would make the blocks on SMs that a push or pull
occupies wait for its end and then do their whole share, which doubles the time of the product.

Letters as in `moonep_megatron.gemm`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Tile of a block, blocks of a cluster along the rows, two tiles in turn (pingpong) or one."""

    tile_M: int
    tile_N: int
    cluster_M: int
    pingpong: bool = False


@dataclass(frozen=True)
class Product:
    """One kind of grouped product, as the table of tiles knows it.

    Attributes:
        kind: ``forward`` (rows @ weight.T), ``data`` (rows @ weight) or ``weight`` (the gradient).
        indexed: one operand's rows are read by index.
        m, n: rows and columns of the result's groups as quack sees them; of ``forward`` and
            ``data`` only n, the width of the result, is known, and m is that of the operand.
    """

    kind: str
    indexed: bool
    m: int
    n: int


# quack's own default, for products that the table does not have.
DEFAULT = Tile(128, 192, 2, pingpong=True)
# Filled by scripts/tune_gemm.py. Never timed while training: all ranks and runs choose alike.
TABLE = Path(__file__).with_name("gemm_tiles.json")
DYNAMIC = True  # the schedule; scripts/tune_gemm.py also times the static one
DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 8  # elements: rows of 16 bytes


def refusal(dtype: torch.dtype, *widths: int) -> str | None:
    """Why quack cannot take rows of this dtype and these widths; None where it can."""
    if dtype not in DTYPES:
        return f"it multiplies {' or '.join(map(str, DTYPES))}, not {dtype}"
    if any(width % _ALIGNMENT for width in widths):
        return f"it takes widths that are multiples of {_ALIGNMENT}, not {list(widths)}"
    return None


@cache
def table() -> dict[Product, Tile]:
    """The committed choices."""
    rows = json.loads(TABLE.read_text())
    return {Product(**row["product"]): Tile(**row["tile"]) for row in rows}


def rows_times_weights(
    rows: Tensor, weights_goi: Tensor, out: Tensor, bounds: Tensor, index: Tensor | None
) -> None:
    """See `moonep_megatron.gemm.rows_times_weights`; ``bounds`` int32 [g + 1] on the device."""
    kind = "forward" if weights_goi.stride(-1) == 1 else "data"
    product = Product(kind, index is not None, weights_goi.shape[2], weights_goi.shape[1])
    _launch(product, rows, weights_goi, out, index, cu_seqlens_m=bounds)


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
    product = Product("weight", index is not None, *out.shape[1:])
    _launch(product, a, b, out, index, cu_seqlens_k=bounds, add_to_output=accumulate)


def _launch(
    product: Product, a: Tensor, b: Tensor, out: Tensor, index: Tensor | None, **varlen: object
) -> None:
    from quack.gemm import gemm  # noqa: PLC0415 - needs a GPU build of the package

    gemm(
        a,
        b,
        out,
        None,
        torch.zeros(1, dtype=torch.int32, device=a.device),
        **asdict(table().get(product, DEFAULT)),
        cluster_N=1,
        is_dynamic_persistent=DYNAMIC,
        A_idx=index,
        **varlen,
    )
