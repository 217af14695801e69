"""Packed weights: matrices of a few bits in tiles, which our kernels multiply on a plain CPU in packed form.

The package knows arrays and modules of MLX. It knows neither the source of a model nor sequences and their caches.
"""
