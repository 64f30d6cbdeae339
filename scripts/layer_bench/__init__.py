"""The parts of scripts/bench_layer.py. Letters: R ranks, S tokens of a rank, H width, K, E, F."""
