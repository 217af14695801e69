"""Kernels over packed weights on a CPU."""
