"""Stand-ins that let Megatron-Core train on CPUs over gloo. Only CPU runs import this file.

Megatron-Core asks ``torch.cuda`` for devices, streams and random states whatever the model's
device is. :func:`enable` answers those questions for a process without CUDA; it changes names of
``torch.cuda`` and a few of Megatron's for the whole process, and never takes them back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

CPU = torch.device("cpu")


class _Stream:
    """``torch.cuda.Stream`` and ``Event``: on CPUs work is finished when a call returns.

    For the alltoall dispatcher's copy stream, DDP's communication stream and shared experts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        pass


class _Event(_Stream):
    """An event that has always happened."""

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True


_only_stream = _Stream()


def _current_stream(device: Any = None) -> _Stream:
    # DDP's start_grad_sync and the alltoall dispatcher compare and join streams.
    return _only_stream


def _stream_context(stream: Any) -> contextlib.AbstractContextManager[None]:
    # `with torch.cuda.stream(...)` around the alltoall dispatcher's copies of split sizes.
    return contextlib.nullcontext()


def _current_device() -> torch.device:
    # Rotary embedding, router, DDP buffers and all_to_all allocate on the current CUDA device.
    return CPU


def _nothing(*args: Any, **kwargs: Any) -> None:
    # torch.cuda.synchronize, empty_cache, set_device: timers, checkpoints, process groups.
    pass


# Schedules, optimizers, gradient clipping and causal masks call these with device="cuda".
_CONSTRUCTORS = (
    *("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"),
    *("rand", "randn", "randint"),
)


def _cuda_means_cpu(constructor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # A wrapper rather than a TorchFunctionMode, which is off while Tensor.backward() runs,
    # and so in every recomputed forward pass.
    @functools.wraps(constructor)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        return constructor(*args, **kwargs)

    return on_cpu


def _tensor_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # Tensor.cuda(): loss scalers, checkpoint exchange, Module.cuda().
    return tensor


class _TypeName(str):
    """A tensor's type name that also equals the name of the same type on CUDA."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(self) == other.replace("torch.cuda.", "torch.")

    def __ne__(self, other: object) -> bool:
        return not self == other


_tensor_type = torch.Tensor.type


def _cuda_equal_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # Optimizers and clip_grads compare `param.type()` with 'torch.cuda.FloatTensor' and its kin.
    answer = _tensor_type(tensor, *args, **kwargs)
    return _TypeName(answer) if isinstance(answer, str) else answer


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    # The random-state tracker and tensor_parallel.checkpoint save the device's state ...
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    # ... and restore it; on CPUs there is one state for both.
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    # model_parallel_cuda_manual_seed seeds the device's generator.
    torch.default_generator.manual_seed(seed)


def _not_a_fork_warning(record: logging.LogRecord) -> bool:
    # The tracker warns when the CPU's state moves inside its context: here that is its purpose.
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _splits_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    # The alltoall dispatcher needs its split sizes as host integers; upstream converts only
    # those that are on a GPU. A copy, as there: later in-place changes must not reach them.
    if isinstance(tensor, torch.Tensor) and as_numpy:
        return tensor.clone().numpy()
    return tensor


_enabled = False


def enable() -> None:
    """Install the stand-ins in this process; a second call does nothing.

    Raises:
        RuntimeError: CUDA is available, where the stand-ins would hide the GPUs from Megatron.
    """
    global _enabled
    if _enabled:
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            f"moonep_megatron.cpu.enable() was called, but {torch.cuda.device_count()} CUDA "
            "device(s) are available: train on them, or hide them with CUDA_VISIBLE_DEVICES=''"
        )
    _replace_torch_names()
    _replace_megatron_names()
    _enabled = True


def _replace_torch_names() -> None:
    # `with torch.device(...)` keeps a set of the constructors: let it see the real ones.
    torch.utils._device._device_constructors()
    for name in _CONSTRUCTORS:
        setattr(torch, name, _cuda_means_cpu(getattr(torch, name)))
    for owner, name, stand_in in (
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Event),
        (torch.cuda, "current_stream", _current_stream),
        (torch.cuda, "stream", _stream_context),
        (torch.cuda, "current_device", _current_device),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "empty_cache", _nothing),
        (torch.cuda, "set_device", _nothing),
        (torch.cuda, "get_rng_state", _get_rng_state),
        (torch.cuda, "set_rng_state", _set_rng_state),
        (torch.cuda, "manual_seed", _manual_seed),
        (torch.Tensor, "cuda", _tensor_cuda),
        (torch.Tensor, "type", _cuda_equal_type),
    ):
        setattr(owner, name, stand_in)


def _replace_megatron_names() -> None:
    from megatron.core.tensor_parallel import random  # noqa: PLC0415 - after torch's names
    from megatron.core.transformer.moe import token_dispatcher  # noqa: PLC0415

    for owner, name, stand_in in (
        (random, "_get_cuda_rng_state", _get_rng_state),
        (random, "_set_cuda_rng_state", _set_rng_state),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _splits_to_host),
    ):
        if not hasattr(owner, name):
            raise RuntimeError(
                f"this megatron-core has no {owner.__name__}.{name}: use one of the versions that "
                "pyproject.toml names"
            )
        setattr(owner, name, stand_in)
    logging.getLogger(random.__name__).addFilter(_not_a_fork_warning)
