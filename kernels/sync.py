"""The protocol between ranks: stages, flags, bounded waits, and what is written on a fault.

Invariants:

- ``flags[stage, src]`` on rank d is written by rank src alone, with a growing epoch. It is never
  reset, so a captured graph can be replayed.
- A stage's epoch lives in ``epochs[stage]`` of the rank's own control block. A launch works with
  ``epochs[stage] + 1``; its last block stores that value. All ranks launch the stages in one order,
  so a stage has the same epoch on all of them.
- Epochs are compared by signed difference: they may wrap around.
- A flag is stored with release at system scope, after `last_block` has ordered the stores of all
  blocks before it, and read with acquire at system scope.
- Kernels launched with ``use_pdl`` may start while the one before them runs, ours or another
  library's. They wait for its end, and with it for that of all before, before they touch any
  global memory; whoever lets the next kernel start early has done so itself.
- Every wait is bounded. Past the bound the waiting thread writes a fault record to pinned host
  memory, makes it visible, and traps.

A buffer may be overwritten when:

======================  =========================================================================
receive rows            each reader has signalled RECEIVE_FREE for the last dispatch
combine rows            each owner has signalled GATHERED for the last pre-sum
counts                  always: two halves by the epoch's parity, and an exchange waits for all
slots                   the reader has signalled SLOTS_FREE for the last push
slot gradients          each home has signalled PULLED for the last pull
======================  =========================================================================
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from moonep_megatron.kernels import ptx

STAGE_NAMES = (
    "exchanged",
    "receive rows free",
    "dispatched",
    "summed",
    "gathered",
    "slots free",
    "pushed",
    "gradients ready",
    "pulled",
)
(
    EXCHANGED,
    RECEIVE_FREE,
    DISPATCHED,
    SUMMED,
    GATHERED,
    SLOTS_FREE,
    PUSHED,
    GRADS_READY,
    PULLED,
) = range(len(STAGE_NAMES))
STAGES = len(STAGE_NAMES)

# Most copies of a wave that leave one home: one a holder and slot, R*B <= E.
MAX_COPIES = 1024
# The control block, int32: epochs[STAGES], arrivals[STAGES], copies[2 * MAX_COPIES] (grid counters
# of a push, one a copy and projection). All counters are zero between launches.
CONTROL_INTS = 2 * STAGES + 2 * MAX_COPIES
# The fault record, int32: valid, rank, peer, layer, stage, epoch expected, epoch seen.
FAULT_FIELDS = ("valid", "rank", "peer", "layer", "stage", "expected", "seen")
_POLL_NS = 100


class Group(NamedTuple):
    """Kernel argument: this rank's place in the group, and where the protocol's memory lies."""

    flags: Int64
    """Offset of int32 ``flags[STAGES, R]`` in the allocation of every rank."""
    control: Int64
    """Address of this rank's control block; ``fault`` is that of its fault record."""
    fault: Int64
    timeout_ns: Int64
    """Bound on every wait."""
    rank: Int32
    ranks: Int32
    """R."""
    layer: Int32
    """What a fault record names."""


@cute.jit
def next_epoch(control: Int64, stage: cutlass.Constexpr[int]) -> Int32:
    """The epoch that this launch of a stage works with."""
    return ptx.load(control + stage * 4, "s32") + 1


@cute.jit
def current_epoch(control: Int64, stage: cutlass.Constexpr[int]) -> Int32:
    """The epoch of a stage's last finished launch."""
    return ptx.load(control + stage * 4, "s32")


@cute.jit
def finish_epoch(control: Int64, stage: cutlass.Constexpr[int], epoch: Int32) -> None:
    """Store the epoch of a launch; one thread of its last block calls this."""
    ptx.store(control + stage * 4, epoch, "s32")


def flag_offset(group: Group, stage: int, source: Int32) -> Int64:
    """Offset of ``flags[stage, source]`` behind a rank's base address."""
    return group.flags + Int64(stage * 4) * Int64(group.ranks) + Int64(source) * 4


