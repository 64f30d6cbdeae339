"""When a setting is refused: the conditions that the table of `moonep_megatron.refusals` names.

A condition takes the value of its setting and all settings by name, where one that is missing reads
as None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moonep_megatron.config import MoonEPConfig

_OWN = "moe_moonep_"


class Settings:
    """Every setting by name: TransformerConfig first, then Megatron's arguments, then ours."""

    def __init__(self, transformer_config: object, moonep: MoonEPConfig, arguments: object):
        self._megatron = (transformer_config, arguments)
        self._moonep = moonep

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_OWN):
            return getattr(self._moonep, name.removeprefix(_OWN))
        return next((getattr(s, name) for s in self._megatron if hasattr(s, name)), None)


Test = Callable[[Any, Settings], bool]


def is_set(value: Any, _: Settings) -> bool:
    """Given, and not switched off."""
    return value is not None and value is not False


def above_one(value: Any, _: Settings) -> bool:
    """Given, and above 1."""
    return value is not None and value > 1


def other_than(allowed: str) -> Test:
    """Given, and not the one value that is supported."""
    return lambda value, _: value is not None and value != allowed


def uneven_experts(value: Any, at: Settings) -> bool:
    """Not a multiple of the expert-parallel size."""
    return value % at.expert_model_parallel_size != 0


def slots_out_of_range(value: Any, at: Settings) -> bool:
    """Not in 1..E/R."""
    homes = at.num_moe_experts // at.expert_model_parallel_size
    return value is not None and not 1 <= value <= max(homes, 1)


def tokens_twice(value: Any, at: Any) -> bool:
    """Tensor parallelism without sequence parallelism."""
    return not value and (at.tensor_model_parallel_size or 1) > 1


def unbounded_tokens(value: Any, at: Settings) -> bool:
    """Lengths vary, and nothing says how far."""
    return bool(value) and at.moe_moonep_max_tokens is None


def captures_dispatch(at: Any) -> bool:
    """Whether a CUDA graph of Megatron's holds the dispatch and the experts.

    Args:
        at: a TransformerConfig after its validation.
    """
    if at.cuda_graph_impl in (None, "none"):
        return False
    modules = {module.name for module in at.cuda_graph_modules or ()}
    # No modules stand for whole layers; `local` captures a whole layer for its attention's sake.
    whole = at.cuda_graph_impl == "full_iteration" or not modules
    return whole or "moe" in modules or (at.cuda_graph_impl == "local" and "attn" in modules)


def sizes_asked_in_graph(_: Any, at: Settings) -> bool:
    """A graph holds the dispatch of the collective backend."""
    return at.moe_moonep_backend == "collective" and captures_dispatch(at)


def shared_experts_cut(value: Any, at: Settings) -> bool:
    """A graph ends between the steps of overlapped shared experts."""
    cut = any(module.name == "moe_preprocess" for module in value or ())
    return cut and at.cuda_graph_impl != "none" and bool(at.moe_shared_expert_overlap)


def unknown_activation(value: Any, _: Settings) -> bool:
    """None that our expert MLP computes."""
    import torch.nn.functional as F  # noqa: PLC0415
    from megatron.core.activations import quick_gelu, squared_relu  # noqa: PLC0415

    # --quick-geglu names this second one, of the same function.
    from megatron.core.fusions.fused_bias_geglu import quick_gelu as fused  # noqa: PLC0415

    return value not in (F.silu, F.gelu, F.relu, squared_relu, quick_gelu, fused)


def clamp_ignored_by_fusion(value: Any, at: Settings) -> bool:
    """A clamp that Megatron's fused SwiGLU would not apply."""
    fused = at.bias_activation_fusion and at.gated_linear_unit
    return value is not None and fused and at.activation_func.__name__ == "silu"


def offloads_experts(value: Any, at: Settings) -> bool:
    """Modules of the experts are to be offloaded."""
    asked = value if at.fine_grained_activation_offloading else None
    return bool({"expert_fc1", "moe_act", "fused_group_mlp"} & set(asked or ()))


def biased_twice(value: Any, at: Settings) -> bool:
    """Both Megatron and we bias the router."""
    return value is not None and at.moe_moonep_force_maxvio is not None


def no_reuse(value: Any, at: Settings) -> bool:
    """Set where MoE layers run again in backward, or a CUDA graph holds the dispatch."""
    selective = at.recompute_granularity == "selective" and "moe" in (at.recompute_modules or ())
    again = at.recompute_granularity == "full" or selective or bool(at.moe_layer_recompute)
    return bool(value) and (again or captures_dispatch(at))


def ends_before_ours(seconds: float) -> Test:
    """For a limit of Megatron's in units of so many seconds."""

    def refused(value: Any, at: Settings) -> bool:
        kernels = at.moe_moonep_backend != "collective"
        return bool(value) and kernels and value * seconds <= at.moe_moonep_timeout

    return refused


def without_symmetric(value: Any, at: Settings) -> bool:
    """Set while the backend is the collective one."""
    return bool(value) and at.moe_moonep_backend == "collective"
