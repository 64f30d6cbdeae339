"""Run a function on R gloo ranks, each in a process of its own, and bring the results back.

Torch and Megatron take seconds to import, so they are imported once, in a fork server, and every
rank of every call is a fresh fork of it: cheap, and nothing leaks from one call into the next.
A rank that raises, dies or answers too late ends the call for all ranks; no process outlives it.
"""

import ctypes
import logging
import multiprocessing as mp
import os
import pickle
import queue
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = [
    "torch",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing",
    # What enable() imports, and what test modules do.
    "megatron.training.arguments",
    "moonep_megatron.layer",
    "pytest",
    "hypothesis",
]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of Megatron's parallel groups; data parallelism takes what is left of the ranks."""

    ep: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    expert_tp: int | None = None


@dataclass(frozen=True)
class Failure:
    """What a rank raised: the name of the exception's class, its message, the whole traceback."""

    kind: str
    message: str
    trace: str


class RankError(AssertionError):
    """A rank failed, died or did not answer in time; the message names it."""


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    layout: Layout | None = None,
    timeout: float = 60.0,
    failures: bool = False,
    joined: bool = True,
) -> list[Any]:
    """Call ``function(*args)`` on ``world`` ranks and return the results in rank order.

    ``function`` must be importable by name; its result must be picklable. With ``layout`` (default
    ``Layout(ep=world)``) Megatron's groups exist during the call. With ``failures`` an exception
    of a rank comes back as a ``Failure`` in its place instead of ending the call. Without
    ``joined`` the function joins by itself, from the environment that torchrun gives. Raises
    ``RankError`` for the first rank that failed, died without an answer, or exceeded ``timeout``.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        pipes, processes = [], []
        layout = layout or Layout(ep=world)
        port = None if joined else _free_port()
        for rank in range(world):
            ours, theirs = context.Pipe()
            if port is None:
                join = partial(start, rank, world, layout, f"file://{folder}/rendezvous", timeout)
            else:
                join = partial(_like_torchrun, rank, world, port)
            process = context.Process(target=_rank_main, args=(theirs, join, function, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout, failures)
        finally:
            _end(processes, pipes)


def _collect(pipes: list[Connection], timeout: float, failures: bool) -> list[Any]:
    deadline = time.monotonic() + timeout
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    results: list[Any] = [None] * len(pipes)
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} gave no answer in {timeout:.0f} s")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without an answer") from None
            if isinstance(results[rank], Failure) and not failures:
                raise RankError(f"rank {rank} raised\n{results[rank].trace}")
    return results


def _end(processes: list[Any], pipes: list[Connection]) -> None:
    for process in processes:
        # A rank leads a process group, so that helpers which it started go with it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    for process in processes:
        process.join()
        process.close()
    for pipe in pipes:
        pipe.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _like_torchrun(rank: int, world: int, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def _save_without_a_server() -> None:
    """Megatron's checkpoints start a Python on every rank for a queue that only threads use."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


def _rank_main(
    pipe: Connection,
    join: Callable[[], None],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # The rank dies with the fork server, which dies with the test session: nothing is left behind.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.setsid()
    try:
        _save_without_a_server()
        join()
        answer = function(*args)
    except BaseException as error:
        answer = Failure(type(error).__name__, str(error), traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    if isinstance(answer, Failure):
        # Leave at once, as a crashed rank does: the peers see its connections close.
        os._exit(1)
    # Stay until the session ends this process: peers may still be reading what this rank sent.
    pipe.poll(None)


def start(rank: int, world: int, layout: Layout, address: str, timeout: float) -> None:
    """Join the process groups as this rank; ``address`` is torch's ``init_method``."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from moonep_megatron import cpu

    logging.getLogger("megatron").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    # Megatron compiles its activations, which takes far longer than the small tensors of tests.
    torch._dynamo.config.disable = True
    cpu.enable()
    dist.init_process_group(
        "gloo",
        init_method=address,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1234)
