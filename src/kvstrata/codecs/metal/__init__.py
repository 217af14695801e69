"""Codecs with portable kernels: one source text for Metal, CUDA and the tests."""
