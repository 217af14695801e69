"""Packed weights: matrices of a few bits in tiles, which kernels multiply on a CPU without unpacking them in memory.

The package knows arrays and modules of MLX. It knows neither the source of a model nor sequences and their caches.
"""
