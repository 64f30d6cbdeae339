"""A Megatron-Core MoE token dispatcher with exactly balanced expert-parallel ranks."""

from moonep_megatron.config import MoonEPConfig
from moonep_megatron.enable import disable, enable

__version__ = "0.1.0"
__all__ = ["MoonEPConfig", "__version__", "disable", "enable"]
