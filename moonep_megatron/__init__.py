"""A Megatron-Core MoE token dispatcher with exactly balanced expert-parallel ranks."""
