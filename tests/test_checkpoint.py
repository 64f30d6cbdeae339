"""Checkpoints are those of alltoall: they move between dispatchers and between EP sizes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Case
from gpt import SEQUENCE, Trainer, build, global_parameters, losses
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from moe import build as build_layer
from moe import run_layer, wrap
from ranks import run_ranks
from torch import Tensor, nn

EVALUATED = range(1000, 1008)
State = tuple[dict[str, Tensor], Tensor]


def _sharded(trainer: Trainer, *, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    weights = trainer.model.module.sharded_state_dict(metadata=metadata)
    optimizer = trainer.optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
    return {"model": weights, "optimizer": optimizer}


def _evaluate(model: nn.Module) -> Tensor:
    """Losses [sequences, SEQUENCE] of the same text whatever the number of ranks."""
    share = len(EVALUATED) // dist.get_world_size()
    first = dist.get_rank() * share
    with torch.no_grad():
        mine = losses(model, EVALUATED[first : first + share])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.cat(everyone)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in global_parameters(model).items()}


def _train_and_save(dispatcher: str, target: Path) -> State:
    """What is saved: this rank's weights by name, and the losses that they give."""
    return _go_on(Trainer(build(dispatcher)), target)


def _go_on(trainer: Trainer, target: Path) -> State:
    for step in range(2):
        trainer.step([(100 * step + dist.get_rank(),)])
    dist_checkpointing.save(_sharded(trainer, loading=False), target)
    return _state(trainer)


def _state(trainer: Trainer) -> State:
    return _weights(trainer.model.module), _evaluate(trainer.model.module)


def _load(dispatcher: str, source: Path, target: Path | None = None) -> list[State]:
    """What was loaded and, with ``target``, what was saved there after more steps."""
    trainer = Trainer(build(dispatcher))
    model = trainer.model.module
    for part in trainer.optimizer.chained_optimizers:
        # torch's Adam has no state before its first step, and Megatron asks for its shapes.
        part._init_optimizer_states_with_dummy_values()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    state = dist_checkpointing.load(_sharded(trainer, loading=True), source)
    model.load_state_dict(state["model"])
    loaded = _state(trainer)
    if target is None:
        return [loaded]
    return [loaded, _go_on(trainer, target)]


def test_ckpt_roundtrip(tmp_path: Path) -> None:
    """alltoall at EP=4 -> moonep at EP=8, trained on -> alltoall at EP=4: no bit changes."""
    there, back = tmp_path / "there", tmp_path / "back"
    there.mkdir()
    back.mkdir()
    first = run_ranks(4, _train_and_save, "alltoall", there, timeout=120)
    middle = run_ranks(8, _load, "moonep", there, back, timeout=120)
    last = run_ranks(4, _load, "alltoall", back, timeout=120)
    _assert_same(first, [rank[0] for rank in middle])
    _assert_same([rank[1] for rank in middle], [rank[0] for rank in last])


def _assert_same(saved: list[State], loaded: list[State]) -> None:
    before, after = (
        {name: weight for weights, _ in ranks for name, weight in weights.items()}
        for ranks in (saved, loaded)
    )
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), f"{name} changed on its way"
    expected, found = saved[0][1], loaded[0][1]
    assert found.shape == (len(EVALUATED), SEQUENCE)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def _inventory(dispatcher: str) -> dict[str, Any]:
    """Everything that a checkpoint, an optimizer or DDP could find in a trained model."""
    trainer = Trainer(build(dispatcher))
    trainer.step([(dist.get_rank(),)])
    module = trainer.model.module
    sharded = _sharded(trainer, loading=False)
    groups = trainer.model.bucket_groups + trainer.model.expert_parallel_bucket_groups
    return {
        "parameters": [(n, p.shape, p.dtype) for n, p in module.named_parameters()],
        "buffers": [(n, b.shape, b.dtype) for n, b in module.named_buffers()],
        "modules": [name for name, _ in module.named_modules()],
        "state": [(n, getattr(v, "shape", None)) for n, v in module.state_dict().items()],
        "sharded": sorted(_shards(sharded)),
        "attributes": [sorted(vars(parameter)) for parameter in module.parameters()],
        "buckets": [[bucket.grad_data.numel() for bucket in g.buckets] for g in groups],
    }


def _shards(node: Any) -> list[tuple[Any, ...]]:
    if isinstance(node, ShardedTensor):
        return [(node.key, node.global_shape, node.local_shape, node.global_offset)]
    children = node.values() if isinstance(node, dict) else node
    return [s for c in children for s in _shards(c)] if isinstance(node, (dict, list)) else []


def test_slot_is_not_expert() -> None:
    """Duplicates appear in no parameter, buffer, bucket, state dict or optimizer state."""
    for theirs, ours in run_ranks(2, _inventories):
        for what, found in theirs.items():
            assert ours[what] == found, what
        assert len(theirs["sharded"]) > 20


def _inventories() -> list[dict[str, Any]]:
    return [_inventory(dispatcher) for dispatcher in ("alltoall", "moonep")]


def test_parameters_stay_the_objects_that_megatron_made() -> None:
    """DDP, optimizers and users hold on to them; each keeps memory that it alone writes."""
    assert run_ranks(2, _identities) == [True, True]


def _identities() -> bool:
    case = Case(name="identity", grads="main_grad", routing=("hot_rank",))
    layer = build_layer(case, "moonep")
    before = list(layer.parameters())
    run_layer(layer, wrap(layer, case), case, "moonep")
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in layer.parameters())
    apart = all(end <= start for (_, end), (start, _) in pairwise(spans))
    return apart and all(a is b for a, b in zip(before, layer.parameters(), strict=True))
