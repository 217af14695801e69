"""kvstrata: a local LLM server on MLX whose KV cache is managed memory.

Importing this package before mlx.core is what makes MLX fast on a CPU: the BLAS that the process uses is decided by
whoever loads one first, so it happens here and nowhere else.
"""

from __future__ import annotations

from kvstrata.backend.blas_loader import blas

__version__ = "0.1.0"

blas()
