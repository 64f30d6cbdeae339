"""What ranks do in the tests of users' cases, on CPUs and on GPUs; the case says which backend."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from cases import Case, batch, device
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from moe import build, wrap
from torch import Tensor, nn
from traffic import all_to_all_bytes, collectives

from moonep_megatron import metrics


def _pass(layer: nn.Module, model: nn.Module, case: Case) -> None:
    """Forward and backward of the case's first microbatch."""
    part = batch(case, 0, dist.get_rank())
    output = model(part.tokens_sH[:, None].clone().requires_grad_())[0]
    output.backward(part.grad_sH[:, None])


def collectives_of_a_pass(case: Case) -> list[str]:
    """Names of what torch.distributed is asked for in a layer's second pass, without DDP."""
    layer = build(case, "moonep")
    _pass(layer, layer, case)
    return collectives(lambda: _pass(layer, layer, case))


def collectives_of_ddp(case: Case) -> tuple[list[str], list[str]]:
    """The same under DDP with its overlap: in forward, and in backward with the reduction."""
    layer = build(case, "moonep")
    model = wrap(layer, case)
    part = batch(case, 0, dist.get_rank())

    def forward() -> Tensor:
        return model(part.tokens_sH[:, None].clone().requires_grad_())[0]

    def backward(output: Tensor) -> None:
        output.backward(part.grad_sH[:, None])
        model.finish_grad_sync()

    backward(forward())
    model.zero_grad_buffer()
    outputs: list[Tensor] = []
    first = collectives(lambda: outputs.append(forward()))
    return first, collectives(lambda: backward(outputs[0]))


def labelled_rows(case: Case) -> SimpleNamespace:
    """Tokens that say whose they are, followed to where they are computed.

    ``computed`` has (source rank, token) of every row that this rank computes; ``sent`` and
    ``returned`` the bytes that it gave torch.distributed for dispatch and gather, rows alone.
    """
    layer = build(case, "moonep")
    layer.home.replay_pre_hooks()
    dispatcher, rank = layer.token_dispatcher, dist.get_rank()
    part = batch(case, 0, rank)
    label_sH = torch.zeros_like(part.tokens_sH)
    label_sH[:, 0] = rank
    label_sH[:, 1] = torch.arange(len(label_sH))
    rows, probs = dispatcher.dispatch_preprocess(
        label_sH[:, None], part.routing_map(case.experts), part.dense_probs(case.experts)
    )
    with torch.no_grad():
        received, _ = layer.dispatch(rows, probs)
        route, backend = dispatcher.current_route(), dispatcher.backend
        real = int(route.plan.group_start_RG1[rank, -1])
        computed = received[route.source_row_N[:real].long()][:, :2].long().tolist()
        backend.free_receive()
        with all_to_all_bytes() as sent:
            again, _ = backend.dispatch(route, rows)
            backend.free_receive()
        sums = torch.zeros_like(again)
        with all_to_all_bytes() as returned:
            backend.gather(route, sums)
    return SimpleNamespace(computed=computed, sent=sum(sent), returned=sum(returned))


@contextmanager
def counted(owner: Any, name: str) -> Iterator[list[None]]:
    """One entry for each call of ``owner.name`` within."""
    plain, calls = getattr(owner, name), []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return plain(*args, **kwargs)

    setattr(owner, name, counting)
    try:
        yield calls
    finally:
        setattr(owner, name, plain)


