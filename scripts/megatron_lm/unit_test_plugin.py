"""A pytest plugin for Megatron's own unit tests: they get another dispatcher than they ask for.

UNIT_TESTS_DISPATCHER (``moonep`` or ``alltoall``) takes the place of ``alltoall`` and ``allgather``
wherever a test builds a configuration with experts, and experts are whole (expert TP 1), the only
way that moonep has them. The tests stay as they are. Every rank writes what became of its tests to
the folder UNIT_TESTS_RESULTS, a JSON line each.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

OTHERS = ("alltoall", "allgather")
"""What the tests ask for; `flex` is for libraries of its own."""
GROUP_TIMEOUT = timedelta(seconds=180)

_asked: set[str] = set()
"""Dispatchers that the running test has asked for."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before a conftest or a test file of the checkout is imported."""
    _download_nothing()
    if os.environ.get("STAND_IN"):
        _use_gloo()
    name = os.environ["UNIT_TESTS_DISPATCHER"]
    if name == "moonep":
        _enable()
    _take_the_place_of_others(name)
    _keep_experts_whole()


def _download_nothing() -> None:
    """The checkout's conftest wants packages for data that these tests do not read."""
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    module: Any = ModuleType(name)
    module.download_and_extract_asset = lambda *_, **__: False
    sys.modules[name] = module


def _use_gloo() -> None:
    init = dist.init_process_group

    @functools.wraps(init)
    def gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        init("gloo", *args, **(kwargs | {"timeout": GROUP_TIMEOUT}))

    dist.init_process_group = gloo
    new_group, groups = dist.new_group, {}

    @functools.wraps(new_group)
    def made_before(ranks: Sequence[int] | None = None, *_: Any, **__: Any) -> Any:
        """Every test makes dozens, and eight ranks take seconds to connect them."""
        key = None if ranks is None else tuple(ranks)
        if key not in groups:
            groups[key] = new_group(ranks, timeout=GROUP_TIMEOUT)
        return groups[key]

    destroy = dist.destroy_process_group

    def destroy_all(group: Any = None) -> None:
        if group is None:
            groups.clear()
            destroy()

    dist.new_group, dist.destroy_process_group = made_before, destroy_all


def _enable() -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    import moonep_megatron

    # Not `auto`, which would look at the GPU that the stand-in for CPUs claims.
    cpu = os.environ.get("STAND_IN") == "cpu"
    moonep_megatron.enable(moonep_megatron.MoonEPConfig(backend="collective") if cpu else None)
    from moonep_megatron.layer import MoonEPMoELayer

    def build(cls: type, *args: Any, **kwargs: Any) -> Any:
        """Tests name the layer themselves, where models take it from a specification."""
        config = kwargs.get("config", args[0] if args else None)
        ours = getattr(config, "moe_token_dispatcher_type", None) == "moonep"
        return object.__new__(MoonEPMoELayer if cls is MoELayer and ours else cls)

    MoELayer.__new__ = staticmethod(build)


def _take_the_place_of_others(name: str) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    check = TransformerConfig.__post_init__

    @functools.wraps(check)
    def replaced(self: Any) -> None:
        if self.num_moe_experts is not None:
            _asked.add(self.moe_token_dispatcher_type)
            if self.moe_token_dispatcher_type in OTHERS:
                self.moe_token_dispatcher_type = name
            self.expert_tensor_parallel_size = 1
        check(self)

    TransformerConfig.__post_init__ = replaced


def _keep_experts_whole() -> None:
    from megatron.core import parallel_state

    initialize = parallel_state.initialize_model_parallel

    @functools.wraps(initialize)
    def whole(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(initialize).bind(*args, **kwargs)
        given.arguments["expert_tensor_parallel_size"] = 1
        initialize(*given.args, **given.kwargs)

    parallel_state.initialize_model_parallel = whole


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _asked.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """One line a test: of its call, or of the phase that kept it from one."""
    report = yield
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        line = {
            "test": item.nodeid.split("transformer/moe/")[-1],
            "outcome": report.outcome,
            "why": _why(report, call),
            "asked": sorted(_asked),
        }
        file = Path(os.environ["UNIT_TESTS_RESULTS"], f"rank{os.environ['RANK']}.jsonl")
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")
    return report


def _why(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    error = call.excinfo
    return "" if error is None else f"{error.typename}: {error.value}"
