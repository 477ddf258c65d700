"""Attention benchmarks: speed, memory and HBM traffic, compared with the best peers."""
