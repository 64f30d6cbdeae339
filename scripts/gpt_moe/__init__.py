"""The parts of scripts/train_gpt_moe.py."""
