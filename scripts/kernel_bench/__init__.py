"""The parts of scripts/bench_kernels.py. Letters: R ranks, S tokens of a rank, H width, K, E."""
