"""Attention with the portable kernel: one text for Metal, CUDA and the tests."""
