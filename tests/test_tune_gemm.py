"""The products that scripts/tune_gemm.py times are those of the layer; its table is readable."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from moonep_megatron import gemm, quack_gemm

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from gemm_bench import cases
from layer_bench.options import Shape

SHAPE = Shape("small", 32, 16, 8, 2, 60)


@pytest.fixture(autouse=True)
def _on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of `gemm`, whose boundaries are on the host, in place of quack's."""
    monkeypatch.setattr(cases, "BF16", torch.float32)
    for name in ("rows_times_weights", "add_weight_gradients"):
        original = getattr(gemm, name)

        def on_host(*args, original=original, **named):
            args = [a.tolist() if a is not None and _is_bounds(a) else a for a in args]
            original(*args, **named)

        monkeypatch.setattr(quack_gemm, name, on_host)


def _is_bounds(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.int32 and len(tensor) < SHAPE.rows


def _operands() -> cases.Operands:
    torch.manual_seed(0)
    return cases.Operands(SHAPE, 2, torch.device("cpu"))


def test_groups_are_odd_and_cover_every_row():
    counts = cases.odd_counts(1000, 7, seed=3)
    assert sum(counts) == 1000 and len(set(counts)) > 1 and min(counts) > 100


@pytest.mark.parametrize("indexed", [True, False])
def test_products_are_those_of_a_dense_loop(indexed: bool):
    o = _operands()
    counts = cases.odd_counts(SHAPE.rows, 4, seed=1)
    (group,) = cases.single(o, counts)
    made = {case.name: case for case in cases.products(o, [group], indexed=indexed)}
    index = o.index.long()
    x, d_y = (o.receive[index], o.d_sums[index]) if indexed else (o.rows, o.d_out)
    rows = [part.double() for part in x.split(counts)]
    d_out = [part.double() for part in d_y.split(counts)]
    acts = [part.double() for part in o.act.split(counts)]
    w1, w2 = (w.double() for w in group.weights)

    made["FC1 forward"]()
    _same(o.pre, torch.cat([r @ w.T for r, w in zip(rows, w1, strict=True)]))
    made["FC2 data"]()
    _same(o.d_act, torch.cat([d @ w for d, w in zip(d_out, w2, strict=True)]))
    made["FC2 weight"]()
    _same(group.grads[1], torch.stack([d.T @ a for d, a in zip(d_out, acts, strict=True)]))
    pre = [part.double() for part in o.pre.split(counts)]
    made["FC1 weight"]()
    _same(group.grads[0], torch.stack([d.T @ r for d, r in zip(pre, rows, strict=True)]))
    made["FC1 data"]()
    _same(o.d_out, torch.cat([p @ w for p, w in zip(pre, w1, strict=True)]))
    made["FC2 forward"]()
    _same(o.rows, torch.cat([a @ w.T for a, w in zip(acts, w2, strict=True)]))


def _same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_home_and_slots_are_launched_as_the_layer_does():
    o = _operands()
    counts = cases.odd_counts(SHAPE.rows, 9, seed=2)
    groups = cases.home_and_slots(o, counts)
    assert [len(g.bounds) - 1 for g in groups] == [4, 1, 3, 1]
    assert [g.slots for g in groups] == [False, True, True, True]
    ends = [int(g.bounds[-1]) for g in groups]
    assert [int(g.bounds[0]) for g in groups] == [0, *ends[:-1]] and ends[-1] == SHAPE.rows


def test_the_table_is_of_products_and_tiles():
    table = quack_gemm.table()
    for product, tile in table.items():
        assert product.kind in ("forward", "data", "weight") and product.m % 8 == product.n % 8 == 0
        assert dataclasses.asdict(tile) != dataclasses.asdict(quack_gemm.DEFAULT)
