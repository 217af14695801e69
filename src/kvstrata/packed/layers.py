"""Layers of a model whose weights stay packed, in place of MLX's quantized ones.

Each layer computes at once: the kernels read memory, so a product evaluates the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from kvstrata.packed.form import Activations
from kvstrata.packed.weight import ActivationVectors, PackedWeight


class PackedModule(nn.Module):
    """Base of packed layers. The arrays of weights are parameters, so that they count as memory of the model."""

    def __init__(self, weights: Sequence[PackedWeight], activations: Activations, bias: mx.array | None = None) -> None:
        super().__init__()
        self.codes = [weight.arrays[0] for weight in weights]
        self.scales = [weight.arrays[1] for weight in weights]
        # A tuple, because modules take lists for parameters.
        self._weights = tuple(weights)
        self.activations: Activations = activations
        if bias is not None:
            self.bias = bias.astype(mx.float32)
            mx.eval(self.bias)
        self.freeze()

    @property
    def weight(self) -> PackedWeight:
        return self._weights[0]


class PackedLinear(PackedModule):
    """Linear layer."""

    def __call__(self, x: mx.array) -> mx.array:
        out = _multiply(self.weight, x, self.activations)
        return out + self.bias if "bias" in self else out


class PackedEmbedding(PackedModule):
    """Embedding table, dequantized by rows."""

    def __call__(self, ids: mx.array) -> mx.array:
        mx.eval(ids)
        rows = self.weight.rows(np.asarray(ids).reshape(-1).astype(np.int64))
        return mx.array(rows).reshape(*ids.shape, rows.shape[1])

    def as_linear(self, x: mx.array) -> mx.array:
        """Compute logits, in models whose output layer shares this matrix."""
        return _multiply(self.weight, x, self.activations)


class PackedSwitchLinear(PackedModule):
    """Linear layers of experts: one matrix for each expert."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:  # noqa: ARG002
        """Multiply x [..., 1, in], whose leading axes broadcast to those of the indices -> [*indices, 1, out]"""
        mx.eval(x, indices)
        places = np.asarray(indices)
        rows = np.broadcast_to(np.asarray(x.astype(mx.float32)), (*places.shape, *x.shape[-2:]))
        experts, vectors = places.reshape(-1), rows.reshape(len(places.reshape(-1)), -1, x.shape[-1])
        products = np.empty((*vectors.shape[:2], self.weight.shape[0]), np.float32)
        for expert in np.unique(experts):
            chosen = experts == expert
            some = np.ascontiguousarray(vectors[chosen]).reshape(-1, x.shape[-1])
            out = np.empty((len(some), products.shape[-1]), np.float32)
            self._weights[expert].multiply(ActivationVectors(some, self.activations), out)
            products[chosen] = out.reshape(-1, *products.shape[1:])
        out = mx.array(products).reshape(*places.shape, *products.shape[1:])
        return out + mx.expand_dims(self.bias[indices], -2) if "bias" in self else out


class PackedMultiLinear(PackedModule):
    """Linear layers of heads: one small matrix for each, used from both sides. Each call dequantizes all of them."""

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        weights = mx.array(np.stack([weight.dequantize() for weight in self._weights]))
        return x @ (weights.swapaxes(-1, -2) if transpose else weights)


def flat(x: mx.array) -> np.ndarray:
    """Convert [..., in] to contiguous float32 [vectors, in]."""
    values = np.asarray(x if x.dtype == mx.float32 else x.astype(mx.float32))
    return np.ascontiguousarray(values.reshape(-1, x.shape[-1]))


def _multiply(weight: PackedWeight, x: mx.array, activations: Activations) -> mx.array:
    values = flat(x)
    out = np.empty((len(values), weight.shape[0]), np.float32)
    if len(values):
        weight.multiply(ActivationVectors(values, activations), out)
    return mx.array(out).reshape(*x.shape[:-1], out.shape[1])
