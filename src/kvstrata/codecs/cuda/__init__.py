"""Codecs on NVIDIA GPUs: kernels that are compiled here and run by MLX."""
