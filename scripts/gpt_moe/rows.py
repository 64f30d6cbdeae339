"""Counts, in every step and MoE layer, of the rows that each rank's experts were given.

Letters: L MoE layers, E experts, R expert-parallel ranks, n = E/R.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import is_checkpointing

from gpt_moe.model import moe_layers


class RowCounter:
    """Counts under any dispatcher, and checks experts' rows against the router's histogram.

    For Megatron's dispatchers the rows are the counts handed to the experts module. For moonep
    they come from ``moonep_megatron.metrics``, which reads the boundaries handed to the GEMMs.
    """

    def __init__(self, model: torch.nn.Module, dispatcher: str) -> None:
        layers = moe_layers(model)
        self._group = layers[0].ep_group
        self._ranks = self._group.size()
        self._moonep = dispatcher == "moonep"
        self._records: list[dict[str, Any]] = []
        experts = layers[0].config.num_moe_experts
        self._chosen_LE = torch.zeros(len(layers), experts, dtype=torch.int64)
        self._given_Ln = torch.zeros(len(layers), experts // self._ranks, dtype=torch.int64)
        for number, layer in enumerate(layers):
            layer.router.register_forward_hook(self._router_hook(number))
            if not self._moonep:
                layer.experts.register_forward_pre_hook(self._experts_hook(number))

    def _router_hook(self, layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if not is_recompute():
                self._chosen_LE[layer] += output[1].sum(0).cpu()

        return hook

    def _experts_hook(self, layer: int) -> Any:
        def hook(module: Any, inputs: Any) -> None:
            if not is_recompute():
                self._given_Ln[layer] += inputs[1].cpu()

        return hook

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Count the forward passes inside, all microbatches of one step."""
        self._chosen_LE.zero_()
        self._given_Ln.zero_()
        if not self._moonep:
            yield
            return
        from moonep_megatron import metrics

        with metrics.record() as self._records:
            yield

    def collect(self) -> dict[str, list[Any]]:
        """The step's counts over this rank's expert-parallel group; every rank must call it.

        Returns ``rows_per_rank`` [L][R], and per layer [L] ``maxvio`` (hottest expert's rows /
        mean - 1), ``hottest_rank_without`` (rows of the hottest rank / mean, had every row gone
        to its expert's home) and ``duplicates`` (expert copies; 0 under Megatron's dispatchers).

        Raises:
            RuntimeError: an expert was given another number of rows than the router chose.
        """
        chosen_LE = self._over_ranks(self._chosen_LE).sum(0)
        home_LR = chosen_LE.unflatten(1, (self._ranks, -1)).sum(2)
        counts = {
            "maxvio": (chosen_LE.amax(1) / chosen_LE.double().mean(1) - 1).tolist(),
            "hottest_rank_without": (home_LR.amax(1) / home_LR.double().mean(1)).tolist(),
        }
        if self._moonep:
            given_LE, reported = self._from_records()
            counts |= reported
        else:
            given_LE = self._over_ranks(self._given_Ln).transpose(0, 1).flatten(1)
            counts["rows_per_rank"] = given_LE.unflatten(1, (self._ranks, -1)).sum(2).tolist()
            counts["duplicates"] = [0] * len(given_LE)
        _require_equal(given_LE, chosen_LE)
        return counts

    def _from_records(self) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        """What moonep says: rows per expert int64 [L, E], and the step's counts per layer."""
        layers: dict[int, list[dict[str, Any]]] = {}
        for record in self._records:
            layers.setdefault(record["layer"], []).append(record)
        passes = [layers[layer] for layer in sorted(layers)]

        def summed(key: str) -> torch.Tensor:
            return torch.tensor([[record[key] for record in layer] for layer in passes]).sum(1)

        def averaged(key: str) -> list[float]:
            return [sum(record[key] for record in layer) / len(layer) for layer in passes]

        return summed("per_expert"), {
            "rows_per_rank": summed("rows_per_rank").tolist(),
            "duplicates": summed("duplicates").tolist(),
            "maxvio": averaged("maxvio"),
            "hottest_rank_without": averaged("hottest_rank_without"),
        }

    def _over_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks of the expert-parallel group, stacked in front [R, ...]."""
        counts = counts.to(torch.cuda.current_device())  # the CPU, in CPU runs
        gathered = [torch.empty_like(counts) for _ in range(self._ranks)]
        dist.all_gather(gathered, counts, group=self._group)
        return torch.stack(gathered).cpu()


def is_recompute() -> bool:
    """Whether this pass was counted before."""
    # A checkpointed pass runs without gradients first, then again with them in backward.
    return is_checkpointing() and torch.is_grad_enabled()


def _require_equal(given_LE: torch.Tensor, chosen_LE: torch.Tensor) -> None:
    if torch.equal(given_LE, chosen_LE):
        return
    if given_LE.shape != chosen_LE.shape:
        raise RuntimeError(
            f"rows were reported for {tuple(given_LE.shape)} (layers, experts), but the routers "
            f"have {tuple(chosen_LE.shape)}"
        )
    layer, expert = (given_LE != chosen_LE).nonzero()[0].tolist()
    raise RuntimeError(
        f"MoE layer {layer}, expert {expert}: the router chose it {int(chosen_LE[layer, expert])} "
        f"times, but {int(given_LE[layer, expert])} rows were computed"
    )
