"""Runs the sources of the kernels on the CPU: every device thread is a greenlet.

A stand-in for the DSL's names is put in place while ``kernels/*.py`` are loaded a second time. The
threads of a launch run in random order and only give way where they meet (barriers, votes,
shuffles) or sleep in a spin, so many a missing barrier shows as a wrong result; that lanes of a
warp meet in different operations, or never, is an error. Launches of one stream run one after the
other, others beside each other. Global addresses are those of CPU tensors.
Integers do not wrap except where a type is named.

It says nothing about types, memory ordering, or time.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import random
import sys
import time
import types
from collections import defaultdict, deque
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

greenlet = __import__("pytest").importorskip("greenlet")

WARP = 32
SOURCES = Path(__file__).parents[1] / "kernels"
current = None


class Trap(Exception):
    pass


class Block:
    def __init__(self, index, threads, grid, stream):
        self.index, self.size, self.grid, self.stream = index, threads, grid, stream
        self.shared = []
        self.meetings = {}
        self.alive = threads


class Thread:
    def __init__(self, block, index, body):
        self.block, self.index, self.lane, self.warp = block, index, index % WARP, index // WARP
        self.allocations = 0
        self.fiber = greenlet.greenlet(body)
        self.result = None


class Machine:
    """Runs launches together, as on several GPUs, until all are through."""

    def __init__(self, seed=0):
        self.random = random.Random(seed)
        self.ready, self.sleeping = [], []
        # By stream: threads of the launch that runs, and the launches behind it.
        self.alive, self.queued = defaultdict(int), defaultdict(deque)

    def launch(self, body, grid, threads, stream):
        self.queued[stream].append((body, grid, threads))
        if not self.alive[stream]:
            self.start(stream)

    def start(self, stream):
        body, grid, threads = self.queued[stream].popleft()
        for b in range(grid):
            block = Block(b, threads, grid, stream)
            for t in range(threads):
                self.ready.append(Thread(block, t, body))
                self.alive[stream] += 1

    def run(self):
        global current
        while self.ready or self.sleeping:
            if not self.ready or (self.sleeping and self.random.random() < 0.01):
                self.ready += self.sleeping
                self.sleeping = []
            i = self.random.randrange(len(self.ready))
            self.ready[i], self.ready[-1] = self.ready[-1], self.ready[i]
            current = thread = self.ready.pop()
            state = thread.fiber.switch()
            if thread.fiber.dead:
                stream = thread.block.stream
                self.alive[stream] -= 1
                if not self.alive[stream] and self.queued[stream]:
                    self.start(stream)
            elif state == "sleep":
                self.sleeping.append(thread)
        waiting = sum(self.alive.values())
        assert waiting == 0, f"{waiting} threads wait for others that never come"


machine = Machine()


def meet(place, members, operation, value, combine):
    """Wait for all members at a place; every one gets its part of what ``combine`` returns."""
    thread = current
    meeting = thread.block.meetings.setdefault(place, {})
    assert all(m[0] == operation for m in meeting.values()), (operation, meeting)
    assert thread.index not in meeting
    meeting[thread.index] = (operation, value, thread)
    if len(meeting) == members:
        del thread.block.meetings[place]
        results = combine({i: m[1] for i, m in meeting.items()})
        for i, (_, _, other) in meeting.items():
            other.result = results[i]
            if other is not thread:
                machine.ready.append(other)
        machine.ready.append(thread)
    greenlet.getcurrent().parent.switch("wait")
    return thread.result


def in_warp(operation, value, combine, mask=0xFFFFFFFF):
    mask &= 0xFFFFFFFF
    assert mask >> current.lane & 1
    return meet(("warp", current.warp, mask), mask.bit_count(), operation, value, combine)


def to_all(function):
    return lambda values: dict.fromkeys(values, function(values))


def wrap(value, bits=32, signed=True):
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if signed and value >> (bits - 1) else value


class Uint32(int):
    def __new__(cls, value=0):
        return super().__new__(cls, wrap(value, signed=False))

    def __mul__(self, other):
        return Uint32(int(self) * int(other))

    def __rshift__(self, other):
        return Uint32(int(self) >> int(other))


class Int32(int):
    def __new__(cls, value=0):
        return wrap(value)


class Int64(int):
    def __new__(cls, value=0):
        return wrap(value, 64)


class Memory:
    """A tensor as a kernel sees it: bounds are checked."""

    def __init__(self, data, address=0):
        self.data, self.address = data, address

    def __getitem__(self, i):
        assert 0 <= i < len(self.data), f"read of {i} of {len(self.data)}"
        return int(self.data[i])

    def __setitem__(self, i, value):
        assert 0 <= i < len(self.data), f"write of {i} of {len(self.data)}"
        self.data[i] = wrap(value)

    @property
    def iterator(self):
        return Pointer(self, 0)


class Pointer:
    def __init__(self, memory, at):
        self.memory, self.at = memory, at

    def __add__(self, offset):
        return Pointer(self.memory, self.at + offset)

    def toint(self):
        return self.memory.address + self.at * 4


class SmemAllocator:
    def allocate_tensor(self, dtype, layout, byte_alignment=16):
        thread, shared = current, current.block.shared
        if thread.allocations == len(shared):
            shared.append(Memory(np.random.default_rng(1).integers(-(2**31), 2**31, layout)))
        thread.allocations += 1
        tensor = shared[thread.allocations - 1]
        assert len(tensor.data) == layout
        return tensor


def shuffle(value, lane):
    return in_warp("shuffle", value, to_all(lambda v: v))[current.warp * WARP + lane]


def shuffle_up(value, delta):
    values = in_warp("shuffle up", value, to_all(lambda v: v))
    return values[current.index - delta] if current.lane >= delta else value


def match(mask, value):
    def combine(values):
        return {i: sum(1 << j % WARP for j in values if values[j] == v) for i, v in values.items()}

    return in_warp("match", value, combine, mask)


def atomic(function):
    def change(pointer, value):
        before = pointer.memory[pointer.at]
        pointer.memory[pointer.at] = function(before, value)
        return before

    return change


REDUCE = {"add": sum, "min": min, "max": max}

arch = types.SimpleNamespace(
    thread_idx=lambda: (current.index, 0, 0),
    block_idx=lambda: (current.block.index, 0, 0),
    grid_dim=lambda: (current.block.grid, 1, 1),
    sync_threads=lambda: meet("block", current.block.size, "block", None, to_all(lambda v: None)),
    barrier=lambda barrier_id, number_of_threads: meet(
        ("barrier", barrier_id), number_of_threads, "barrier", None, to_all(lambda v: None)
    ),
    sync_warp=lambda mask=0xFFFFFFFF: in_warp("sync", None, to_all(lambda v: None), mask),
    # Not negative: ``bits & bits - 1`` of a lone bit 31 is 0 only where integers wrap.
    vote_ballot_sync=lambda flag: in_warp(
        "ballot", bool(flag), to_all(lambda v: sum(1 << i % WARP for i in v if v[i]))
    ),
    warp_redux_sync=lambda value, kind: in_warp(
        kind, value, to_all(lambda v: REDUCE[kind](v.values()))
    ),
    shuffle_sync=shuffle,
    shuffle_sync_up=shuffle_up,
    match_sync=match,
    popc=lambda value: (int(value) & 0xFFFFFFFF).bit_count(),
    lanemask_lt=lambda: (1 << current.lane) - 1,
    atomic_add=atomic(lambda a, b: a + b),
    atomic_or=atomic(lambda a, b: a | b),
    griddepcontrol_wait=lambda: None,
    griddepcontrol_launch_dependents=lambda: None,
    globaltimer=time.monotonic_ns,
)


def address_of(kind, address):
    kinds = {
        "s32": ctypes.c_int32,
        "u32": ctypes.c_uint32,
        "f32": ctypes.c_float,
        "s64": ctypes.c_int64,
        "u8": ctypes.c_uint8,
    }
    assert address % ctypes.sizeof(kinds[kind]) == 0, f"misaligned {kind}"
    return kinds[kind].from_address(address)


def load(address, kind):
    value = address_of(kind, address).value
    return Uint32(value) if kind == "u32" else value


def store(address, value, kind):
    address_of(kind, address).value = value


def load16(address):
    assert address % 16 == 0
    return tuple(load(address + 4 * i, "u32") for i in range(4))


def store16(address, words):
    assert address % 16 == 0
    for i, word in enumerate(words):
        store(address + 4 * i, word, "u32")


def load_float(address, dtype):
    size = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}[dtype]
    raw = torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=getattr(torch, dtype))
    return raw.float().item()


def add(address, value):
    before = load(address, "s32")
    store(address, before + value, "s32")
    return before


def trap():
    raise Trap


ptx = types.SimpleNamespace(
    FLOAT_LOADS=dict.fromkeys(["float32", "bfloat16", "float16", "float64"]),
    FLOAT_BYTES={"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8},
    load=load,
    store=store,
    load16=load16,
    store16=store16,
    load_byte=lambda address: Uint32(load(address, "u8")),
    load_float=load_float,
    load_acquire_sys=lambda address: load(address, "s32"),
    store_release_sys=lambda address, value: store(address, value, "s32"),
    add_acq_rel_gpu=add,
    fence_sys=lambda: None,
    nanosleep=lambda _: greenlet.getcurrent().parent.switch("sleep"),
    global_nanoseconds=time.monotonic_ns,
    trap=trap,
)


class Launch:
    def __init__(self, body):
        self.body = body

    def launch(self, grid, block, stream, min_blocks_per_mp=1, use_pdl=False):
        machine.launch(self.body, grid[0], block[0], stream)


def kernel(function):
    return lambda *arguments: Launch(lambda: function(*arguments))


def as_argument(value):
    if isinstance(value, torch.Tensor):
        assert value.dim() == 1 and value.data_ptr() % 16 == 0
        return Memory(value.numpy(), value.data_ptr())
    return value


def unrolled(*bounds, unroll=1):
    return range(*bounds)


pending = False


def compiled(config):
    """A launcher as `kernels.compile.compiled` returns it; runs at once unless `together`."""
    function, examples = config.build()

    def call(*arguments):
        parameters = list(inspect.signature(function).parameters.values())
        given, passed = iter(arguments), []
        for parameter, example in zip(parameters[:-1], examples, strict=False):
            constant = "Constexpr" in str(parameter.annotation)
            passed.append(example if constant else as_argument(next(given)))
        assert next(given, None) is None, f"{len(arguments)} arguments for {parameters}"
        # Without a stream of its own a launch is behind no other.
        function(*passed, object() if current_stream is None else current_stream)
        if not pending:
            machine.run()

    return call


current_stream = None


@contextmanager
def stream(name):
    """Launches inside are on one stream."""
    global current_stream
    before, current_stream = current_stream, name
    yield
    current_stream = before


def host(function):
    """Run a function on the current stream, as one thread."""
    machine.launch(function, 1, 1, current_stream)


class together:
    """Launches inside run at the same time, at the end."""

    def __enter__(self):
        global pending
        pending = True

    def __exit__(self, kind, value, trace):
        global pending
        pending = False
        if kind is None:
            machine.run()


def load_kernels(*names):
    """The modules of the kernels over the stand-ins."""
    global machine
    machine = Machine()
    cutlass = types.ModuleType("cutlass")
    cute = types.ModuleType("cutlass.cute")
    for name in ("Tensor", "Pointer"):
        setattr(cute, name, object)
    cute.jit, cute.kernel, cute.arch, cute.make_layout = (lambda f: f), kernel, arch, int
    cutlass.cute = cute
    cutlass.Int32, cutlass.Int64, cutlass.Uint32, cutlass.Float32 = Int32, Int64, Uint32, float
    cutlass.Boolean, cutlass.Constexpr = bool, {int: 0, bool: 0, str: 0}
    cutlass.const_expr = lambda value: value
    cutlass.range = unrolled
    cutlass.range_constexpr, cutlass.min, cutlass.max = range, min, max
    cutlass.utils = types.SimpleNamespace(SmemAllocator=SmemAllocator)
    package = types.ModuleType("moonep_megatron.kernels")
    compile_ = types.SimpleNamespace(compiled=compiled, stream=lambda: None)
    compile_.vector = compile_.scalars = lambda _, align=16: None
    package.compile, package.ptx, package.__path__ = compile_, ptx, [str(SOURCES)]
    stand_ins = {
        "cutlass": cutlass,
        "cutlass.cute": cute,
        "moonep_megatron.kernels": package,
        "moonep_megatron.kernels.compile": compile_,
        "moonep_megatron.kernels.ptx": ptx,
    }
    kept = {n: m for n, m in sys.modules.items() if n.startswith(("cutlass", package.__name__))}
    for name in kept:
        del sys.modules[name]
    sys.modules.update(stand_ins)
    try:
        for name in names:
            importlib.import_module(f"{package.__name__}.{name}")
    finally:
        for name in [n for n in sys.modules if n.startswith(("cutlass", package.__name__))]:
            del sys.modules[name]
        sys.modules.update(kept)
    return package