def flag_address(peers: cute.Tensor, group: Group, stage: int, source: Int32) -> Int64:
    """Address of this rank's own ``flags[stage, source]``."""
    return peers[group.rank] + flag_offset(group, stage, source)


@cute.jit
def wait(
    address: Int64, epoch: Int32, peer: Int32, stage: cutlass.Constexpr[int], group: Group
) -> None:
    """One thread waits until the flag at ``address`` has reached ``epoch``."""
    seen = ptx.load_acquire_sys(address)
    if seen - epoch < 0:
        end = ptx.global_nanoseconds() + group.timeout_ns
        while seen - epoch < 0:
            ptx.nanosleep(_POLL_NS)
            seen = ptx.load_acquire_sys(address)
            if seen - epoch < 0 and ptx.global_nanoseconds() > end:
                fail(group, Int32(1), peer, stage, epoch, seen)


@cute.jit
def fail(
    group: Group,
    kind: Int32,
    peer: Int32,
    stage: cutlass.Constexpr[int],
    expected: Int32,
    seen: Int32,
) -> None:
    """One thread writes the fault record, ``kind`` as "valid", and traps."""
    fields = (group.rank, peer, group.layer, Int32(stage), expected, seen)
    for i in cutlass.range_constexpr(len(FAULT_FIELDS) - 1):
        ptx.store(group.fault + (i + 1) * 4, fields[i], "s32")
    ptx.fence_sys()
    # "valid" last, so that the host never reads half a record.
    ptx.store_release_sys(group.fault, kind)
    ptx.trap()


@cute.jit
def wait_all(peers: cute.Tensor, group: Group, stage: cutlass.Constexpr[int], epoch: Int32) -> None:
    """All threads of a block (at least R): wait for this rank's ``flags[stage, r]`` of every r."""
    thread, _, _ = cute.arch.thread_idx()
    flags = flag_address(peers, group, stage, Int32(0))
    if thread < group.ranks:
        wait(flags + Int64(thread) * 4, epoch, thread, stage, group)
    # The barrier carries what thread r acquired to the whole block.
    cute.arch.sync_threads()


@cute.jit
def signal_all(
    peers: cute.Tensor, group: Group, stage: cutlass.Constexpr[int], epoch: Int32
) -> None:
    """Threads of one block (at least R): store ``epoch`` into ``flags[stage, me]`` of all ranks."""
    thread, _, _ = cute.arch.thread_idx()
    flag = flag_offset(group, stage, group.rank)
    if thread < group.ranks:
        ptx.store_release_sys(peers[thread] + flag, epoch)


@cute.jit
def last_block(arrivals: Int64, blocks: Int32) -> Boolean:
    """Whether this block is the last of its grid to come here; all threads call it, once.

    Every access of every block before its call is ordered before what the last block does next on
    this GPU, and before what it then stores with release for the peers. The counter is zero again
    afterwards.

    Args:
        arrivals: address of the stage's grid counter.
    """
    # Every thread fences its own stores for the peers; the barrier, thread 0's atomic and the last
    # block's stores with release then carry them on (cumulativity).
    ptx.fence_sys()
    return last_block_here(arrivals, blocks)


@cute.jit
def last_block_here(arrivals: Int64, blocks: Int32) -> Boolean:
    """`last_block` where only this GPU reads what the blocks stored, and no peer is told."""
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.utils.SmemAllocator()
    word = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
    cute.arch.sync_threads()
    if thread == 0:
        before = ptx.add_acq_rel_gpu(arrivals, Int32(1))
        if before == blocks - 1:
            ptx.store(arrivals, Int32(0), "s32")
        word[0] = before
    cute.arch.sync_threads()
    return word[0] == blocks - 1


def arrivals(control: Int64, stage: int) -> Int64:
    """Address of a stage's grid counter."""
    return control + (STAGES + stage) * 4


def copy_arrivals(control: Int64, copy: Int32) -> Int64:
    """Address of the grid counter of one copy of a push."""
    return control + 2 * STAGES * 4 + Int64(copy) * 4
