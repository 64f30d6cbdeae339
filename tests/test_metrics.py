"""Balance metrics: what a pass records, and what Megatron's training loop writes of it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import Case, batch
from moe import build
from ranks import run_ranks

CASE = Case(
    name="",
    ranks=4,
    experts=8,
    routing=("hot_expert",),
    moonep=(("log_maxvio", True), ("slots", 1)),
)


class Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name] = float(value)


def _report() -> SimpleNamespace:
    """Two microbatches, reported as Megatron's training loop does; and the routed counts."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    from moonep_megatron import metrics

    layer = build(CASE, "moonep")
    part = batch(CASE, 0, dist.get_rank())
    with metrics.record() as records:
        layer(part.tokens_sH[:, None])
    layer(part.tokens_sH[:, None])
    layer.eval()
    layer(part.tokens_sH[:, None])
    writer = Writer()
    text = get_moe_metrics_tracker().report(
        loss_scale=1 / 2,
        iteration=7,
        writer=writer,
        track_names=[],
        per_layer_logging=True,
        force_initialize=True,
        num_layers=1,
        total_loss_dict={},
    )
    counts_E = part.routing_map(CASE.experts).sum(0)
    dist.all_reduce(counts_E)
    return SimpleNamespace(
        scalars=writer.scalars, text=text, counts=counts_E.tolist(), records=records
    )


def test_balance_reaches_megatrons_logs() -> None:
    """The mean over the microbatches of training, a layer and in all, from independent counts."""
    answers = run_ranks(4, _report)
    counts_E = torch.tensor(answers[0].counts, dtype=torch.float64)
    home_R = counts_E.view(4, 2).sum(1)
    expected = {
        "moonep_maxvio": float(counts_E.max() / counts_E.mean() - 1),
        "moonep_hottest_rank_without": float(home_R.max() / home_R.mean()),
        "moonep_hottest_rank": float((counts_E.sum() / 4).ceil() / (counts_E.sum() / 4)),
    }
    assert expected["moonep_maxvio"] > 1
    for answer in answers:
        for name, value in expected.items():
            assert answer.scalars[name] == pytest.approx(value, rel=1e-5)
            assert answer.scalars[f"moe/{name}_layer_0"] == pytest.approx(value, rel=1e-5)
            assert f"{name}: {value:.2f}" in answer.text
        (record,) = answer.records
        assert answer.scalars["moonep_duplicates"] == record["duplicates"] > 0
        assert answer.scalars["moonep_busiest"] == record["busiest"] > 0
        assert record["router_per_expert"] == answer.counts == record["per_expert"]


def test_forced_routing_is_as_hot_as_asked() -> None:
    """The bias reaches the asked maxvio, 0 included, whatever the logits' own skew."""
    from moonep_megatron.forced import forced_gating

    torch.manual_seed(0)
    tokens, experts, topk = 2048, 32, 4
    skew_E = torch.linspace(0, 3, experts)
    gate = torch.randn(24, experts)
    hidden = torch.randn(tokens, 1, 24)
    for wanted in (0.0, 1.0, 4.0):
        gating = forced_gating(lambda x: x @ gate + skew_E, wanted, topk, lambda: 5)
        chosen = gating(hidden).view(tokens, experts).topk(topk, dim=1).indices
        load_E = torch.bincount(chosen.flatten(), minlength=experts).double()
        assert load_E.max() / load_E.mean() - 1 == pytest.approx(wanted, abs=0.15)
        if wanted:
            assert int(load_E.argmax()) == 5
