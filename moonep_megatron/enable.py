"""Makes Megatron-Core know the dispatcher `moonep`. No other file changes a name of Megatron's."""

from __future__ import annotations

import functools
import logging
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moonep_megatron import config as moonep

NAME = "moonep"
SUPPORTED = ">=0.18,<0.21"
_FIELD = "moe_token_dispatcher_type"
_STOCK_LAYER = (
    "--moe-token-dispatcher-type moonep, but the model specification names Megatron's own "
    "MoELayer, which does not know it. Call moonep_megatron.enable() before the specification "
    "is built (or start the script with `python -m moonep_megatron.run`), or put "
    "moonep_megatron.layer.MoonEPMoELayer in your own specification."
)

logger = logging.getLogger(__name__)
_undo: list[Callable[[], None]] = []


def enable(config: moonep.MoonEPConfig | None = None) -> None:
    """Teach Megatron-Core `--moe-token-dispatcher-type moonep`, with its flags and its checks.

    Call it before arguments are parsed and before layer specifications are built. Calling it again
    changes only the configuration. Every other dispatcher stays Megatron's own.

    Args:
        config: our settings, for programs without Megatron's command line. None takes them from
            Megatron's arguments where they exist, else the defaults.

    Raises:
        ImportError: megatron-core is missing, or of a version that is not supported.
    """
    _require_supported_version()
    if config is not None:
        moonep.set_active(config)
    if _undo:
        return
    from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: PLC0415

    field = TransformerConfig.__dataclass_fields__[_FIELD]
    if NAME in typing.get_args(field.type):
        logger.warning("Megatron-Core has a dispatcher %s of its own: that one is used.", NAME)
        return
    try:
        _set(field, "type", typing.Literal[(*typing.get_args(field.type), NAME)])
        _set(TransformerConfig, "__post_init__", _checked(TransformerConfig.__post_init__))
        _add_flags()
        _report_balance()
        _place_layer()
    except BaseException:
        disable()
        raise


def disable() -> None:
    """Undo `enable()`: Megatron-Core is as it was, and our configuration is forgotten."""
    moonep.set_active(None)
    while _undo:
        _undo.pop()()


def _set(owner: Any, name: str, value: object) -> None:
    _undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _require_supported_version() -> None:
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415

    remedy = f"install it with: pip install 'megatron-core{SUPPORTED}'"
    try:
        from megatron.core import __version__ as found  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(f"moonep_megatron needs megatron-core: {remedy}") from error
    if not SpecifierSet(SUPPORTED).contains(found, prereleases=True):
        raise ImportError(
            f"megatron-core {found} is not supported by moonep_megatron, which needs a version "
            f"{SUPPORTED}: {remedy}"
        )


def _checked(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """`TransformerConfig.__post_init__` with our checks behind Megatron's."""

    @functools.wraps(post_init)
    def wrapped(self: Any) -> None:
        if getattr(self, _FIELD) != NAME:
            return post_init(self)
        # Megatron grants some settings to alltoall by name, and we support those.
        with moonep.presented_as(self, "alltoall"), _static_shapes(self):
            post_init(self)
        moonep.check(self, moonep.active())

    return wrapped


@contextmanager
def _static_shapes(config: Any) -> Iterator[None]:
    """Let a CUDA graph hold `moe`, which Megatron grants to experts padded to a capacity only.

    That gives them shapes that do not depend on the routing; ours never do.
    """
    asked = config.cuda_graph_scope or config.cuda_graph_modules
    asked = asked.split(",") if isinstance(asked, str) else asked
    modules = asked if isinstance(asked, list | tuple) else [asked]
    held = "moe" in {getattr(module, "name", module) for module in modules}
    if not held or config.moe_expert_capacity_factor is not None:
        yield
        return
    padded = config.moe_pad_expert_input_to_capacity
    config.moe_expert_capacity_factor, config.moe_pad_expert_input_to_capacity = 1.0, True
    try:
        yield
    finally:
        config.moe_expert_capacity_factor = None
        config.moe_pad_expert_input_to_capacity = padded


def _add_flags() -> None:
    """Add our flags to Megatron's parser; a program without megatron.training needs none."""
    try:
        from megatron.training import arguments  # noqa: PLC0415
    except ImportError as error:
        logger.info("megatron.training cannot be imported (%s): no command-line flags.", error)
        return
    add_megatron_arguments = arguments.add_megatron_arguments

    @functools.wraps(add_megatron_arguments)
    def wrapped(parser: Any) -> Any:
        return moonep.add_arguments(add_megatron_arguments(parser))

    _set(arguments, "add_megatron_arguments", wrapped)


def _report_balance() -> None:
    """Let Megatron's training loop, which reports MoE metrics by name, report ours as well."""
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker  # noqa: PLC0415

    from moonep_megatron.metrics import TRACKED  # noqa: PLC0415

    report = MoEMetricsTracker.report

    @functools.wraps(report)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> str:
        names = kwargs.get("track_names")
        if moonep.active().log_maxvio and isinstance(names, list):
            # Stages without experts must bring tensors of the size that the others have.
            for name in TRACKED if (layers := moonep.layers_of_model()) else ():
                self.ensure_initialized(name, layers)
            kwargs["track_names"] = [*names, *TRACKED]
        return report(self, *args, **kwargs)

    _set(MoEMetricsTracker, "report", wrapped)


def _place_layer() -> None:
    """Put our layer where specifications name Megatron's, and make a stock layer say so.

    All of Megatron's specifications with experts take the layer from one module.
    """
    from megatron.core.models.gpt import moe_module_specs  # noqa: PLC0415
    from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: PLC0415

    from moonep_megatron.layer import MoonEPMoELayer  # noqa: PLC0415

    build = MoELayer.__init__

    @functools.wraps(build)
    def guarded(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        # Our layer shows Megatron's constructor a name that it knows, so this is a stock layer.
        if getattr(config, _FIELD) == NAME:
            raise ValueError(_STOCK_LAYER)
        build(self, config, *args, **kwargs)

    _set(MoELayer, "__init__", guarded)
    _set(moe_module_specs, "MoELayer", MoonEPMoELayer)
    _rebind(MoELayer, MoonEPMoELayer)
    _undo.append(lambda: _rebind(MoonEPMoELayer, MoELayer))


def _rebind(old: type, new: type) -> None:
    """Let specifications that a module of Megatron built at import name the other layer."""
    for spec in _bound_at_import():
        if spec.func is old:
            # In place, because the specifications of whole models hold this very object.
            spec.__setstate__((new, spec.args, spec.keywords, spec.__dict__ or None))


def _bound_at_import() -> Iterator[Any]:
    names = [name for name in sys.modules if name.startswith("megatron.core.models.")]
    for name in names:
        for value in list(vars(sys.modules[name]).values()):
            if isinstance(value, functools.partial):
                yield value
