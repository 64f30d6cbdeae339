"""Our settings: `MoonEPConfig`, the command-line flags, and the configuration in force."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonep_megatron import refusals
from moonep_megatron.caps import SLACK_UNIT, slack_parts
from moonep_megatron.refusals import REFUSED
from moonep_megatron.rules import PLANNERS

__all__ = [
    "BACKENDS",
    "REFUSED",
    "MoonEPConfig",
    "active",
    "add_arguments",
    "check",
    "from_arguments",
    "load_arguments",
    "presented_as",
    "set_active",
]

BACKENDS = ("auto", "symmetric", "collective")
_PREFIX = "moe_moonep_"
_MOST_SECONDS = 1e9  # kernels count nanoseconds in 64 bits


def _flag(name: str) -> str:
    return "--" + (_PREFIX + name).replace("_", "-")


def _option(default: Any, help_: str, **argparse_options: Any) -> Any:
    return field(default=default, metadata={"help": help_, **argparse_options})


@dataclass(frozen=True, kw_only=True)
class MoonEPConfig:
    """Everything a user can set. Each field is also a flag, `--moe-moonep-<field>`.

    Raises:
        ValueError: a value is out of range; the message names flag, value and remedy.
    """

    slots: int | None = _option(
        None, "duplicate slots a rank (default: one for each home expert)", type=int
    )
    planner: str = _option("best", "rule that plans the duplicates", choices=PLANNERS)
    slack: float = _option(
        0.0, "how far above an equal share a rank's rows may be, to save duplicates", type=float
    )
    backend: str = _option("auto", "transport of rows and weights", choices=BACKENDS)
    num_sms: int | None = _option(None, "SMs that communication kernels may use", type=int)
    log_maxvio: bool = _option(False, "log the imbalance of every layer, and what was done")
    force_maxvio: float | None = _option(
        None, "benchmarks only: bias the router until maxvio is about this", type=float
    )
    redispatch: bool = _option(
        False, "dispatch the input again in the backward pass instead of keeping a copy"
    )
    reuse: bool = _option(False, "keep duplicates of every layer until the weights change")
    max_tokens: int | None = _option(
        None, "most tokens of a rank in a microbatch (default: from Megatron's arguments)", type=int
    )
    timeout: float = _option(
        300.0, "seconds that a rank waits for another (symmetric backend)", type=float
    )
    check_plan: bool = _option(False, "debugging: compare the plans of all ranks in every layer")

    def __post_init__(self) -> None:
        for name, choices in (("planner", PLANNERS), ("backend", BACKENDS)):
            if getattr(self, name) not in choices:
                self._refuse(name, f"choose one of {', '.join(choices)}")
        for name in ("slots", "num_sms", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                self._refuse(name, "give a number above 0, or leave it out")
        try:
            slack_parts(self.slack)
        except ValueError:
            steps = 1 / SLACK_UNIT
            self._refuse("slack", f"give 0 for an equal share, or up to 1 in steps of {steps}")
        if not 0 < self.timeout <= _MOST_SECONDS:
            self._refuse("timeout", f"give seconds above 0, at most {_MOST_SECONDS:g}")
        if self.force_maxvio is not None and not self.force_maxvio >= 0:
            self._refuse("force_maxvio", "give a number of at least 0, or leave it out")

    def _refuse(self, name: str, remedy: str) -> None:
        raise ValueError(f"{_flag(name)} = {getattr(self, name)!r} is not possible: {remedy}.")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to a parser, as Megatron's own groups are added; returns the parser."""
    group = parser.add_argument_group(title="moonep")
    for setting in dataclasses.fields(MoonEPConfig):
        options = dict(setting.metadata)
        if isinstance(setting.default, bool):
            options["action"] = "store_true"
        group.add_argument(_flag(setting.name), default=setting.default, **options)
    return parser


