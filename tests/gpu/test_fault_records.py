"""A rank that is late, gone or brings bad input: the others name it, and end.

A trap ends the CUDA context of its process, so every rank is a process of its own, started from
this very file. An MPS server would end with them, so they are kept away from one.
"""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cutlass", reason="needs the extra: pip install 'moonep-megatron[gpu]'")

from moonep_megatron.kernels import compact, counting, dispatch, exchange, sync
from routed import Case, barrier, row_memory, symmetric

from moonep_megatron.backends import faults

HERE = Path(__file__).parent
RANKS, EXPERTS, LAYER = 2, 12, 5
CASE = Case(64, 2, 64, torch.bfloat16)
TIMEOUT = 2.0
# From a rank's last word to its end: the bound, and time for a busy machine to notice.
ENDS_WITHIN = TIMEOUT + 15.0
STARTS_WITHIN = 150.0
MARK = "MOONEP_FAULT_TEST"
LATE = (
    "moonep_megatron: error on rank 0: expert-parallel rank 0 waited in layer 5 for "
    "expert-parallel rank 1 longer than --moe-moonep-timeout 2 s: stage '{stage}' is at epoch "
    "1, expected 2."
)


# --- the tests --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["exchanged", "dispatched"])
@pytest.mark.parametrize("how", ["sleeps", "exits"])
def test_peer_dies_message(how, stage, tmp_path):
    with _Ranks(tmp_path, f"{how} {stage}") as ranks:
        output, error, seconds = ranks.end_of(0)
        assert ranks.processes[0].returncode == 1
        _named_once(error, LATE.format(stage=stage))
        assert "came back" not in output
        assert TIMEOUT * 0.9 < seconds < ENDS_WITHIN, f"{seconds} s"
        if how == "sleeps":
            assert ranks.processes[1].poll() is None, "the sleeper was not asleep"
    assert _left(ranks.mark) == []


BAD = {
    "ids": "routed 3 choices to expert ids outside -1..11",
    "excess": "routed 10 choices more than --moe-router-topk 2 allows",
    "tokens": "brought 65 tokens, more than --moe-moonep-max-tokens 64",
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_of_one_rank_is_named_by_all(kind, tmp_path):
    with _Ranks(tmp_path, kind) as ranks:
        for rank in range(RANKS):
            output, error, seconds = ranks.end_of(rank)
            assert ranks.processes[rank].returncode == 1
            start = f"moonep_megatron: error on rank {rank}: expert-parallel rank 1 "
            _named_once(error, start + BAD[kind])
            assert f"(layer 5, found by rank {rank})" in error
            assert "came back" not in output
            # Nobody waits for anybody.
            assert seconds < ENDS_WITHIN, f"{seconds} s"
    assert _left(ranks.mark) == []


def test_torchrun_ends_with_the_named_error(tmp_path):
    """The rank that names the sleeper ends; torchrun ends the sleeper, and nothing is left."""
    mark = uuid.uuid4().hex
    words = ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, __file__, "sleeps exchanged"]
    done = subprocess.run(
        command,
        env=_environment(tmp_path, mark),
        capture_output=True,
        text=True,
        timeout=STARTS_WITHIN + ENDS_WITHIN + 60,
        check=False,
    )
    assert done.returncode != 0
    _named_once(done.stderr, LATE.format(stage="exchanged"))
    assert _left(mark) == []


def test_no_fault_no_word(tmp_path):
    with _Ranks(tmp_path, "comes") as ranks:
        for rank in range(RANKS):
            output, error, _ = ranks.end_of(rank)
            assert ranks.processes[rank].returncode == 0, error
            assert "came back" in output
            assert "moonep_megatron: error" not in error


# --- processes --------------------------------------------------------------------------------


class _Ranks:
    """The ranks of one job; however the block ends, they do too."""

    def __init__(self, folder, job):
        self.mark, self.job, self.folder = uuid.uuid4().hex, job, folder
        self.processes = []

    def __enter__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(RANKS):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with self._file(rank, "out").open("w") as out, self._file(rank, "err").open("w") as err:
                process = subprocess.Popen(
                    [sys.executable, __file__, self.job],
                    env=_environment(self.folder, self.mark)
                    | {k: str(v) for k, v in place.items()},
                    stdout=out,
                    stderr=err,
                )
            self.processes.append(process)
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def _file(self, rank, what):
        return self.folder / f"rank{rank}.{what}"

    def end_of(self, rank):
        """A rank's output, its errors, and the seconds from its last word to its end."""
        process = self.processes[rank]
        try:
            process.wait(STARTS_WITHIN + ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            pytest.fail(f"rank {rank} did not end:\n{self._told()}")
        end = time.time()
        output, error = (self._file(rank, what).read_text() for what in ("out", "err"))
        last = re.search(r"^last word (\S+)$", output, re.MULTILINE)
        assert last is not None, f"rank {rank} did not get that far:\n{self._told()}"
        return output, error, end - float(last[1])

    def _told(self):
        files = sorted(self.folder.glob("rank*"))
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in files)


