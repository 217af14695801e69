"""Makes every weight of a model float32, for the CPU back-end.

There float32 is the only dtype that goes through BLAS: 16-bit products are far slower, quantized ones slower still.
Knows mlx's and mlx-lm's quantized layers. Module by module, so that only one layer is ever held twice.
"""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

# Each plain layer takes its sizes from its weight, so it is born tiny and given the real one.
PLAIN_LAYERS = {
    nn.QuantizedLinear: lambda: nn.Linear(1, 1, bias=False),
    nn.QuantizedEmbedding: lambda: nn.Embedding(1, 1),
    QuantizedSwitchLinear: lambda: SwitchLinear(1, 1, 1, bias=False),
    QuantizedMultiLinear: lambda: MultiLinear(1, 1, 1),
}

PACKED = ("weight", "scales", "biases")
FLOAT_BYTES = 4


def make_dense(model: nn.Module) -> None:
    """Layers of other classes (a few models fuse their own) stay quantized; they work, slowly."""
    for name, module in model.named_modules():
        if type(module) in PLAIN_LAYERS:
            model.update_modules(tree_unflatten([(name, _plain(module))]))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    mx.clear_cache()


def dense_bytes(model: nn.Module) -> int:
    """What `make_dense` would leave in memory. Computes nothing, so arrays that are not read yet stay so."""
    quantized = [module for _, module in model.named_modules() if type(module) in PLAIN_LAYERS]
    packed = {id(module[name]) for module in quantized for name in PACKED if name in module}
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    others = {id(array): array for _, array in parameters if id(array) not in packed}
    unpacked_values = sum(module["scales"].size * module.group_size for module in quantized)
    return FLOAT_BYTES * unpacked_values + sum(map(_bytes_as_float32, others.values()))


def _bytes_as_float32(array: mx.array) -> int:
    return array.size * FLOAT_BYTES if mx.issubdtype(array.dtype, mx.floating) else array.nbytes


def _plain(module: nn.Module) -> nn.Module:
    layer = PLAIN_LAYERS[type(module)]()
    layer.weight = _dequantized(module)
    if "bias" in module:
        layer.bias = module["bias"].astype(mx.float32)
    mx.eval(layer.parameters())
    # The packed weight goes now, not when the whole model is done: loading peaks at one layer above the result.
    for name in PACKED:
        module.pop(name, None)
    return layer


def _dequantized(module: nn.Module) -> mx.array:
    scales, biases = module["scales"], module.get("biases")
    if biases is not None:
        # In float32, or scale * code + bias is rounded to 16 bits first.
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    weight = mx.dequantize(
        module["weight"],
        scales,
        biases,
        group_size=module.group_size,
        bits=module.bits,
        mode=vars(module)["mode"],
        global_scale=module.get("global_scale"),
        dtype=mx.float32,
    )
    return weight.astype(mx.float32)
