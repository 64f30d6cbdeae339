"""Where the counter of tiles must begin, on a model of quack's dynamic schedule."""

from types import SimpleNamespace

import pytest
import torch

from moonep_megatron import quack_gemm
from moonep_megatron.quack_gemm import Product

SMS = 132
CPU = torch.device("cpu")


def _taken(tiles: int, clusters: int, counter: int) -> list[int]:
    """Each cluster takes the tile of its number, then what the counter says, up to the last."""
    clusters = min(clusters, tiles)
    queue, taken = list(range(clusters)), []
    while queue:
        tile = queue.pop(0)
        if tile < tiles:
            taken.append(tile)
            queue.append(clusters + counter)
            counter = 0 if counter >= tiles - 1 else counter + 1
    assert counter == 0, "the counter wraps, so tiles would be taken twice"
    return taken


@pytest.mark.parametrize("clusters", [1, 60, 66, SMS])
@pytest.mark.parametrize("groups", [1, 4, 33])
def test_every_tile_up_to_the_last_group_with_rows_is_taken_once(groups, clusters, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=SMS)
    )
    product = Product("weight", False, 1000, 700)
    tile = quack_gemm.tile_of(product)
    of_a_group = -(-1000 // (tile.tile_M * tile.cluster_M)) * -(-700 // tile.tile_N)
    order = quack_gemm._backwards(groups, CPU).tolist()
    for used in range(groups + 1):
        ends = [5 * (i + 1) for i in range(used)] + [5 * used] * (groups - used)
        bounds = torch.tensor([0, *ends], dtype=torch.int32)
        counter = int(quack_gemm._behind_the_last(product, bounds))
        taken = _taken(groups * of_a_group, clusters, counter)
        done = [(order[tile // of_a_group], tile % of_a_group) for tile in taken]
        assert len(set(done)) == len(done)
        assert {(g, t) for g in range(used) for t in range(of_a_group)} <= set(done)
        idle = len(done) - used * of_a_group
        assert idle <= of_a_group + SMS, "empty slots are written nearly as often as full ones"
