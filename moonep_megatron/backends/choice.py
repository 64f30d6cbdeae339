"""Whether a group of ranks can use the symmetric backend: decided by all its ranks together.

Each rank looks at its own machine, all tell each other, and every rank comes to the same answer
from the same list. Whatever only a trial can show is tried last, with a small allocation.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from moonep_megatron.backends.base import gather_objects

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_PACKAGES = ("cutlass", "tvm_ffi", "quack")
_TRIAL_BYTES = 4096


@dataclass(frozen=True)
class Answer:
    """Why the machine cannot, or None; and the most ranks of the group that one GPU has."""

    reason: str | None
    sharing: int = 1


# Weak in the group, so that a destroyed group is forgotten.
_answers: WeakKeyDictionary[dist.ProcessGroup, Answer] = WeakKeyDictionary()


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its machine, its GPU's uuid, and why it cannot use peer memory, if so."""

    host: str
    device: str = ""
    problem: str | None = None


def why_not_symmetric(
    group: dist.ProcessGroup,
    num_experts: int,
    *,
    topk: int | None = None,
    hidden: int | None = None,
    ffn: int | None = None,
    dtype: torch.dtype | None = None,
) -> str | None:
    """The reasons against the symmetric backend, the same text on every rank; None: it works.

    Collective at the first call for a group; afterwards the answer about the machine is known.

    Args:
        num_experts, topk: E and K.
        hidden, ffn: H and F, widths of a row and of an expert.
        dtype: of rows and weights.
    """
    # The limits come second: they are the kernels' own, which need the packages.
    return _answer(group).reason or _beyond_limits(
        dist.get_world_size(group), num_experts, topk, {"hidden": hidden, "FFN": ffn}, dtype
    )


def ranks_on_a_gpu(group: dist.ProcessGroup) -> int:
    """The most ranks of the group on one GPU; above 1 in tests only. Collective as the above."""
    return _answer(group).sharing


def _answer(group: dist.ProcessGroup) -> Answer:
    if group not in _answers:
        _answers[group] = _ask_machines(group)
    return _answers[group]


def _beyond_limits(
    ranks: int,
    num_experts: int,
    topk: int | None,
    widths: dict[str, int | None],
    dtype: torch.dtype | None,
) -> str | None:
    from moonep_megatron.kernels import counting, rows  # noqa: PLC0415

    found = []
    for what, value, most in (
        ("ranks (--expert-model-parallel-size)", ranks, rows.MAX_RANKS),
        ("experts (--num-experts)", num_experts, counting.MAX_EXPERTS),
        ("experts a token (--moe-router-topk)", topk, rows.MAX_TOPK),
    ):
        if value is not None and value > most:
            found.append(f"{value} {what} are more than {most}")
    for what, width in widths.items():
        if width is not None and width % 8:
            found.append(f"the {what} size {width} is not a multiple of 8")
    if dtype is not None and dtype not in rows.DTYPES:
        found.append(f"{dtype} is none of {', '.join(map(str, rows.DTYPES))}")
    return "; ".join(found) or None


def _ask_machines(group: dist.ProcessGroup) -> Answer:
    """Machines, then devices, then memory; a later step only where no rank has a reason yet."""
    places = gather_objects(group, _place())
    reason = _by_rank([place.problem for place in places]) or _hosts(places) or _shared(places)
    reason = reason or _by_rank(gather_objects(group, _no_peer_access(places)))
    reason = reason or _try_memory(group)
    return Answer(reason, max(Counter(place.device for place in places).values()))


def _try_memory(group: dist.ProcessGroup) -> str | None:
    import torch.distributed._symmetric_memory as symm_mem  # noqa: PLC0415

    trial: list[torch.Tensor] = []
    device = torch.device("cuda", torch.cuda.current_device())

    def allocate() -> None:
        trial.append(symm_mem.empty(_TRIAL_BYTES, dtype=torch.uint8, device=device))

    # Two steps, so that no rank waits in a rendezvous for one that has no memory to bring.
    return _by_rank(
        gather_objects(group, _attempt("allocate symmetric memory", allocate))
    ) or _by_rank(
        gather_objects(
            group,
            _attempt("map the peers' memory", lambda: symm_mem.rendezvous(trial[0], group)),
        )
    )


def _place() -> Place:
    """This rank's machine and device; cheap where there is no GPU."""
    host = f"{socket.gethostname()} {_boot_id()}"
    if not torch.cuda.is_available():
        return Place(host, problem="no CUDA device")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if properties.major != 9:
        problem = f"{properties.name} has compute capability {properties.major}, not 9"
    else:
        problem = _missing_packages() or ""
    return Place(host, str(properties.uuid), problem or None)


def _boot_id() -> str:
    """Tells machines apart that share a name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _missing_packages() -> str | None:
    for package in _PACKAGES:
        try:
            importlib.import_module(package)
        except Exception as error:  # a broken installation raises anything
            return (
                f"{package} cannot be imported ({type(error).__name__}: {error}); "
                "pip install 'moonep-megatron[gpu]'"
            )
    return None


def _hosts(places: list[Place]) -> str | None:
    hosts = {place.host for place in places}
    return f"the ranks are on {len(hosts)} machines" if len(hosts) > 1 else None


def _shared(places: list[Place]) -> str | None:
    """Several ranks on one device are for tests, and torch wants to be told."""
    devices = [place.device for place in places]
    if len(set(devices)) == len(devices) or os.environ.get(OVERLAPPING) == "1":
        return None
    return f"{len(devices)} ranks share {len(set(devices))} devices (tests may set {OVERLAPPING}=1)"


def _no_peer_access(places: list[Place]) -> str | None:
    """Devices of other ranks that this rank sees and cannot address."""
    own, peers = torch.cuda.current_device(), {place.device for place in places}
    count = torch.cuda.device_count()
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(count)}
    apart = [
        index
        for uuid, index in seen.items()
        if uuid in peers and index != own and not torch.cuda.can_device_access_peer(own, index)
    ]
    return f"device {own} has no peer access to {apart}" if apart else None


def _attempt(what: str, action: Callable[[], object]) -> str | None:
    try:
        action()
    except Exception as error:  # whatever torch or the driver says is the reason
        return f"cannot {what}: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _by_rank(reasons: list[str | None]) -> str | None:
    """All reasons in one text, each with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, reason in enumerate(reasons):
        if reason is not None:
            ranks.setdefault(reason, []).append(rank)
    texts = [
        reason if len(who) == len(reasons) else f"{reason} (expert-parallel ranks {who})"
        for reason, who in ranks.items()
    ]
    return "; ".join(texts) or None