def _megatron_arguments() -> Any:
    """Megatron's parsed arguments, or None where its training loop is not in use."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)


def layers_of_model() -> int | None:
    """Layers that Megatron's metrics count, from its arguments where they exist."""
    arguments = _megatron_arguments()
    if arguments is None:
        return None
    return int(arguments.num_layers) + int(getattr(arguments, "mtp_num_layers", None) or 0)


def _max_tokens(arguments: Any) -> int | None:
    """Tokens that a rank brings to a MoE layer in the largest microbatch; None if not known."""
    sequence = getattr(arguments, "seq_length", None) or 0
    sequence = max(sequence, getattr(arguments, "decoder_seq_length", None) or 0)
    batches = (getattr(arguments, n, None) or 0 for n in _MICRO_BATCHES)
    shards = arguments.tensor_model_parallel_size * arguments.context_parallel_size
    return -(-max(batches) * sequence // shards) or None


_MICRO_BATCHES = ("micro_batch_size", "eval_micro_batch_size")


def from_arguments(arguments: Any) -> MoonEPConfig:
    """Read our flags from parsed arguments; `max_tokens` defaults to the largest microbatch."""
    names = [setting.name for setting in dataclasses.fields(MoonEPConfig)]
    given = {n: getattr(arguments, _PREFIX + n) for n in names if hasattr(arguments, _PREFIX + n)}
    if given.get("max_tokens") is None and hasattr(arguments, "tensor_model_parallel_size"):
        given["max_tokens"] = _max_tokens(arguments)
    return MoonEPConfig(**given)


_given: MoonEPConfig | None = None


def set_active(config: MoonEPConfig | None) -> None:
    """Put a configuration in force; None goes back to Megatron's arguments, or the defaults."""
    global _given
    _given = config


def active() -> MoonEPConfig:
    """The configuration in force: the one given, else Megatron's arguments, else the defaults.

    Raises:
        ValueError: one was given and the command line says something else.
    """
    arguments = _megatron_arguments()
    if arguments is None:
        return _given or MoonEPConfig()
    parsed = from_arguments(arguments)
    if _given is None:
        return parsed
    for setting in dataclasses.fields(MoonEPConfig):
        flag_value = getattr(arguments, _PREFIX + setting.name, setting.default)
        given_value = getattr(_given, setting.name)
        if flag_value not in (setting.default, given_value):
            raise ValueError(
                f"{_flag(setting.name)} = {flag_value!r}, but enable() was given "
                f"{setting.name}={given_value!r}: say it in one place."
            )
    return dataclasses.replace(_given, max_tokens=_given.max_tokens or parsed.max_tokens)


@contextmanager
def presented_as(transformer_config: Any, dispatcher: str) -> Iterator[None]:
    """Let a config show another dispatcher type to code of Megatron's that knows no `moonep`."""
    true_type = transformer_config.moe_token_dispatcher_type
    transformer_config.moe_token_dispatcher_type = dispatcher
    try:
        yield
    finally:
        transformer_config.moe_token_dispatcher_type = true_type


def check(transformer_config: Any, moonep_config: MoonEPConfig) -> None:
    """Refuse what is not supported.

    Raises:
        ValueError: names every refused setting with its value and a remedy.
    """
    found = refusals.refusals(transformer_config, moonep_config, _megatron_arguments())
    if found:
        raise ValueError("--moe-token-dispatcher-type moonep: " + "\n".join(found))


def load_arguments(path: str | Path) -> list[str]:
    """Read a YAML argument file and return it as command-line words.

    The file maps flag names without their dashes to values: `num-layers: 32`. True stands for a
    flag without a value, a list for several values.

    Raises:
        ValueError: the file is not such a mapping, or a value is none of these.
    """
    import yaml  # noqa: PLC0415

    entries = yaml.safe_load(Path(path).read_text())
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: expected lines `flag-name: value`, got {type(entries).__name__}")
    words: list[str] = []
    for name, value in entries.items():
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, str | int | float) for v in values) or value is False:
            raise ValueError(
                f"{path}: {name} = {value!r}: give a word, a number, true, or a list of these"
            )
        words += [f"--{name}", *([] if value is True else map(str, values))]
    return words
