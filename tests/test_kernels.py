"""Every kernel configuration compiled for sm_90a, without a GPU, and its code looked at."""

import importlib
import os
import pkgutil
import re
import subprocess
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs the extra: pip install 'moonep-megatron[gpu]'")
triton = pytest.importorskip("triton")

from moonep_megatron.kernels import compile as kernel_compile  # noqa: E402

from moonep_megatron import kernels  # noqa: E402

# Registers of a thread that a block of 512 leaves to each: 65536 / 512.
MOST_REGISTERS = 128


def all_configs():
    for module in pkgutil.iter_modules(kernels.__path__):
        name = f"{kernels.__name__}.{module.name}"
        configs = getattr(importlib.import_module(name), "configs", None)
        for i, config in enumerate(configs() if configs else ()):
            yield pytest.param((name, i), id=f"{module.name}-{config!r}")


def compile_one(place, folder):
    """PTX and the file of the machine code of a module's i-th configuration."""
    name, i = place
    folder = Path(folder, f"{name}-{i}")
    folder.mkdir()
    config = importlib.import_module(name).configs()[i]
    code = kernel_compile.compile_fresh(config, f"--keep-ptx --keep-cubin --dump-dir {folder}")
    return str(code.__ptx__), next(folder.glob("*.cubin"))


@pytest.fixture(scope="session")
def compiling(request, tmp_path_factory):
    """The configurations that this session's tests look at, each being compiled on some core."""
    folder = tmp_path_factory.mktemp("kernels")
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    places = dict.fromkeys(params["compiled"] for params in calls if "compiled" in params)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield {place: pool.submit(compile_one, place, folder) for place in places}


@pytest.fixture(scope="module", params=list(all_configs()))
def compiled(request, compiling):
    name, i = request.param
    return importlib.import_module(name).configs()[i], *compiling[request.param].result()


def test_no_spills_and_few_registers(compiled):
    _, _, cubin = compiled
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert found, usage
    for registers, stack, local in found:
        assert int(registers) <= MOST_REGISTERS
        assert (int(stack), int(local)) == (0, 0), usage


def test_no_float_atomics(compiled):
    assert not re.search(r"\b(atom|red)\S*\.(f16|bf16|f32|f64)", compiled[1])


def test_no_multicast(compiled):
    """Some machines refuse multicast memory, so nothing may need it."""
    assert "multimem" not in compiled[1]


def test_flags_are_stored_with_release_and_read_with_acquire(compiled):
    ptx = compiled[1]
    config = compiled[0]
    if getattr(config, "signals", True):
        assert "st.release.sys.global.s32" in ptx
    if getattr(config, "waits", True):
        assert "ld.acquire.sys.global.s32" in ptx
        assert "trap;" in ptx


def test_a_kernel_that_starts_early_waits_before_it_touches_memory(compiled):
    ptx = compiled[1]
    if getattr(compiled[0], "starts_early", False):
        body = ptx[ptx.index(".entry") :]
        touched = re.search(r"\b(ld|st|atom|red)\.\S*global|\bcp\.", body)
        assert body.index("griddepcontrol.wait;") < touched.start()
    else:
        # Whoever lets others start early must have been early itself, see kernels/sync.py.
        assert "griddepcontrol" not in ptx


def test_rows_move_in_sixteen_bytes(compiled):
    if not getattr(compiled[0], "moves_rows", False):
        pytest.skip("moves no rows")
    ptx = compiled[1]
    assert re.search(r"ld\.global\S*\.v4\.(u32|b32)", ptx)
    assert re.search(r"st\.global\S*\.v4\.(u32|b32)", ptx)


def test_two_processes_share_one_cache_entry(tmp_path, monkeypatch):
    place = next(all_configs()).values[0]
    monkeypatch.setenv(kernel_compile.CACHE_VARIABLE, str(tmp_path))
    with ProcessPoolExecutor(2) as pool:
        loaded = list(pool.map(_load, [place] * 2))
    assert all(loaded)
    assert len(list(tmp_path.rglob("*.o"))) == 1
    damaged = next(tmp_path.rglob("*.o"))
    damaged.write_bytes(b"not an object file")
    with ProcessPoolExecutor(1) as pool:
        assert pool.submit(_load, place).result()


def _load(place) -> bool:
    name, i = place
    return callable(kernel_compile.compiled(importlib.import_module(name).configs()[i]))
