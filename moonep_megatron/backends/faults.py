"""Turns the fault record of a kernel into one named error and the end of the process.

A kernel that gives up (a wait ran out, or a rank brought bad input) writes a record to pinned host
memory and traps. The CUDA context is lost with it, and whatever error the host meets next says
nothing about the cause. So one thread a process looks at all records, without any CUDA call, and
where one is valid it prints what happened and ends the process with status 1. The end of the
process looks too, for the host may get there before the thread does.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NoReturn

import torch
from torch import Tensor

POLL_SECONDS = 0.02
# The record's first field: what happened. The kernels `sync` and `exchange` write these.
LATE, BAD_IDS, EXCESS_CHOICES, TOO_MANY_TOKENS = 1, 2, 3, 4


@dataclass(frozen=True)
class Fault:
    """A fault record, field by field as the kernels write it.

    Attributes:
        kind: ``LATE`` for a wait that ran out, else what kind of bad input.
        rank: the expert-parallel rank that wrote it.
        peer: the rank that was waited for, or that brought the bad input.
        layer: number of the layer.
        stage: index of the protocol's stage.
        expected, seen: epochs of the flag for ``LATE``; else the most allowed, and how many.
    """

    kind: int
    rank: int
    peer: int
    layer: int
    stage: int
    expected: int
    seen: int


Describe = Callable[[Fault], str]


def describe(
    fault: Fault,
    *,
    stages: Sequence[str],
    num_experts: int | None = None,
    topk: int | None = None,
    timeout: float | None = None,
) -> str:
    """The sentence that a user reads.

    Args:
        stages: names of the protocol's stages, by index.
        num_experts, topk, timeout: E, K and seconds, where known.
    """
    stage = stages[fault.stage] if 0 <= fault.stage < len(stages) else f"number {fault.stage}"
    if fault.kind != LATE:
        text = bad_input(
            fault.kind, fault.peer, fault.seen, fault.expected, num_experts=num_experts, topk=topk
        )
        return f"{text} (layer {fault.layer}, found by rank {fault.rank})"
    bound = "--moe-moonep-timeout" + ("" if timeout is None else f" {timeout:g} s")
    return (
        f"expert-parallel rank {fault.rank} waited in layer {fault.layer} for expert-parallel rank "
        f"{fault.peer} longer than {bound}: stage '{stage}' is at epoch {fault.seen}, expected "
        f"{fault.expected}. Rank {fault.peer} has ended, hangs or is that slow: look at its own "
        "output first, and raise the timeout if it is only slow"
    )


def bad_input(
    kind: int,
    rank: int,
    seen: int,
    most: int,
    *,
    num_experts: int | None = None,
    topk: int | None = None,
) -> str:
    """What a rank did wrong, in the words of every backend.

    Args:
        rank: the expert-parallel rank that did.
        seen, most: choices, or tokens and the most tokens.
    """
    if kind == BAD_IDS:
        legal = "those of an expert and -1" if num_experts is None else f"-1..{num_experts - 1}"
        return (
            f"expert-parallel rank {rank} routed {seen} choices to expert ids outside {legal}; "
            "check the router's output"
        )
    if kind == EXCESS_CHOICES:
        allowed = "--moe-router-topk" + ("" if topk is None else f" {topk}")
        return (
            f"expert-parallel rank {rank} routed {seen} choices more than {allowed} allows for "
            "their tokens; check the routing map"
        )
    if kind == TOO_MANY_TOKENS:
        return (
            f"expert-parallel rank {rank} brought {seen} tokens, more than --moe-moonep-max-tokens "
            f"{most}; raise it to the largest sequence length * micro batch size / (TP * CP) of "
            "the run"
        )
    return f"expert-parallel rank {rank} caused a fault of unknown kind {kind} ({seen}, {most})"


@dataclass(frozen=True)
class _Watched:
    record: weakref.ref[Tensor]
    describe: Describe
    prefix: str

    def message(self) -> str | None:
        """What its record says, or None."""
        record = self.record()
        if record is None:
            return None
        # Not through torch: a poll must not show up in profiles, nor ask the device for anything.
        memory = (ctypes.c_int32 * len(dataclasses.fields(Fault))).from_address(record.data_ptr())
        if not memory[0]:
            return None
        # The host may have seen the first field before the others.
        time.sleep(0.001)
        fields = list(memory)
        try:
            text = self.describe(Fault(*fields))
        except Exception as error:  # a bad description must not hide the fault
            text = f"fault record {fields} (not described: {error!r})"
        return f"{self.prefix}{text}\n"


# By the tensor's id, weakly: an id is only taken again after its tensor has died.
_watched: dict[int, _Watched] = {}
# Taken by the one thread that reports, and never given back.
_reporting = threading.Lock()
_started = False


def watch(fault: Tensor, *, describe: Describe, rank: int | None = None) -> None:
    """Report this record once it is valid, and end the process.

    Keeps nothing alive but ``describe``; a record that is freed is forgotten. Watching a record
    again changes its description.

    Args:
        fault: int32 host memory, the fields of `Fault`, zero until a kernel writes them.
        describe: makes the sentence, usually of `describe` above with its keywords filled in.
        rank: of the whole job, put in front where given.

    Raises:
        ValueError: the tensor is not such a record.
    """
    needed = len(dataclasses.fields(Fault))
    if fault.device.type != "cpu" or fault.dtype != torch.int32 or fault.numel() < needed:
        raise ValueError(
            f"{list(fault.shape)} {fault.dtype} on {fault.device} is no fault record: give at "
            f"least {needed} int32 in host memory"
        )
    prefix = "moonep_megatron: error" + ("" if rank is None else f" on rank {rank}") + ": "
    for key in [key for key, one in list(_watched.items()) if one.record() is None]:
        _watched.pop(key, None)
    _watched[id(fault)] = _Watched(weakref.ref(fault), describe, prefix)
    _start()


def report() -> None:
    """End the process if a record is valid; otherwise do nothing.

    For a host thread that met an error which a fault may have caused.
    """
    for one in list(_watched.values()):
        message = one.message()
        if message is not None:
            _end(message)


def _end(message: str) -> NoReturn:
    _reporting.acquire()  # a second reporter waits here until the first has ended the process
    try:
        # One write to the descriptor: not mixed with other ranks' lines, and no lock of a stream.
        os.write(2, message.encode(errors="replace"))
    finally:
        # The CUDA context is lost: an orderly exit would hang or abort in its destructors.
        os._exit(1)


def _start() -> None:
    global _started
    if _started:
        return
    _started = True
    threading.Thread(target=_poll, name="moonep-faults", daemon=True).start()
    # Registered late, so it runs before what would wait for the device.
    atexit.register(report)
    sys.excepthook = partial(_on_exception, sys.excepthook)
    os.register_at_fork(after_in_child=_forget)


def _poll() -> None:
    while True:
        time.sleep(POLL_SECONDS)
        report()


def _on_exception(
    before: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show the exception as before, then the fault behind it, if there is one."""
    before(kind, error, trace)
    report()


def _forget() -> None:
    # A forked child has no thread here, and may not touch pinned memory of its parent.
    _watched.clear()
