"""Which backend a group of ranks takes: decided alike on all of them, and said once."""

import gc
import logging
import os
import sys
import types
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from moonep_megatron import backends
from moonep_megatron.backends import choice, make_backend
from moonep_megatron.backends.collective import CollectiveBackend
from moonep_megatron.config import MoonEPConfig


class FakeSymmetric:
    """Keeps what the real backend would be built with."""

    def __init__(self, group, **options):
        self.group, self.options = group, options


def _machine(**changes):
    """Pretend that this rank has a GPU, healthy but for the changes named by rank."""
    module = types.ModuleType("moonep_megatron.backends.symmetric")
    module.SymmetricBackend = FakeSymmetric
    sys.modules[module.__name__] = module
    rank = dist.get_rank()
    mine = {name: by_rank[rank] for name, by_rank in changes.items() if rank in by_rank}
    properties = SimpleNamespace(
        name="Some GPU", major=mine.get("major", 9), uuid=mine.get("uuid", f"gpu-{rank}")
    )
    torch.cuda.is_available = lambda: mine.get("cuda", True)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda device: properties
    choice.socket.gethostname = lambda: mine.get("host", "here")
    choice._missing_packages = lambda: mine.get("missing")
    choice._no_peer_access = lambda places: mine.get("peer")
    import torch.distributed._symmetric_memory as symm_mem

    symm_mem.empty = lambda *_, **__: _or_raise(mine.get("empty"))
    symm_mem.rendezvous = lambda *_, **__: _or_raise(mine.get("rendezvous"))


def _or_raise(message):
    if message:
        raise RuntimeError(message + "\nand a long story")
    return torch.empty(1)


class _Log(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def _make(changes, settings, sizes, layers=2):
    """Build the backends of some layers; their class, their options and what was logged."""
    _machine(**changes)
    log = _Log()
    backends.logger.handlers[:] = [log]
    group = dist.group.WORLD
    made = [make_backend(MoonEPConfig(**settings), group, 8, **sizes) for _ in range(layers)]
    options = made[0].options if isinstance(made[0], FakeSymmetric) else None
    return type(made[0]).__name__, options, log.lines


def _on(ranks, changes, failures=False, sizes=None, **settings):
    return run_ranks(ranks, _make, changes, settings, sizes or {}, failures=failures)


def test_auto_takes_symmetric_where_every_rank_can():
    sizes = {"topk": 8, "hidden": 64, "ffn": 24, "dtype": torch.bfloat16}
    answers = _on(2, {}, sizes=sizes, num_sms=12, timeout=7.5, slots=3, planner="peel", slack=0.015)
    options = {"num_experts": 8, "slots": 3, "planner": "peel", "slack": 150, "max_tokens": None}
    options |= {"check_plan": False, "reuse": False, "num_sms": 12, "sharing": 1, "timeout": 7.5}
    assert answers == [("FakeSymmetric", options, [])] * 2


def _on_one_gpu():
    os.environ[choice.OVERLAPPING] = "1"
    return _make({"uuid": {0: "same", 2: "same"}}, {}, {})


def test_ranks_that_share_a_gpu_are_told_to_share_its_sms():
    assert [options["sharing"] for _, options, _ in run_ranks(3, _on_one_gpu)] == [2] * 3


def test_slots_default_to_the_home_experts_and_redispatch_passes():
    (name, options, _), _ = _on(2, {}, backend="symmetric", redispatch=True)
    assert (name, options["slots"]) == ("FakeSymmetric", 4)


def test_a_single_rank_has_one_slot_only():
    ((_, options, _),) = _on(1, {}, backend="symmetric", slots=4)
    assert options["slots"] == 1


REASONS = [
    ({"cuda": {1: False}}, ("no CUDA device", "[1]")),
    ({"major": {0: 8}}, ("capability 8", "[0]")),
    ({"missing": {2: "quack cannot be imported"}}, ("quack", "[2]")),
    ({"host": {2: "there"}}, ("2 machines",)),
    ({"uuid": {0: "same", 2: "same"}}, ("3 ranks share 2 devices", choice.OVERLAPPING)),
    ({"peer": {1: "no peer access to [2]"}}, ("peer access", "[1]")),
    ({"empty": {1: "out of memory"}}, ("allocate", "out of memory", "[1]")),
    ({"rendezvous": {0: "no handle", 1: "no handle"}}, ("map", "no handle", "[0, 1]")),
]


def _every_reason():
    """For each reason: what `auto` makes, what it logs, and what `symmetric` raises."""
    found = []
    for changes, _ in REASONS:
        choice._answers.clear()
        name, _, lines = _make(changes, {}, {})
        with pytest.raises(ValueError) as error:
            _make(changes, {"backend": "symmetric"}, {})
        found.append((name, lines, str(error.value)))
    return found


def test_one_rank_that_cannot_decides_for_all():
    first, *others = run_ranks(3, _every_reason)
    for (_, parts), (name, lines, error), *rest in zip(REASONS, first, *others, strict=True):
        (line,) = lines
        assert "--moe-moonep-backend auto takes the collective backend" in line
        assert "--moe-moonep-backend symmetric is not possible" in error
        assert "Use --moe-moonep-backend collective" in error
        for text in (line, error):
            assert "story" not in text
            assert all(part in text for part in parts), text
        assert name == "CollectiveBackend"
        assert rest == [(name, [], error)] * 2


def test_what_the_kernels_do_not_take():
    pytest.importorskip("cutlass")
    most = {"hidden": 104, "FFN": 16}
    assert choice._beyond_limits(128, 1024, 32, most, torch.float16) is None
    assert choice._beyond_limits(1, 7, None, {"hidden": None, "FFN": None}, None) is None
    found = choice._beyond_limits(129, 1032, 33, {"hidden": 100, "FFN": 12}, torch.float64)
    reasons = found.split("; ")
    for reason, parts in zip(
        reasons,
        (
            ("129", "--expert-model-parallel-size", "128"),
            ("1032", "--num-experts", "1024"),
            ("33", "--moe-router-topk", "32"),
            ("hidden size 100", "multiple of 8"),
            ("FFN size 12", "multiple of 8"),
            ("torch.float64", "torch.bfloat16"),
        ),
        strict=True,
    ):
        assert all(part in reason for part in parts), reason


def test_auto_minds_the_kernels_limits():
    ((name, _, lines),) = _on(1, {}, sizes={"topk": 40, "hidden": 20, "ffn": 28})
    assert name == "CollectiveBackend"
    for part in ("40", "hidden size 20", "FFN size 28"):
        assert part in lines[0]


def test_several_ranks_on_a_device_when_torch_may(monkeypatch):
    places = [choice.Place("here", "same"), choice.Place("here", "same")]
    monkeypatch.setenv(choice.OVERLAPPING, "1")
    assert choice._shared(places) is None
    monkeypatch.setenv(choice.OVERLAPPING, "0")
    assert "2 ranks share 1 devices" in choice._shared(places)


def test_peer_access_of_the_devices_in_the_group(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"gpu-{i}")
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: peer != 3)
    # Device 3 is seen but not in the group, "far" is in the group but not seen.
    assert choice._no_peer_access([choice.Place("", d) for d in ("gpu-1", "gpu-2", "far")]) is None
    assert "to [3]" in choice._no_peer_access([choice.Place("", d) for d in ("gpu-1", "gpu-3")])


