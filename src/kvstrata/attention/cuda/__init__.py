"""Attention on NVIDIA GPUs: our kernels, compiled here and run by MLX."""
