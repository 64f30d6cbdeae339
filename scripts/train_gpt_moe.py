"""Train a small GPT mixture-of-experts with Megatron-Core, on CPUs (gloo) or GPUs (NCCL).

    torchrun --nproc-per-node 4 scripts/train_gpt_moe.py --dispatcher moonep

Everything between the command line and the progress lines is Megatron's own: GPTModel, DDP,
the distributed optimizer, schedules, checkpoints. The text is bytes of Python's library.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

if sys.platform == "linux" and "RANK" in os.environ:
    # A rank must not outlive torchrun, which may end before it can pass a signal on; and the
    # imports below take seconds. 1 is PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

import torch
import torch.distributed as dist
from gpt_moe import arguments, text
from torch.distributed.elastic.multiprocessing.errors import record

# Every process would say what Megatron-Core runs without, and what is deprecated.
for _category in (UserWarning, FutureWarning):
    warnings.filterwarnings("ignore", category=_category, module=r"megatron|torch\.distributed")
for _name in ("megatron", "torch.utils.cpp_extension"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@record
def main() -> None:
    args = arguments.parse()
    if "RANK" not in os.environ:
        raise SystemExit("start it under torchrun: torchrun --nproc-per-node N train_gpt_moe.py")
    try:
        arguments.check(args, int(os.environ["WORLD_SIZE"]))
        corpus = text.read_text(args.text, args.seq)
        device = choose_device(args)
    except ValueError as error:
        raise SystemExit(f"rank {os.environ['RANK']}: error: {error}") from None
    set_up(args, device)
    train(args, corpus, device)
    dist.destroy_process_group()


def choose_device(args: argparse.Namespace) -> torch.device:
    """This rank's GPU, or the CPU where there are none.

    Raises:
        ValueError: more ranks than GPUs, or --te without GPUs.
    """
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if gpus == 0 and args.te:
        raise ValueError("--te needs a CUDA device: leave it out on CPUs")
    if 0 < gpus <= local:
        raise ValueError(
            f"local rank {local} has no GPU, there are {gpus}: start fewer ranks with "
            "--nproc-per-node (compare_dispatchers.py: --ranks), or set CUDA_VISIBLE_DEVICES=''"
        )
    return torch.device("cuda", local) if gpus else torch.device("cpu")


def set_up(args: argparse.Namespace, device: torch.device) -> None:
    """Process groups, random state, stand-ins on the CPU and, for moonep, the plugin."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        from moonep_megatron import cpu

        cpu.enable()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=10)
    )
    parallel_state.initialize_model_parallel(expert_model_parallel_size=args.ep)
    model_parallel_cuda_manual_seed(args.seed)
    if args.dispatcher == "moonep":
        import moonep_megatron

        moonep_megatron.enable(
            moonep_megatron.MoonEPConfig(
                slots=args.slots,
                planner=args.planner,
                max_tokens=args.micro_batch * args.seq,
            )
        )


def train(args: argparse.Namespace, corpus: torch.Tensor, device: torch.device) -> None:
    from gpt_moe import checkpoint, model, record, rows
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    gpt = model.build(args, device)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            bf16=args.dtype == "bf16",
            use_distributed_optimizer=True,
            overlap_param_gather=args.overlap,
            clip_grad=1.0,
        ),
        [gpt],
    )
    done = checkpoint.load(args.load, gpt, optimizer) if args.load else 0
    counter = rows.RowCounter(gpt, args.dispatcher)
    recorder = record.Recorder(gpt, args.record, args.record_interval) if args.record else None
    history: dict[str, list[Any]] = {"loss": [], "tokens_per_second": []}
    show = Progress(args)
    for step in range(done, args.steps):
        began = time.perf_counter()
        maybe_fail(args, step)
        with counter.step(), recorder.step(step) if recorder else contextlib.nullcontext():
            loss = train_step(args, gpt, optimizer, microbatches(args, corpus, step, device))
        counts = counter.collect()
        speed = args.global_batch * args.seq / (time.perf_counter() - began)
        for key, value in {"loss": loss, "tokens_per_second": speed, **counts}.items():
            history.setdefault(key, []).append(value)
        show.step(step + 1, loss, speed, counts["rows_per_rank"])
        last = step + 1 == args.steps
        if args.save and (last or (args.save_interval and (step + 1) % args.save_interval == 0)):
            checkpoint.save(args.save, step + 1, gpt, optimizer)
    if args.json and dist.get_rank() == 0:
        write_json(args, done, history)


def microbatches(
    args: argparse.Namespace, corpus: torch.Tensor, step: int, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """This rank's share of the step's global batch, in order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = []
    for number in range(args.global_batch // (args.micro_batch * world)):
        first = (number * world + rank) * args.micro_batch
        batch = text.batch(
            corpus,
            seed=args.seed,
            step=step,
            samples=range(first, first + args.micro_batch),
            seq=args.seq,
        )
        batches.append({name: tensor.to(device) for name, tensor in batch.items()})
    return batches


def train_step(
    args: argparse.Namespace, gpt: Any, optimizer: Any, batches: list[dict[str, torch.Tensor]]
) -> float:
    """Forward, backward and update; the mean loss of the global batch before the update."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    gpt.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=gpt,
        num_microbatches=len(batches),
        seq_length=args.seq,
        micro_batch_size=args.micro_batch,
        forward_only=False,
    )
    optimizer.step()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def forward_step(batches: Any, gpt: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    token_losses = gpt(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return token_losses, mean_loss


def mean_loss(token_losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = token_losses.float().mean()
    # The schedule divides its loss in place: what is reported must be a copy.
    return loss, loss.detach().clone()


def maybe_fail(args: argparse.Namespace, step: int) -> None:
    if args.fail_at == f"{step}:{dist.get_rank()}":
        raise RuntimeError(f"--fail-at {args.fail_at}: this rank was told to fail")


class Progress:
    """One line a step, on rank 0."""

    def __init__(self, args: argparse.Namespace) -> None:
        from rich.console import Console

        self._args = args
        self._console = Console(highlight=False, quiet=dist.get_rank() != 0)
        self._console.print(
            f"[bold]{args.dispatcher}[/bold]: {dist.get_world_size()} ranks, EP {args.ep}, "
            f"{args.layers} layers, {args.experts} experts, top {args.topk}, {args.dtype}"
        )

    def step(self, step: int, loss: float, speed: float, rows_LR: list[list[int]]) -> None:
        hottest = max(max(rows_R) * len(rows_R) / sum(rows_R) for rows_R in rows_LR)
        self._console.print(
            f"[dim]{self._args.dispatcher:>9}[/dim] step {step:>4}/{self._args.steps}  "
            f"loss [cyan]{loss:.5f}[/cyan]  {speed:>9,.0f} tokens/s  "
            f"hottest rank [yellow]{hottest:.2f}[/yellow] x mean",
            soft_wrap=True,
        )


def write_json(args: argparse.Namespace, done: int, history: dict[str, list[Any]]) -> None:
    """What compare_dispatchers.py reads: options, then per step what was measured."""
    options = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()
    }
    rows = args.global_batch * args.seq * args.topk // dist.get_world_size()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(
        json.dumps({"options": options, "first_step": done, "balanced_rows": rows, **history})
    )


if __name__ == "__main__":
    main()
