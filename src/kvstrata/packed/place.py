"""Replacement of a model's layers by packed layers, for a CPU, one layer at a time.

The layers are those of mlx and mlx-lm. Weights without tiles (formats that few models have, matrices whose rows are no
whole groups) become float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from kvstrata.packed.form import CpuForm
from kvstrata.packed.quantized import TILE_ROWS, QuantizedMatrix, num_panels

if TYPE_CHECKING:
    from kvstrata.packed.weight import PackedWeight

PLAIN = {nn.Linear, nn.Embedding, SwitchLinear, MultiLinear}
# Layers of float32 for weights without tiles. A plain layer takes its sizes from its weight, so it is created tiny and
# then given the real weight.
QUANTIZED = {
    nn.QuantizedLinear: lambda: nn.Linear(1, 1, bias=False),
    nn.QuantizedEmbedding: lambda: nn.Embedding(1, 1),
    QuantizedSwitchLinear: lambda: SwitchLinear(1, 1, 1, bias=False),
    QuantizedMultiLinear: lambda: MultiLinear(1, 1, 1),
}
WEIGHTS = ("weight", "scales", "biases", "global_scale")
FLOAT_BYTES = 4
GROUP = 32  # of weights that are quantized here


def place(model: nn.Module, form: CpuForm, fingerprint: str = "") -> None:
    """Replace the layers of a model, with a memory peak of one layer above the result.

    Layers of other classes stay and are slow; a few models define their own. `fingerprint`: of the model in this form,
    by which packed weights are kept for the next start; empty: they are not kept.
    """
    if form.packs:
        _place_packed(model, form, fingerprint)
    else:
        _replace_layers(model, form)
    mx.clear_cache()


def _place_packed(model: nn.Module, form: CpuForm, fingerprint: str) -> None:
    from kvstrata.packed.block import fuse_blocks
    from kvstrata.packed.packed_file import packed_file_path, read_packed_file, writing_packed_file

    if not fingerprint:
        _replace_layers(model, form)
        fuse_blocks(model)
        return
    path = packed_file_path(fingerprint)
    kept = read_packed_file(path)
    if kept is not None:
        _replace_layers(model, form, kept.weights)
        fuse_blocks(model, kept.activations)
        return
    with writing_packed_file(path, placed_bytes(model, form)) as writer:
        _replace_layers(model, form, on_packed=writer.add_weights)
        writer.publish(fuse_blocks(model))


def _replace_layers(
    model: nn.Module,
    form: CpuForm,
    kept: Mapping[str, Sequence[PackedWeight]] = MappingProxyType({}),
    on_packed: Callable[[str, Sequence[PackedWeight]], None] = lambda _name, _weights: None,
) -> None:
    """Replace layers. `kept`: packed weights by layer name. `on_packed` receives the packed weights of each layer."""
    done: dict[int, nn.Module | None] = {}  # a module may occur twice
    for name, module in model.named_modules():
        if type(module) in QUANTIZED or type(module) in PLAIN:
            if id(module) not in done:
                done[id(module)] = _place_layer(module, form, kept.get(name, ()), partial(on_packed, name))
            if (placed := done[id(module)]) is not None:
                model.update_modules(tree_unflatten([(name, placed)]))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())


def placed_bytes(model: nn.Module, form: CpuForm) -> int:
    """Return the bytes that the model would take after `place`. No array is computed, so lazy arrays stay unread."""
    layers = weight_layers(model)
    seen = {id(layer[name]) for layer in layers for name in WEIGHTS if name in layer}
    total = sum(_matrix_bytes(layer, form) for layer in layers)
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    others = {id(array): array for _, array in parameters if id(array) not in seen}
    return total + sum(map(_bytes_as_float32, others.values()))


def packs_any(model: nn.Module, form: CpuForm) -> bool:
    return any(_is_packed(layer, form) for layer in weight_layers(model))


def weight_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that hold matrices, each once."""
    modules = {id(module): module for _, module in model.named_modules()}
    return [module for module in modules.values() if type(module) in QUANTIZED or type(module) in PLAIN]


def num_values(layer: nn.Module) -> int:
    return layer["weight"].size if type(layer) in PLAIN else layer["scales"].size * _quantized_matrix(layer).group


def _place_layer(
    module: nn.Module,
    form: CpuForm,
    kept: Sequence[PackedWeight],
    on_packed: Callable[[Sequence[PackedWeight]], None],
) -> nn.Module | None:
    """Return the replacement of a layer. None: the layer stays."""
    if type(module) in PLAIN and not _is_packed(module, form):
        return None
    if _is_packed(module, form):
        weights = kept if _have_shapes_of(module, kept) else _pack(module, form)
        on_packed(weights)
        replacement = _packed_module(module, form, weights)
    else:
        replacement = QUANTIZED[type(module)]()
        replacement.weight = _dequantize(module)
        if "bias" in module:
            replacement.bias = module["bias"].astype(mx.float32)
    mx.eval(replacement.parameters())
    # The weight is freed now, not when the whole model is done.
    for name in WEIGHTS:
        module.pop(name, None)
    return replacement


