"""Transports of rows, weights and gradients between expert-parallel ranks."""

from __future__ import annotations

import logging

import torch.distributed as dist

from moonep_megatron.backends.base import Backend
from moonep_megatron.backends.collective import CollectiveBackend
from moonep_megatron.config import MoonEPConfig

logger = logging.getLogger(__name__)
_logged: set[str] = set()


def make_backend(config: MoonEPConfig, group: dist.ProcessGroup, num_experts: int) -> Backend:
    """The transport that ``--moe-moonep-backend`` names, for one expert-parallel group.

    Args:
        num_experts: E.

    Raises:
        ValueError: for a backend that this version does not have.
    """
    if config.backend == "symmetric":
        raise ValueError(
            "--moe-moonep-backend symmetric is not available in this version; "
            "use --moe-moonep-backend collective"
        )
    if config.redispatch:
        raise ValueError(
            "--moe-moonep-redispatch needs the symmetric backend, which this version does not "
            "have; leave it out"
        )
    if config.num_sms is not None:
        log_once("--moe-moonep-num-sms has no effect on the collective backend")
    if config.timeout != MoonEPConfig.timeout:
        log_once(
            "--moe-moonep-timeout has no effect on the collective backend, whose bound is "
            "--distributed-timeout-minutes"
        )
    if config.backend == "auto":
        log_once("--moe-moonep-backend auto: collective, the only one in this version")
    return CollectiveBackend(
        group,
        num_experts=num_experts,
        slots=config.slots or num_experts // dist.get_world_size(group),
        planner=config.planner,
        max_tokens=config.max_tokens,
        check_plan=config.check_plan,
    )


def log_once(message: str) -> None:
    """Log on the first rank, once a process."""
    if message not in _logged and dist.get_rank() == 0:
        logger.warning(message)
    _logged.add(message)
