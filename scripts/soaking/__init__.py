"""Many passes of MoE layers with random routing, token counts and delays (scripts/soak.py)."""