def plans_of_passes(case: Case, planning: Callable[[], tuple[Any, str]]) -> list[int]:
    """Plans made by all forwards, by all backwards, and by one more dispatch over a route."""
    layer, rank = build(case, "moonep"), dist.get_rank()
    layer_dispatch, routes = layer.dispatch, []

    def noting(*args: Any) -> Any:
        answer = layer_dispatch(*args)
        routes.append(layer.token_dispatcher.current_route())
        return answer

    layer.dispatch = noting
    parts = [batch(case, m, rank) for m in range(len(case.routing))]
    outputs, found = [], []
    with counted(*planning()) as calls:
        for m, part in enumerate(parts):
            layer.router.microbatch = m
            outputs.append(layer(part.tokens_sH[:, None].clone().requires_grad_())[0])
        found.append(len(calls))
        for part, output in zip(parts, outputs, strict=True):
            output.backward(part.grad_sH[:, None])
        found.append(len(calls) - sum(found))
        layer.token_dispatcher.backend.dispatch(routes[0], parts[0].tokens_sH)
        layer.token_dispatcher.backend.free_receive()
        found.append(len(calls) - sum(found))
    return found


def splits(case: Case) -> SimpleNamespace:
    """Rows of every group as the dispatcher alone, under Megatron's methods, hands them on."""
    layer = build(case, "moonep")
    dispatcher, part = layer.token_dispatcher, batch(case, 0, dist.get_rank())
    rows, probs = dispatcher.dispatch_preprocess(
        part.tokens_sH[:, None], part.routing_map(case.experts), part.dense_probs(case.experts)
    )
    grouped, counts, _ = dispatcher.dispatch_postprocess(*layer.dispatch(rows, probs))
    return SimpleNamespace(
        dtype=counts.dtype,
        on_cuda=counts.is_cuda,
        beside_rows=counts.device == grouped.device,
        shape=list(counts.shape),
        total=int(counts.sum()),
    )


def outputs_with_nan_token(case: Case) -> tuple[Tensor, Tensor]:
    """Outputs [s, H] behind a real router: of tokens without NaN, and with the fourth all NaN."""
    layer = build(case, "moonep")
    router = TopKRouter(layer.config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    layer.router = router.to(device(), case.dtype)
    clean = batch(case, 0, dist.get_rank()).tokens_sH[:, None].clone()
    poisoned = clean.clone()
    poisoned[3] = torch.nan
    return tuple(layer(tokens)[0].detach()[:, 0].cpu() for tokens in (clean, poisoned))


def drifting_popularity(step: int, steps: int, experts: int) -> Tensor:
    """fp64 [E]: even at first, ever steeper, and its peak wanders over the experts."""
    distance = (torch.arange(experts) - step * experts // steps) % experts
    return torch.softmax(-3.0 * step / steps * distance.double(), 0)


def drift(case: Case, steps: int) -> list[SimpleNamespace]:
    """A layer under a workload that drifts: what it records and what it logs, a step each."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    layer, rank = build(case, "moonep"), dist.get_rank()
    part, found = batch(case, 0, rank), []
    for step in range(steps):
        g = torch.Generator().manual_seed(100 * step + rank)
        popularity = drifting_popularity(step, steps, case.experts)
        ids = torch.multinomial(popularity.expand(len(part.ids_sK), -1), case.topk, generator=g)
        ids = ids.to(device())
        chosen = torch.zeros(len(ids), case.experts, dtype=torch.bool, device=device())
        layer.router.maps = [chosen.scatter(1, ids, True)]
        layer.router.probs = [(layer.router.maps[0].float() / case.topk).requires_grad_()]
        with metrics.record() as records:
            _pass(layer, layer, case)
        tracker = get_moe_metrics_tracker()
        scalars = _Scalars()
        tracker.report(
            loss_scale=1.0,
            iteration=step,
            writer=scalars,
            track_names=[],
            per_layer_logging=True,
            force_initialize=True,
            num_layers=1,
            total_loss_dict={},
        )
        found.append(
            SimpleNamespace(
                record=records[0],
                logged=scalars.values,
                counts=layer.router.maps[0].sum(0).cpu(),
                copy_bytes=sum(p.weights()[0].nbytes for p in (layer.home.fc1, layer.home.fc2)),
            )
        )
    return found


class _Scalars:
    """Stands where a TensorBoard writer stands."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values[name] = float(value)
