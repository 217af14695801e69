"""Codecs with portable kernels: one text for Metal, CUDA and the tests."""
