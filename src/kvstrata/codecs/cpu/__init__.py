"""Codecs on a CPU: numba loops over MLX's memory."""
