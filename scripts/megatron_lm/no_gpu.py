"""What Megatron-LM's scripts, beyond Megatron-Core, ask of CUDA: answers for a machine without."""

from types import SimpleNamespace

import torch

from moonep_megatron import cpu


def enable() -> None:
    """Install the package's stand-ins for CPUs, and claim one GPU, which nothing may use."""
    cpu.enable()
    # Megatron compiles its activations, which on a CPU takes longer than such runs.
    torch._dynamo.config.disable = True
    hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=1, name="none")
    for owner, name, answer in (
        (torch.cuda, "is_available", True),  # initialize_megatron insists
        (torch.cuda, "device_count", 1),  # and makes groups only then
        (torch.cuda, "get_device_capability", (9, 0)),
        (torch.cuda, "get_device_properties", hopper),
        (torch.cuda, "is_current_stream_capturing", False),  # torch.optim
        (torch.accelerator, "is_available", False),  # data loaders: nothing to pin memory for
    ):
        setattr(owner, name, lambda *_, answer=answer, **__: answer)
