"""Transports of rows, weights and gradients between expert-parallel ranks."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from moonep_megatron.backends.base import Backend
from moonep_megatron.backends.choice import ranks_on_a_gpu, why_not_symmetric
from moonep_megatron.backends.collective import CollectiveBackend
from moonep_megatron.caps import slack_parts
from moonep_megatron.config import MoonEPConfig

logger = logging.getLogger(__name__)
_logged: set[str] = set()


def make_backend(
    config: MoonEPConfig,
    group: dist.ProcessGroup,
    num_experts: int,
    *,
    topk: int | None = None,
    hidden: int | None = None,
    ffn: int | None = None,
    dtype: torch.dtype | None = None,
) -> Backend:
    """The transport that ``--moe-moonep-backend`` names, for one expert-parallel group.

    Collective unless the flag says `collective`. With `auto` all ranks take the symmetric backend
    if every one of them can, else all take the collective one and the first says why.

    Args:
        num_experts: E.
        topk, hidden, ffn, dtype: K, H, F and the dtype of rows and weights, checked where given.

    Raises:
        ValueError: on all ranks alike, for a backend or an option that is not possible here.
    """
    reason = None
    if config.backend != "collective":
        reason = why_not_symmetric(
            group, num_experts, topk=topk, hidden=hidden, ffn=ffn, dtype=dtype
        )
        if reason is None:
            return _symmetric(config, group, num_experts)
    if config.backend == "symmetric":
        raise ValueError(
            f"--moe-moonep-backend symmetric is not possible: {reason}. "
            "Use --moe-moonep-backend collective"
        )
    if config.redispatch:
        why = "" if reason is None else f", which is not possible: {reason}"
        raise ValueError(f"--moe-moonep-redispatch needs the symmetric backend{why}. Leave it out")
    if reason is not None:
        log_once(f"--moe-moonep-backend auto takes the collective backend: {reason}", group)
    return _collective(config, group, num_experts)


def _slots(config: MoonEPConfig, group: dist.ProcessGroup, num_experts: int) -> int:
    """B; a single rank has no use for duplicates."""
    ranks = dist.get_world_size(group)
    return 1 if ranks == 1 else config.slots or num_experts // ranks


def _symmetric(config: MoonEPConfig, group: dist.ProcessGroup, num_experts: int) -> Backend:
    # The kernels' packages are installed only where they are used.
    from moonep_megatron.backends.symmetric import SymmetricBackend  # noqa: PLC0415

    if config.reuse:
        log_once(
            "moonep: --moe-moonep-reuse is unproven on the symmetric backend: its kernels have run "
            "in an emulator, not on a GPU yet",
            group,
        )
    return SymmetricBackend(
        group,
        num_experts=num_experts,
        slots=_slots(config, group, num_experts),
        planner=config.planner,
        slack=slack_parts(config.slack),
        max_tokens=config.max_tokens,
        check_plan=config.check_plan,
        reuse=config.reuse,
        num_sms=config.num_sms,
        sharing=ranks_on_a_gpu(group),
        timeout=config.timeout,
    )


def _collective(config: MoonEPConfig, group: dist.ProcessGroup, num_experts: int) -> Backend:
    if config.num_sms is not None:
        log_once("--moe-moonep-num-sms has no effect on the collective backend")
    if config.timeout != MoonEPConfig.timeout:
        log_once(
            "--moe-moonep-timeout has no effect on the collective backend, whose bound is "
            "--distributed-timeout-minutes"
        )
    return CollectiveBackend(
        group,
        num_experts=num_experts,
        slots=_slots(config, group, num_experts),
        planner=config.planner,
        slack=slack_parts(config.slack),
        max_tokens=config.max_tokens,
        check_plan=config.check_plan,
    )


def log_once(message: str, group: dist.ProcessGroup | None = None) -> None:
    """Log on the first rank of a group, or of all, once a process."""
    if message not in _logged and dist.get_rank(group) == 0:
        logger.warning(message)
    _logged.add(message)
