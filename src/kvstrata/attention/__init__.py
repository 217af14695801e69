"""Attention over segments of KV, raw or quantized, with kernels for CPU, CUDA and Metal.

The package knows codecs and arrays. It knows neither the caches of layers nor the owners of segments.
"""
