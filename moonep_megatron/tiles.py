"""Which tile a grouped product uses: a table, so that all ranks and runs choose alike.

Nothing is timed during training. ``scripts/bench_tiles.py`` measures candidates and prints rows
for the table.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Rows and columns of a block's tile, blocks of a cluster, and quack's ping-pong schedule."""

    tile_M: int
    tile_N: int
    cluster_M: int
    cluster_N: int
    pingpong: bool


DEFAULT = Tile(128, 192, 2, 1, True)


def tile(shape: tuple[int, ...], *, gathered: bool, weight_gradient: bool) -> Tile:
    """The tile for an output of this shape.

    Args:
        shape: of one output matrix; rows of a data product are not known on the host.
        gathered: whether the first operand is read by index.
        weight_gradient: rows are the inner dimension.
    """
    return DEFAULT
