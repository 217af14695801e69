"""What the machine offers: back-end, device, cores, memory, BLAS, and the folder where kvstrata keeps files.

Knows nothing of models, settings or requests. mlx.core is imported only by `device`, never when this is imported.
"""

from kvstrata.backend.blas_loader import Blas, blas
from kvstrata.backend.folders import cache_root
from kvstrata.backend.machine import (
    Device,
    MlxBackend,
    device,
    free_memory_bytes,
    max_arrays,
    memory_bytes,
    mlx_backend,
    usable_cores,
)
from kvstrata.backend.missing import missing_backend

__all__ = [
    "Blas",
    "Device",
    "MlxBackend",
    "blas",
    "cache_root",
    "device",
    "free_memory_bytes",
    "max_arrays",
    "memory_bytes",
    "missing_backend",
    "mlx_backend",
    "usable_cores",
]
