"""Weight gradients of slots: right where rows are, and not written for most empty slots."""

from itertools import pairwise

import pytest
import torch

from moonep_megatron import gemm, quack_gemm
from moonep_megatron.quack_gemm import Product

ROWS, OUT, IN = 1000, 1536, 1024
# Tiles of one group: 6 or 12 x 6, so that 40 groups are more than any GPU has clusters.
GROUPS = 40


def _case(counts: list[int], indexed: str):
    """Operands, fp64 gradients of the groups, and the arguments of a product."""
    g = torch.Generator("cuda").manual_seed(sum(counts))

    def random(*size):
        return torch.randn(size, generator=g, dtype=torch.bfloat16, device="cuda")

    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device="cuda")
    d_out, rows = random(ROWS, OUT), random(ROWS, IN)
    index = torch.randperm(ROWS, generator=g, device="cuda").int()
    named = {"out_index": index} if indexed == "out" else {"row_index": index}
    d, x = d_out.double(), rows.double()
    d, x = (d[index.long()], x) if indexed == "out" else (d, x[index.long()])
    bounds = starts.tolist()
    wanted = [d[a:b].T @ x[a:b] for a, b in pairwise(bounds)]
    return d_out, rows, starts, named, wanted


@pytest.mark.parametrize("indexed", ["out", "row"])
@pytest.mark.parametrize("used", [0, 1, 3, GROUPS - 1, GROUPS])
def test_slots_behind_the_last_are_left_alone(used: int, indexed: str):
    counts = [17 * (i % 4) for i in range(used - 1)] + [29] * (used > 0) + [0] * (GROUPS - used)
    d_out, rows, starts, named, wanted = _case(counts, indexed)
    grads = torch.full((GROUPS, OUT, IN), float("nan"), device="cuda")
    gemm.add_weight_gradients(d_out, rows, grads, starts, accumulate=False, **named)
    for i in range(used):
        torch.testing.assert_close(grads[i].double(), wanted[i], rtol=1e-5, atol=1e-4)
    untouched = sum(bool(grad.isnan().all()) for grad in grads[used:])
    product = Product("weight", True, *((OUT, IN) if indexed == "out" else (IN, OUT)))
    tile = quack_gemm.tile_of(product)
    of_a_group = (product.m // tile.tile_M // tile.cluster_M) * -(-product.n // tile.tile_N)
    clusters = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert untouched >= GROUPS - used - 1 - -(-clusters // of_a_group)


@pytest.mark.parametrize("indexed", ["out", "row"])
def test_homes_are_added_to(indexed: str):
    counts = [0, 300, 0, 129, 0, 0]
    d_out, rows, starts, named, wanted = _case(counts, indexed)
    grads = torch.ones(len(counts), OUT, IN, device="cuda")
    gemm.add_weight_gradients(d_out, rows, grads, starts, accumulate=True, **named)
    for grad, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.double(), 1 + expected, rtol=1e-5, atol=1e-4)
