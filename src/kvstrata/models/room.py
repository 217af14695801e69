"""Whether the machine has room for a model, told before its weights are read: a process that asks for too much memory
is killed without a word.

Knows a module whose arrays are not computed yet, and what the device makes of them. Reads no weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from kvstrata.errors import ModelError
from kvstrata.kv.layout import arrays_in
from kvstrata.models.files import weight_files
from kvstrata.packed.form import CpuForm
from kvstrata.platform.device import free_memory_bytes
from kvstrata.sizes import format_bytes

if TYPE_CHECKING:
    import mlx.nn as nn


def check_room(module: nn.Module, folder: Path, limit_bytes: int | None, form: CpuForm | None) -> None:
    """Raises ModelError where the weights alone take more than the limit, or than what is free."""
    needed_bytes = placed_bytes(module, form)
    needs = _needs(folder, needed_bytes, form)
    if limit_bytes is not None and needed_bytes > limit_bytes:
        raise ModelError(
            f"{needs}, and the memory limit is {format_bytes(limit_bytes)}. Raise --memory-limit if "
            f"the machine has more, or {_otherwise()}"
        )
    # Elsewhere weights lie in the GPU's memory, or macOS makes room by itself.
    if mx.default_device() == mx.cpu and needed_bytes > (free_bytes := free_memory_bytes()):
        raise ModelError(f"{needs}, and {format_bytes(free_bytes)} are free. End other programs, or {_otherwise()}")


def room_bytes(limit_bytes: int | None) -> int:
    """What weights may take on a CPU."""
    free_bytes = free_memory_bytes()
    return free_bytes if limit_bytes is None else min(limit_bytes, free_bytes)


def placed_bytes(module: nn.Module, form: CpuForm | None) -> int:
    """What its weights take once they are in memory. `form`: on a CPU."""
    if form is not None:
        from kvstrata.packed.place import placed_bytes

        return placed_bytes(module, form)
    return sum(array.nbytes for array in arrays_in(module.parameters()))


def _needs(folder: Path, needed_bytes: int, form: CpuForm | None) -> str:
    file_bytes = sum(path.stat().st_size for path in weight_files(folder))
    why = "" if form is None else f"; on this CPU they are {form.words}"
    needed, on_disk = format_bytes(needed_bytes), format_bytes(file_bytes)
    return f"The weights of {folder} take {needed} of memory ({on_disk} on the disk{why})"


def _otherwise() -> str:
    on_gpu = "; on a GPU weights stay as they are" if mx.default_device() == mx.cpu else ""
    return f"serve a smaller model{on_gpu}"
