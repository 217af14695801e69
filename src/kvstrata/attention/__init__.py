"""Attention over parts: what a part is, how queries meet several of them, and kernels for a CPU and for CUDA.

Knows codecs and arrays. Does not know what a layer's cache is, nor who holds a part.
"""