def test_missing_package_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(choice, "_PACKAGES", ("json", "no_such_package"))
    reason = choice._missing_packages()
    assert reason.startswith("no_such_package cannot be imported (ModuleNotFoundError")
    assert "pip install 'moonep-megatron[gpu]'" in reason
    monkeypatch.setattr(choice, "_PACKAGES", ("json",))
    assert choice._missing_packages() is None


def _count_gathers(backend):
    gathers = []
    gather = choice.gather_objects
    choice.gather_objects = lambda group, mine: gathers.append(mine) or gather(group, mine)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups:
        for _ in range(3):
            made = make_backend(MoonEPConfig(backend=backend), group, 8)
            assert isinstance(made, CollectiveBackend)
    alive = len(choice._answers)
    dead = weakref.ref(groups[0])
    del group, made
    groups.pop(0)
    dist.destroy_process_group(dead())
    gc.collect()
    return len(gathers), alive, len(choice._answers)


def test_ranks_without_gpus_talk_once_a_group_and_forget_it():
    assert run_ranks(2, _count_gathers, "auto") == [(2, 2, 1)] * 2
    # `collective` needs no answer, so nobody asks.
    assert run_ranks(2, _count_gathers, "collective") == [(0, 0, 0)] * 2


def test_flags_without_effect_are_said():
    (_, _, lines), (_, _, others) = _on(2, {}, backend="collective", num_sms=4, timeout=9.0)
    assert ["--moe-moonep-num-sms" in lines[0], "--moe-moonep-timeout" in lines[1]] == [True, True]
    assert len(lines) == 2
    assert others == []


def test_both_backends_keep_duplicates():
    (name, options, (line,)), (_, _, others) = _on(2, {}, reuse=True)
    assert (name, options["reuse"], others) == ("FakeSymmetric", True, [])
    assert "--moe-moonep-reuse" in line and "unproven" in line
    for name, _, lines in _on(2, {}, reuse=True, backend="collective"):
        assert (name, lines) == ("CollectiveBackend", [])


def test_redispatch_needs_the_symmetric_backend():
    for failure in _on(2, {"cuda": {0: False}}, failures=True, redispatch=True):
        assert failure.kind == "ValueError"
        assert "--moe-moonep-redispatch" in failure.message
        assert "no CUDA device" in failure.message
    (failure,) = _on(1, {}, failures=True, redispatch=True, backend="collective")
    assert "--moe-moonep-redispatch" in failure.message
