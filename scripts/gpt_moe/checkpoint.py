"""Save and resume with Megatron's distributed checkpoints, across dispatchers and EP sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

_LATEST = "latest.txt"


def save(folder: Path, step: int, model: Any, optimizer: Any) -> None:
    """Write ``folder/step_<step>`` and name it in ``folder/latest.txt``; every rank calls this."""
    if model.ddp_config.overlap_param_gather:
        # The updated weights are otherwise gathered at the next forward pass.
        model.start_param_sync(force_sync=True)
    target = folder / f"step_{step:06d}"
    if dist.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(_state(model, optimizer, is_loading=False) | {"step": step}, target)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / _LATEST).write_text(target.name)


def load(folder: Path, model: Any, optimizer: Any) -> int:
    """Read a checkpoint into model and optimizer; every rank calls this.

    ``folder`` is one that ``save`` wrote (its newest is read) or one of its ``step_`` folders.
    Returns the number of steps that the checkpoint had taken.

    Raises:
        ValueError: ``folder`` names no checkpoint.
    """
    source = _source(folder)
    for part in optimizer.chained_optimizers:
        # torch's Adam has no moments before its first step, and the loader fills them in place.
        part._init_optimizer_states_with_dummy_values()
    state = dist_checkpointing.load(_state(model, optimizer, is_loading=True), source)
    model.module.load_state_dict(state["model"])
    for number, part in enumerate(optimizer.chained_optimizers):
        _set_moments(part, state["moments"][number], int(state["step"]))
    return int(state["step"])


def _source(folder: Path) -> Path:
    if (folder / _LATEST).is_file():
        return folder / (folder / _LATEST).read_text().strip()
    if dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        return folder
    raise ValueError(
        f"--load {folder} holds neither {_LATEST} nor a checkpoint: name a folder that --save "
        "wrote, or a step_ folder in it"
    )


def _set_moments(part: Any, moments: dict[int, Any], step: int) -> None:
    # torch's Adam counts steps in a tensor beside each parameter's moments, where Megatron's
    # loader would look for it in the checkpoint; fused Adams count in the parameter groups.
    adam = part.optimizer
    counted = [values for values in adam.state.values() if values.pop("step", None) is not None]
    part.load_parameter_state_from_fully_reshardable(moments)
    for values in counted:
        values["step"] = torch.tensor(float(step))
    for group in adam.param_groups:
        group["step"] = step


def _state(model: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """Weights, and Adam's fp32 weights and moments in the shape of the weights.

    The rest of the optimizer's state is the command line's. Without it (its parameter groups
    differ with and without expert parallelism) a checkpoint moves between all EP sizes.
    """
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    weights = model.module.sharded_state_dict(metadata=metadata)
    return {
        "model": weights,
        "moments": {
            number: part.sharded_param_state_fully_reshardable(weights, is_loading, metadata)
            for number, part in enumerate(optimizer.chained_optimizers)
        },
    }
