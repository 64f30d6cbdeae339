"""Compiles kernels once: in memory, and on disk for all processes of a machine.

A *config* is a frozen dataclass of compile-time constants with a method ``build()`` that returns a
jitted host function and example arguments without data. Nothing here needs a GPU: without one,
code for sm_90a is made, which is how the tests look at every kernel.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, get_type_hints

# The DSL reads the target when it is imported; its default without a GPU is another chip.
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor

CACHE_VARIABLE = "MOONEP_KERNEL_CACHE"
_FUNCTION = "launch"


class Config(Protocol):
    """Compile-time constants of one kernel."""

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """The jitted host function and example arguments.

        Constants stand before tuples: names of kernels are cut, and a profiler should show them.
        """


def vector(dtype: Any, align: int = 16) -> Any:
    """An example argument: a dense 1-D device tensor of any length."""
    return make_fake_compact_tensor(
        dtype, (cute.sym_int(),), stride_order=(0,), assumed_align=align
    )


def scalars(kind: Any) -> Any:
    """An example argument: a NamedTuple of scalars, each of the type that its class annotates."""
    return kind(*(scalar(0) for scalar in get_type_hints(kind).values()))


def stream() -> Any:
    """An example argument: torch's current stream, taken from the environment at each call."""
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


def compile_fresh(config: Config, options: str = "") -> Any:
    """Compile without any cache; ``options`` as the DSL takes them, for example ``--keep-ptx``."""
    function, arguments = config.build()
    return cute.compile(function, *arguments, options=f"--enable-tvm-ffi {options}".strip())


@cache
def compiled(config: Config) -> Callable[..., None]:
    """The compiled launcher of a config, from memory, from disk, or made now.

    Safe under torchrun: one process compiles a config, the others wait for its file.
    """
    path = cache_folder() / f"{_key(config)}.o"
    with _locked(path.with_suffix(".lock")):
        if path.exists():
            try:
                return _load(path)
            except Exception:  # a damaged file is a miss, whatever the loader calls it
                path.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        compile_fresh(config).export_to_c(object_file_path=str(temporary), function_name=_FUNCTION)
        temporary.replace(path)
        return _load(path)


def cache_folder() -> Path:
    """Folder of object files by source and versions; $MOONEP_KERNEL_CACHE overrides the user's."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moonep_megatron"
    return Path(os.environ.get(CACHE_VARIABLE, default)) / _fingerprint()


@cache
def _fingerprint() -> str:
    """Changes with the sources of this package, Python, the DSL and the target."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    packages = [version(p) for p in ("nvidia-cutlass-dsl", "apache-tvm-ffi")]
    target = os.environ["CUTE_DSL_ARCH"]
    digest.update(repr((sys.version_info[:2], packages, target)).encode())
    return digest.hexdigest()


def _key(config: Config) -> str:
    name = f"{type(config).__module__}.{config!r}"
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()


def _load(path: Path) -> Callable[..., None]:
    return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[_FUNCTION]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