def _environment(folder, mark):
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        MARK: mark,
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        # No MPS server listens there.
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "no-mps"),
    }


def _left(mark):
    """Processes of a job that still run; those just killed get a moment."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(50):
        found = [int(p.name) for p in Path("/proc").glob("[0-9]*") if wanted in _environ_of(p)]
        if not found:
            return []
        time.sleep(0.1)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return found


def _environ_of(process):
    try:
        return (process / "environ").read_bytes()
    except OSError:  # ended meanwhile, or somebody else's
        return b""


def _named_once(error, start):
    lines = [line for line in error.splitlines() if "moonep_megatron: error" in line]
    assert len(lines) == 1, error
    assert lines[0].startswith(start), lines[0]


# --- one rank ---------------------------------------------------------------------------------


class _Layer:
    """Exchange and dispatch of one layer, straight from the kernels."""

    def __init__(self, group, device):
        self.memory = symmetric(group, device)
        self.rank, self.device = group.rank(), device
        # A rank may wait for another's compiler at first.
        self.rows = row_memory(self.memory, CASE)
        self.set_timeout(120.0)
        # Behind the regions of the rows, which share the flags.
        self.counts_offset = 24 << 20
        faults.watch(
            self.memory.fault,
            rank=dist.get_rank(),
            describe=partial(
                faults.describe,
                stages=sync.STAGE_NAMES,
                num_experts=EXPERTS,
                topk=CASE.topk,
                timeout=TIMEOUT,
            ),
        )

    def set_timeout(self, seconds):
        self.rows = dataclasses.replace(self.rows, timeout_ns=int(seconds * 1e9))

    def ids(self, tokens=CASE.tokens):
        return torch.zeros(tokens, CASE.topk, dtype=torch.int32, device=self.device)

    def exchange(self, counts):
        exchange.exchange(
            self.memory.peers,
            counts,
            tokens=int(counts[:, EXPERTS].sum()),
            max_tokens=CASE.tokens,
            rank=self.rank,
            layer=LAYER,
            counts_offset=self.counts_offset,
            flags_offset=self.rows.flags.offset,
            control=self.memory.control,
            fault=self.memory.fault,
            timeout_ns=self.rows.timeout_ns,
        )

    def dispatch(self):
        x = torch.zeros(CASE.tokens, CASE.width, dtype=CASE.dtype, device=self.device)
        token = torch.arange(CASE.tokens, dtype=torch.int32, device=self.device)
        rows = (token[:, None] * CASE.topk + torch.arange(CASE.topk, device=self.device)).int()
        # Every token stays on its own rank.
        to, probs = torch.full_like(rows, self.rank), torch.ones_like(rows, dtype=torch.float32)
        dispatch.dispatch(self.rows, x, to, rows, probs, sms=4, layer=LAYER)

    def free_receive(self):
        dispatch.free_receive(self.rows)


def _bad_counts(layer, kind):
    """The counts of a rank that brings bad input."""
    ids = layer.ids(CASE.tokens + (kind == "tokens"))
    if kind == "ids":
        ids[3], ids[-1, 0] = EXPERTS, -2
    if kind == "excess":
        routing_map = torch.zeros(CASE.tokens, EXPERTS, dtype=torch.bool, device=layer.device)
        routing_map[:5, :4] = True
        return compact.compact(routing_map, routing_map.float(), CASE.topk)[3]
    return counting.count(ids, EXPERTS)[2]


def main(job):
    """One rank: a good pass of everything, so that all is compiled and loaded; then the job."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    layer = _Layer(group, device)
    kind, _, stage = job.partition(" ")
    if layer.rank == 1 and kind in BAD:
        _bad_counts(layer, kind)
    counts = counting.count(layer.ids(), EXPERTS)[2]
    for step in (partial(layer.exchange, counts), layer.dispatch, layer.free_receive):
        step()
        barrier(group)
    layer.set_timeout(TIMEOUT)
    if layer.rank == 1 and kind in BAD:
        counts = _bad_counts(layer, kind)
    torch.cuda.synchronize()
    barrier(group)
    print(f"last word {time.time()}", flush=True)
    if layer.rank == 1 and kind == "sleeps":
        time.sleep(3600)
    if layer.rank == 1 and kind == "exits":
        os._exit(0)
    if stage == "dispatched":
        layer.dispatch()
    else:
        layer.exchange(counts)
    torch.cuda.synchronize()
    print("came back", flush=True)
    dist.barrier(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
