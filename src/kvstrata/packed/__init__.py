"""Weights of a few bits that a plain CPU multiplies as they are: in tiles, by kernels of our own.

Knows arrays and modules of MLX. Does not know where a model comes from, nor sequences and their caches.
"""
