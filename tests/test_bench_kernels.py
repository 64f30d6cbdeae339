"""What the kernel benchmark measures, as far as it needs no GPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import bench_kernels
from kernel_bench import report
from kernel_bench.ranks import Shape
from kernel_bench.routing import Route, ids_of

SHAPE = Shape(tokens=64, width=8, topk=4, experts=32)


@pytest.mark.parametrize("maxvio", [0, 1, 7, 12, 31])
def test_hot_expert_has_so_many_times_the_mean(maxvio):
    ids = torch.cat([ids_of(SHAPE, r, maxvio) for r in range(2)])
    counts = torch.bincount(ids.view(-1), minlength=SHAPE.experts)
    mean = 2 * SHAPE.tokens * SHAPE.topk // SHAPE.experts
    assert counts[0] == (1 + maxvio) * mean
    assert counts.sum() == SHAPE.experts * mean
    if maxvio == 0:
        assert (counts == mean).all()
    if maxvio <= SHAPE.experts // SHAPE.topk - 1 and maxvio > 0:
        assert (ids.sort(1).values.diff(dim=1) > 0).all()


@pytest.mark.parametrize("ranks", [2, 8])
def test_tokens_cross_once_and_the_busiest_direction_counts(ranks):
    at = Route(SHAPE, ranks, 3, torch.device("cpu"))
    for r in range(ranks):
        for d in range(ranks):
            assert at.tokens_RR[r, d] == (at.rank[r] == d).any(1).sum()
            assert at.entries_RR[r, d] == (at.rank[r] == d).sum()
    bytes_RR = torch.tensor([[100, 3, 1], [5, 100, 1], [6, 2, 100]])
    assert at.busiest(bytes_RR) == 11
    assert at.busiest(bytes_RR.T) == 11


def test_ratios_are_to_the_copy_with_as_many_sms_and_to_the_best():
    def row(section, link, sms, gbps, wrong=()):
        return {"section": section, "link": link, "sms": sms, "gbps": gbps, "wrong": [*wrong]}

    rows = [
        row("copy", "push", 8, 300),
        row("copy", "push", 8, 200),
        row("copy", "push", 32, 400),
        row("copy", "push", 64, 900, ["bytes differ"]),
        row("copy", "pull", 8, 800),
        row("dispatch", "push", 8, 270),
        row("dispatch", "push", 9, 270),
    ]
    report.add_ratios(rows)
    assert (rows[5]["ratio_same_sms"], rows[5]["ratio_best"]) == (0.9, 0.675)
    assert (rows[6]["ratio_same_sms"], rows[6]["ratio_best"]) == (None, 0.675)


@pytest.mark.parametrize(
    ("flags", "word"),
    [([], "--same-gpu"), (["--ranks", "1"], "--ranks"), (["--only", "x"], "unknown")],
)
def test_bad_arguments_are_refused(flags, word, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):
        bench_kernels.arguments(flags)
    assert word in capsys.readouterr().err
