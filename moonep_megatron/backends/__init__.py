"""Transports of rows, weights and gradients between expert-parallel ranks."""
