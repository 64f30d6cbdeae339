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

    Only one of the operands may be read by index. What is overwritten is written for groups up to
    the last with rows; most of the others are left as they are, for they are most of a rank's
    slots, and zeros for all of them would cost more than many a group's product.
    """
    a, b, out, index = d_out.mT, rows.mT, grads_goi, out_index
    if row_index is not None:  # only the first operand is gathered, so compute the transpose
        assert out_index is None
        a, b, out, index = rows.mT, d_out.mT, grads_goi.mT, row_index
    product = Product("weight", index is not None, *out.shape[1:])
    counter, order = None, None
    if not accumulate:
        counter = _behind_the_last(product, bounds)
        order = _backwards(len(bounds) - 1, bounds.device)
    _launch(
        product,
        a,
        b,
        out,
        index,
        counter,
        cu_seqlens_k=bounds,
        add_to_output=accumulate,
        batch_idx_permute=order,
    )


def _behind_the_last(product: Product, bounds: Tensor) -> Tensor:
    """The counter of tiles, int32 [1], at the first that matters if groups are taken backwards.

    quack's clusters take the tiles of their own numbers first, then one after the other from the
    counter, which therefore starts at so many fewer; no GPU has more clusters than SMs.
    """
    tile = tile_of(product)
    clusters = torch.cuda.get_device_properties(bounds.device).multi_processor_count
    of_a_group = -(-product.m // (tile.tile_M * tile.cluster_M)) * -(-product.n // tile.tile_N)
    # The ends of the last group with rows and of all groups behind it.
    ends = (bounds[1:] == bounds[-1]).sum(dtype=torch.int32).view(1)
    return ends.mul_(of_a_group).sub_(of_a_group + clusters).clamp_(min=0)


@cache
def _backwards(groups: int, device: torch.device) -> Tensor:
    return torch.arange(groups - 1, -1, -1, dtype=torch.int32, device=device)


def tile_of(product: Product) -> Tile:
    """What the table says, or the default."""
    return table().get(product, DEFAULT)


def _launch(
    product: Product,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    index: Tensor | None,
    counter: Tensor | None = None,
    **varlen: object,
) -> None:
    from quack.gemm import gemm  # noqa: PLC0415 - needs a GPU build of the package

    if counter is None:
        counter = torch.zeros(1, dtype=torch.int32, device=a.device)
    gemm(
        a,
        b,
        out,
        None,
        counter,
        **asdict(tile_of(product)),
        cluster_N=1,
        is_dynamic_persistent=DYNAMIC,
        A_idx=index,
        **varlen,
    )
