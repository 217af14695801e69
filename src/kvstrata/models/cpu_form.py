"""What becomes of a model's weights on a plain CPU: what was asked for, as far as the machine and the model allow.

Knows the module before its weights are read. `packed/` does the work.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

import mlx.core as mx

from kvstrata.errors import ModelError
from kvstrata.models.cpu_options import CpuOptions
from kvstrata.packed.form import DENSE, CpuForm

if TYPE_CHECKING:
    import mlx.nn as nn

logger = logging.getLogger(__name__)


def choose_form(module: nn.Module, options: CpuOptions, room_bytes: int) -> CpuForm:
    """Weights that come quantized stay so. Plain ones of 16 bits get 8, or 4 where 8 do not fit; those of 32 bits stay
    as they are: a user who keeps them wants them exact."""
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
    chosen = next((form for form in forms if placed_bytes(module, form) <= room_bytes), forms[0])
    if chosen is not forms[0]:
        logger.warning("Weights of 8 bits do not fit into memory: they are quantized to 4. More is lost.")
    return chosen


def _has_sixteen_bits(module: nn.Module) -> bool:
    """Whether most of its weights are plain and do. In a quantized model plain layers were left so on purpose: routers
    of experts, say, whose choices a rounding can turn."""
    from kvstrata.packed.place import PLAIN, num_values, weight_layers

    layers = weight_layers(module)
    plain = [layer["weight"] for layer in layers if type(layer) in PLAIN]
    sixteen = sum(array.size for array in plain if array.dtype in (mx.bfloat16, mx.float16))
    return 2 * sixteen > sum(map(num_values, layers))


def weights_here() -> str:
    """What becomes of quantized weights on this CPU, and what multiplies them, for people to read."""
    if importlib.util.find_spec("numba") is None:
        return "become float32: numba is missing"
    from kvstrata.packed.cpu.tiles import DOT

    instruction = {"sdot": "sdot", "vpdpbusd": "VNNI"}
    found = next((word for name, word in instruction.items() if name in DOT), "plain vector instructions")
    return f"stay packed, multiplied by {found}"
