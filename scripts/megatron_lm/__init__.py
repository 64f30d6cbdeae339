"""Parts of the scripts that run Megatron-LM from a checkout."""
