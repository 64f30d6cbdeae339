"""Ranks that stay alive and run whole MoE layers, one case after another.

Torch, Megatron and the compiled kernels take seconds to load, so R processes are started once a
session and serve every test with R ranks: one rank a GPU, or all on one GPU. Their process groups
are gloo, which also lets Megatron's alltoall and the collective backend run with several ranks on
one GPU. Without a GPU the same code runs on CPUs, with the collective backend in the place of the
symmetric one, so that the tests themselves can be tried there.
"""

import atexit
import ctypes
import dataclasses
import faulthandler
import logging
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import gloo_staging
import torch
import torch.distributed as dist
from cases import Case, batch, device
from compare import compare
from moe import build, expert_parameters, run_case
from ranks import Failure, Layout, RankError, _collect, _end
from torch import Tensor, nn

GPU = torch.cuda.is_available()
BACKEND = "symmetric" if GPU else "collective"
# A first pass compiles kernels, on each rank for itself: the others wait for it on the device.
WAIT_S = 120.0
CALL_S = 240.0
# Loading torch and Megatron, all ranks at once.
START_S = 240.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
# The most tokens of a rank in all small cases, which so share one set of buffers.
MAX_TOKENS = 64


class Ranks:
    """R processes; ``call`` runs a function on all of them. One that fails ends them all."""

    def __init__(self, size: int, environment: dict[str, str]) -> None:
        self.size, self.environment = size, environment
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.ready = False
        self._folder = tempfile.TemporaryDirectory(prefix="layer_ranks")
        context = mp.get_context("spawn")
        with _environment(ENVIRONMENT | environment):
            for rank in range(size):
                ours, theirs = context.Pipe()
                job = (theirs, rank, size, self._folder.name)
                process = context.Process(target=_serve, args=job)
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        layout: Layout | None = None,
        timeout: float = CALL_S,
    ) -> list[Any]:
        """The results of ``function(*args)``, importable by name, in rank order.

        Megatron's groups are those of ``layout``, by default one EP group of all ranks.

        Raises:
            RankError: for the first rank that raised, died, or gave no answer in ``timeout``.
        """
        self.wait_until_ready()
        for pipe in self.pipes:
            pipe.send((layout or Layout(ep=self.size, expert_tp=1), function, args))
        return self._answers(timeout)

    def wait_until_ready(self) -> None:
        """All modules are loaded; nothing has touched the GPU yet."""
        if not self.ready:
            self._answers(START_S)
            self.ready = True

    def _answers(self, timeout: float) -> list[Any]:
        try:
            return _collect(self.pipes, timeout, failures=False)
        except BaseException:
            self._show_stacks()
            self.close()
            raise

    def _show_stacks(self) -> None:
        """Where each rank is that still runs, on standard error; a rank may hang for its peer."""
        for process in self.processes:
            if self.ready and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def close(self) -> None:
        _end(self.processes, self.pipes)
        self.pipes, self.processes = [], []
        self._folder.cleanup()


_started: dict[tuple[int, tuple[tuple[str, str], ...]], Ranks] = {}


def ranks(size: int, **environment: str) -> Ranks:
    """The session's ranks of this number and environment, started if they do not serve now."""
    key = (size, tuple(environment.items()))
    if key not in _started or not _serving(_started[key]):
        _started[key] = Ranks(size, environment)
    return _started[key]


def _serving(some: Ranks) -> bool:
    return bool(some.processes) and all(process.is_alive() for process in some.processes)


@atexit.register
def _close_all() -> None:
    for some in _started.values():
        if some.processes:
            some.close()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """What processes inherit that start within."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(pipe: Connection, rank: int, size: int, folder: str) -> None:
    # A rank dies with the session, and leads a process group, so that its helpers go with it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.setsid()
    faulthandler.register(signal.SIGUSR1)
    pipe.send_bytes(pickle.dumps("ready"))
    current: Layout | None = None
    while True:
        try:
            layout, function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            if layout != current:
                _join(rank, size, layout, folder)
                current = layout
            answer = function(*args)
            if GPU:
                torch.cuda.synchronize()
        except BaseException as error:
            answer = Failure(type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))


def _join(rank: int, size: int, layout: Layout, folder: str) -> None:
    """Enter the default group, the first time, and Megatron's groups of this layout."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
    else:
        _set_up(rank)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=CALL_S),
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1234)


def _set_up(rank: int) -> None:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    # Megatron compiles its activations, which takes far longer than the small tensors of tests.
    torch._dynamo.config.disable = True
    if GPU:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        gloo_staging.enable()
    else:
        from moonep_megatron import cpu

        cpu.enable()


def layer_case(name: str, size: int, **changes: Any) -> Case:
    """A small case for the backend under test; ``moonep`` adds to its settings."""
    routing = changes.get("routing", ("uniform",))
    settings = {"backend": BACKEND, "max_tokens": MAX_TOKENS, "timeout": WAIT_S}
    options: dict[str, Any] = dict(
        experts=4 * size,
        hidden=256 if GPU else 32,
        ffn=128 if GPU else 32,
        dtype=torch.bfloat16,
        tokens=((MAX_TOKENS,) * size,) * len(routing),
    )
    settings |= dict(changes.pop("moonep", ()))
    return Case(name=name, ranks=size, moonep=tuple(settings.items()), **(options | changes))


