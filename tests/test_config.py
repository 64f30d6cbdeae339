"""Settings, flags, the configuration in force, and argument files."""

import argparse
import dataclasses
from types import SimpleNamespace

import pytest
from megatron.training import global_vars

from moonep_megatron import config as moonep
from moonep_megatron.config import MoonEPConfig


@pytest.fixture(autouse=True)
def nothing_in_force(monkeypatch):
    """Each test starts without a configuration and without Megatron's arguments."""
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)
    yield
    moonep.set_active(None)


# --- MoonEPConfig and the flags ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("planner", "fastest"),
        ("backend", "nccl"),
        ("slots", 0),
        ("slots", -3),
        ("num_sms", 0),
        ("max_tokens", 0),
        ("timeout", 0.0),
        ("timeout", float("nan")),
        ("timeout", float("inf")),
        ("timeout", 1e10),
        ("slack", -0.01),
        ("slack", 1.5),
        ("slack", 0.00005),
        ("slack", float("nan")),
        ("force_maxvio", -0.5),
        ("force_maxvio", float("nan")),
    ],
)
def test_bad_values_are_refused_by_flag_value_and_remedy(field, value):
    with pytest.raises(ValueError) as error:
        MoonEPConfig(**{field: value})
    message = str(error.value)
    assert f"--moe-moonep-{field.replace('_', '-')} = {value!r}" in message
    assert "choose one of" in message or "give" in message


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="best, pairs, chain, peel"):
        MoonEPConfig(planner="fastest")
    with pytest.raises(ValueError, match="auto, symmetric, collective"):
        MoonEPConfig(backend="nccl")


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MoonEPConfig().slots = 3


def parsed(*words):
    return moonep.add_arguments(argparse.ArgumentParser()).parse_args(words)


def test_no_flags_give_the_defaults():
    assert moonep.from_arguments(parsed()) == MoonEPConfig()


def test_every_field_is_a_flag():
    every = MoonEPConfig(
        slots=2,
        planner="chain",
        slack=0.0125,
        backend="collective",
        num_sms=8,
        log_maxvio=True,
        force_maxvio=3.5,
        redispatch=True,
        reuse=True,
        max_tokens=4096,
        timeout=60.0,
        check_plan=True,
    )
    default = MoonEPConfig()
    changed = dataclasses.asdict(every)
    assert all(value != getattr(default, name) for name, value in changed.items())
    words = []
    for name, value in changed.items():
        words += [
            f"--moe-moonep-{name.replace('_', '-')}",
            *([] if value is True else [str(value)]),
        ]
    assert moonep.from_arguments(parsed(*words)) == every


def test_help_explains_every_flag():
    text = moonep.add_arguments(argparse.ArgumentParser()).format_help()
    for field in dataclasses.fields(MoonEPConfig):
        assert f"--moe-moonep-{field.name.replace('_', '-')}" in text


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"micro_batch_size": 2, "seq_length": 4096}, 8192),
        ({"micro_batch_size": 1, "eval_micro_batch_size": 4, "seq_length": 100}, 400),
        ({"micro_batch_size": 2, "seq_length": 100, "decoder_seq_length": 300}, 600),
        ({"micro_batch_size": 1, "seq_length": 4096, "tensor_model_parallel_size": 2}, 2048),
        (
            {
                "micro_batch_size": 1,
                "seq_length": 1001,
                "tensor_model_parallel_size": 2,
                "context_parallel_size": 2,
            },
            251,
        ),
        ({"micro_batch_size": 1, "seq_length": None}, None),
    ],
)
def test_max_tokens_comes_from_the_largest_microbatch(sizes, expected):
    arguments = parsed()
    arguments.tensor_model_parallel_size = arguments.context_parallel_size = 1
    vars(arguments).update(sizes)
    assert moonep.from_arguments(arguments).max_tokens == expected
    arguments.moe_moonep_max_tokens = 77
    assert moonep.from_arguments(arguments).max_tokens == 77


# --- which configuration is in force ----------------------------------------------------------


def megatron_arguments(*words, **more):
    arguments = parsed(*words)
    sizes = {"tensor_model_parallel_size": 1, "context_parallel_size": 1}
    vars(arguments).update(sizes | {"micro_batch_size": 2, "seq_length": 8} | more)
    return arguments


def test_defaults_are_in_force_without_anything():
    assert moonep.active() == MoonEPConfig()


def test_the_given_configuration_is_in_force():
    moonep.set_active(MoonEPConfig(slots=2))
    assert moonep.active() == MoonEPConfig(slots=2)
    moonep.set_active(None)
    assert moonep.active() == MoonEPConfig()


def test_megatrons_arguments_are_in_force(monkeypatch):
    monkeypatch.setattr(
        global_vars, "_GLOBAL_ARGS", megatron_arguments("--moe-moonep-planner", "peel")
    )
    assert moonep.active() == MoonEPConfig(planner="peel", max_tokens=16)


def test_a_given_configuration_takes_max_tokens_from_the_arguments(monkeypatch):
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", megatron_arguments())
    moonep.set_active(MoonEPConfig(slots=2))
    assert moonep.active() == MoonEPConfig(slots=2, max_tokens=16)
    moonep.set_active(MoonEPConfig(max_tokens=5))
    assert moonep.active() == MoonEPConfig(max_tokens=5)


def test_a_given_configuration_and_another_on_the_command_line_is_an_error(monkeypatch):
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", megatron_arguments("--moe-moonep-slots", "4"))
    moonep.set_active(MoonEPConfig(slots=4))
    assert moonep.active().slots == 4
    moonep.set_active(MoonEPConfig(slots=2))
    with pytest.raises(ValueError, match=r"--moe-moonep-slots = 4.*slots=2.*one place"):
        moonep.active()


def test_arguments_parsed_before_enable_have_no_flags_and_give_defaults(monkeypatch):
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(seq_length=8))
    assert moonep.active() == MoonEPConfig()


# --- argument files ---------------------------------------------------------------------------


def test_load_arguments(tmp_path):
    file = tmp_path / "some.yaml"
    file.write_text("num-layers: 32\nswiglu: true\nlr: 3.0e-4\nmoe-layer-freq: '([0]+[1]*3)'\n"
                    "recompute-modules: [moe, core_attn]\n")  # fmt: skip
    assert moonep.load_arguments(file) == [
        *("--num-layers", "32", "--swiglu", "--lr", "0.0003"),
        *("--moe-layer-freq", "([0]+[1]*3)", "--recompute-modules", "moe", "core_attn"),
    ]


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "", "swiglu: false\n", "a:\n  b: 1\n", "a: null\n", "a: [[1]]\n"]
)
def test_load_arguments_refuses_what_is_not_an_argument_file(tmp_path, text):
    file = tmp_path / "some.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"some\.yaml"):
        moonep.load_arguments(file)
