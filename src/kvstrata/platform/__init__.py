"""The machine and its operating system: devices, memory, BLAS, compilers, files, sockets and logging.

Modules here know nothing of models, settings or requests. None imports mlx.core when it is imported: MLX takes the
BLAS that the process has loaded by then, and `kvstrata` loads it first (`platform/blas.py`).
"""