def run_poisoned(case: Case, dispatcher: str, delay: float = 0.0) -> Any:
    """``run_case``, after a pass of the same shapes whose every number was NaN.

    What that pass leaves in memory that passes share (receive rows, sums, slots) must not be read.
    Rank r starts ``delay * r`` seconds late.
    """
    try:
        if dispatcher == "moonep":
            _pass_of_nan(case)
        time.sleep(delay * dist.get_rank())
        return run_case(case, dispatcher)
    except BaseException as error:
        raise RuntimeError(f"in case {case.name!r} under {dispatcher}") from error


def _pass_of_nan(case: Case) -> None:
    nan = float("nan")
    case = dataclasses.replace(case, grads="plain", ddp=(), config=())
    layer = build(case, "moonep")
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.fill_(nan)
        for probs in layer.router.probs:
            probs.fill_(nan)
    for m in range(min(2, len(case.routing))):
        layer.router.microbatch = m
        tokens = case.tokens_mr[m][dist.get_rank()]
        hidden = torch.full((tokens, 1, case.hidden), nan, dtype=case.dtype, device=device())
        output = layer(hidden.requires_grad_())[0]
        output.backward(torch.full_like(output, nan))
        assert output.isnan().all(), "NaN was put in, but not everywhere did it come out"


def check(
    cases: list[Case], dispatchers: tuple[str, ...] = ("alltoall", "moonep"), **environment: str
) -> None:
    """Every case against the dense reference, and no worse than alltoall; names all that fail."""
    wrong: list[str] = []
    for case in cases:
        layout = Layout(ep=case.ep_size, expert_tp=1)
        some = ranks(case.ranks, **environment)
        try:
            answers = {d: some.call(run_poisoned, case, d, layout=layout) for d in dispatchers}
            compare(case, answers)
        except AssertionError as error:
            text = str(error)
            wrong.append(text if case.name in text else f"{case.name}: {text}")
            if isinstance(error, RankError):
                break
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(wrong)


class StaticPass:
    """Forward and backward of one layer over inputs that stay in place, as a CUDA graph needs them.

    ``load`` writes the tokens and routing of a microbatch of the case; ``run`` gives ``names``.
    Weight gradients are returned, or with ``fused`` end in fp32 ``main_grad``s, zeroed before.
    """

    names = ("output", "input gradient", "probability gradient")

    def __init__(self, case: Case, *, fused: bool) -> None:
        self.case = dataclasses.replace(case, grads="fused" if fused else "plain")
        self.layer = build(self.case, "moonep")
        self.forced = self.layer.router
        rank, count = dist.get_rank(), len(case.routing)
        self.batches = [batch(case, m, rank) for m in range(count)]
        first = self.batches[0]
        self.tokens = first.tokens_sH[:, None].clone().requires_grad_()
        self.grad = first.grad_sH[:, None].clone()
        self.probs = self.forced.probs[0].detach().clone().requires_grad_()
        self.map = self.forced.maps[0].clone()
        self.layer.router = _StaticRouter(self.probs, self.map)
        self.main_grads: list[Tensor] = []
        fc1, fc2 = expert_parameters(self.layer)
        self.weights = fc1 + fc2
        if fused:
            for parameters in (fc1, fc2):
                self._attach_main_grads(parameters)

    def _attach_main_grads(self, parameters: list[nn.Parameter]) -> None:
        """One buffer in DDP's order, the last parameter first."""
        shape = parameters[0].shape
        buffer = torch.zeros(len(parameters), *shape, dtype=torch.float32, device=device())
        for parameter, place in zip(reversed(parameters), buffer, strict=True):
            parameter.main_grad, parameter.grad_added_to_main_grad = place, False
        self.main_grads.append(buffer)

    @torch.no_grad()
    def load(self, microbatch: int) -> None:
        part = self.batches[microbatch]
        self.tokens.copy_(part.tokens_sH[:, None])
        self.grad.copy_(part.grad_sH[:, None])
        self.probs.copy_(self.forced.probs[microbatch])
        self.map.copy_(self.forced.maps[microbatch])

    def forward(self) -> list[Tensor]:
        with torch.no_grad():
            return [self.layer(self.tokens)[0]]

    def run(self) -> list[Tensor]:
        return self.finish(self.begin())

    def begin(self) -> Tensor:
        """The first half of ``run``: the output, for ``finish``."""
        for buffer in self.main_grads:
            buffer.zero_()
        return self.layer(self.tokens)[0]

    def finish(self, output: Tensor) -> list[Tensor]:
        """The backward pass; gives what ``run`` gives."""
        inputs = [self.tokens, self.probs, *self.weights]
        gradients = torch.autograd.grad(output, inputs, self.grad, allow_unused=True)
        return [output.detach(), *gradients[:2], *(self.main_grads or gradients[2:])]


class _StaticRouter(nn.Module):
    def __init__(self, probs: Tensor, routing_map: Tensor) -> None:
        super().__init__()
        self.probs, self.map = probs, routing_map

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.probs, self.map

    def set_layer_number(self, layer_number: int) -> None:
        pass
