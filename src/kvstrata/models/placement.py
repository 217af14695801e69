"""Placement of weights in memory: the form that they take on a CPU, and whether they fit.

Knows the module before its weights are read. A model that does not fit is refused then, because a process that asks for
too much memory is killed without a message. `packed/` converts the weights.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from kvstrata.errors import ModelError
from kvstrata.kv.layout import arrays_in
from kvstrata.models.cpu_options import CpuOptions
from kvstrata.models.folder import weight_files
from kvstrata.packed.form import DENSE, CpuForm
from kvstrata.platform.device import free_memory_bytes
from kvstrata.sizes import format_bytes

if TYPE_CHECKING:
    import mlx.nn as nn

logger = logging.getLogger(__name__)


def choose_form(module: nn.Module, options: CpuOptions, allowed_bytes: int) -> CpuForm:
    """Return the form of weights on a CPU.

    Quantized weights stay as they are. Plain weights of 16 bits get 8, or 4 where 8 do not fit; weights of 32 bits stay
    exact."""
    from kvstrata.packed.place import packs_any, placed_bytes

    if options.weights == "raw":
        return DENSE
    if importlib.util.find_spec("numba") is None:
        if options.weights != "auto":
            raise ModelError("Packed weights need numba: pip install 'kvstrata[cpu]', or use --cpu-weights raw")
        return DENSE
    if options.weights != "auto":
        return CpuForm(packs=True, plain_bits=int(options.weights), activations=options.activations)
    if not _has_sixteen_bits(module):
        form = CpuForm(packs=True, plain_bits=None, activations=options.activations)
        return form if packs_any(module, form) else DENSE
    forms = [CpuForm(packs=True, plain_bits=bits, activations=options.activations) for bits in (8, 4)]
    chosen = next((form for form in forms if placed_bytes(module, form) <= allowed_bytes), forms[0])
    if chosen is not forms[0]:
        logger.warning("Weights of 8 bits do not fit into memory: they are quantized to 4. More is lost.")
    return chosen


def _has_sixteen_bits(module: nn.Module) -> bool:
    """Whether most weights are plain and have 16 bits.

    In a quantized model plain layers are plain on purpose: rounding can change the choices of a router of experts."""
    from kvstrata.packed.place import PLAIN, num_values, weight_layers

    layers = weight_layers(module)
    plain = [layer["weight"] for layer in layers if type(layer) in PLAIN]
    sixteen = sum(array.size for array in plain if array.dtype in (mx.bfloat16, mx.float16))
    return 2 * sixteen > sum(map(num_values, layers))


def describe_cpu_weights() -> str:
    """Describe the form of quantized weights on this CPU and the instructions that multiply them."""
    if importlib.util.find_spec("numba") is None:
        return "become float32: numba is missing"
    from kvstrata.packed.cpu.tiles import DOT

    instruction = {"sdot": "sdot", "vpdpbusd": "VNNI"}
    found = next((word for name, word in instruction.items() if name in DOT), "plain vector instructions")
    return f"stay packed, multiplied by {found}"


if TYPE_CHECKING:
    import mlx.nn as nn


def check_memory(module: nn.Module, folder: Path, limit_bytes: int | None, form: CpuForm | None) -> None:
    """Raise ModelError when the weights alone take more than the limit, or than the free memory."""
    needed_bytes = weight_bytes_in_memory(module, form)
    needs = _needs(folder, needed_bytes, form)
    if limit_bytes is not None and needed_bytes > limit_bytes:
        raise ModelError(
            f"{needs}, and the memory limit is {format_bytes(limit_bytes)}. Raise --memory-limit if "
            f"the machine has more, or {_otherwise()}"
        )
    # Otherwise weights are in the GPU's memory, or macOS frees memory by itself.
    if mx.default_device() == mx.cpu and needed_bytes > (free_bytes := free_memory_bytes()):
        raise ModelError(f"{needs}, and {format_bytes(free_bytes)} are free. End other programs, or {_otherwise()}")


def allowed_weight_bytes(limit_bytes: int | None) -> int:
    """Return the bytes that weights may take on a CPU."""
    free_bytes = free_memory_bytes()
    return free_bytes if limit_bytes is None else min(limit_bytes, free_bytes)


def weight_bytes_in_memory(module: nn.Module, form: CpuForm | None) -> int:
    """Return the bytes of weights once they are in memory. `form`: on a CPU."""
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