def _packed_module(module: nn.Module, form: CpuForm, weights: Sequence[PackedWeight]) -> nn.Module:
    from kvstrata.packed import layers

    kinds: dict[type, type[layers.PackedModule]] = {
        nn.Linear: layers.PackedLinear,
        nn.QuantizedLinear: layers.PackedLinear,
        nn.Embedding: layers.PackedEmbedding,
        nn.QuantizedEmbedding: layers.PackedEmbedding,
        SwitchLinear: layers.PackedSwitchLinear,
        QuantizedSwitchLinear: layers.PackedSwitchLinear,
        MultiLinear: layers.PackedMultiLinear,
        QuantizedMultiLinear: layers.PackedMultiLinear,
    }
    return kinds[type(module)](weights, form.activations, module.get("bias"))


def _pack(module: nn.Module, form: CpuForm) -> list[PackedWeight]:
    from kvstrata.packed.weight import pack

    return [pack(matrix) for matrix in _matrices(module, form)]


def _have_shapes_of(module: nn.Module, weights: Sequence[PackedWeight]) -> bool:
    """Whether packed weights have the shapes of a layer's matrices. No array is read."""
    if type(module) in PLAIN:
        *heads, rows, columns = module["weight"].shape
    else:
        quantized = _quantized_matrix(module)
        heads, (rows, columns) = quantized.scales.shape[:-2], quantized.shape
    return len(weights) == math.prod(heads) and all(weight.shape == (rows, columns) for weight in weights)


def _is_packed(module: nn.Module, form: CpuForm) -> bool:
    if not form.packs:
        return False
    if type(module) in PLAIN:
        # Groups divide rows; matrices of experts and heads have more axes before them.
        return form.plain_bits is not None and module["weight"].shape[-1] % GROUP == 0
    return _quantized_matrix(module).fits and module.get("global_scale") is None


def _matrices(module: nn.Module, form: CpuForm) -> Iterator[QuantizedMatrix]:
    """Yield the matrices [out, in] of a layer: one, or one for each expert or head."""
    if type(module) in PLAIN:
        assert form.plain_bits is not None
        for weight in _matrices_in(module["weight"]):
            yield QuantizedMatrix(*mx.quantize(weight, GROUP, form.plain_bits), GROUP, form.plain_bits, "affine")
        return
    whole = _quantized_matrix(module)
    biases = [None] * _num_matrices(whole.scales) if whole.biases is None else _matrices_in(whole.biases)
    for parts in zip(_matrices_in(whole.weight), _matrices_in(whole.scales), biases, strict=True):
        yield QuantizedMatrix(*parts, whole.group, whole.bits, whole.mode)


def _quantized_matrix(module: nn.Module) -> QuantizedMatrix:
    options: Any = module
    parts = (module["weight"], module["scales"], module.get("biases"))
    return QuantizedMatrix(*parts, options.group_size, options.bits, vars(module).get("mode", "affine"))


def _matrices_in(array: mx.array) -> list[mx.array]:
    return [array] if array.ndim == 2 else [array[i] for i in range(len(array))]


def _num_matrices(array: mx.array) -> int:
    return 1 if array.ndim == 2 else len(array)


def _matrix_bytes(module: nn.Module, form: CpuForm) -> int:
    if type(module) in PLAIN:
        values = module["weight"].size
        if not _is_packed(module, form):
            return values * FLOAT_BYTES
        assert form.plain_bits is not None
        # Scale and bias of a group are as wide as the weights are.
        num_bytes = values * form.plain_bits // 8 + 2 * module["weight"].itemsize * (values // GROUP)
        rows = module["weight"].shape[-2]
        return num_bytes // rows * num_panels(rows) * TILE_ROWS
    matrix = _quantized_matrix(module)
    if _is_packed(module, form):
        return matrix.packed_bytes
    return FLOAT_BYTES * num_values(module)


def _bytes_as_float32(array: mx.array) -> int:
    return array.size * FLOAT_BYTES if mx.issubdtype(array.dtype, mx.floating) else array.nbytes


def _dequantize(module: nn.Module) -> mx.array:
    scales, biases = module["scales"], module.get("biases")
    if biases is not None:
        # Before the product: scale * code + bias would be rounded to 16 bits.
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    options: Any = module
    weight = mx.dequantize(
        module["weight"],
        scales,
        biases,
        group_size=options.group_size,
        bits=options.bits,
        mode=vars(module)["mode"],
        global_scale=module.get("global_scale"),
        dtype=mx.float32,
    )
    return weight.astype(mx.float32)
