"""kvstrata: a local LLM server on MLX whose KV cache is managed memory.

Importing this package before mlx.core is what makes MLX fast on a CPU: the process uses the BLAS that is loaded
first, so it is loaded here and nowhere else. Importing it before mlx-lm keeps the limits of open files
that the process was given. Products of float32 stay float32: some GPUs would round what they multiply to ten bits, and
scores over planes are such products (MLX_ENABLE_TF32=1 in the environment turns that on again).
"""

from __future__ import annotations

import os

from kvstrata.platform.blas import blas
from kvstrata.platform.files import keep_open_files

__version__ = "0.1.0"

os.environ.setdefault("MLX_ENABLE_TF32", "0")
blas()
keep_open_files()
