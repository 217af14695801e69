"""A span as mlx-lm's prompt cache holds it, layer by layer, as bytes. In small steps, and never more than a layer."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.attention.parts import CutPart, Part, Parts, SealedPart, cut_parts
from kvstrata.codecs.affine import AffineCodec
from kvstrata.layers.grain import grain_of
from kvstrata.layers.kinds import LayerSpec, Layout
from kvstrata.spans.blocks import DTYPES, copy_octets, octets_of
from kvstrata.spans.convert import owned
from kvstrata.spans.marks import Mark, states_at
from kvstrata.spans.mlx_caches import common_affine, given
from kvstrata.spans.prompt_file import COMPOSITE, Stored, Tree
from kvstrata.spans.span import SpanRange

Octets = np.ndarray  # uint8, contiguous


@dataclass(frozen=True)
class LayerOut:
    """One flat layer: what it is called, its state with a place for each tensor, and where those come from."""

    spec: LayerSpec
    cache: str
    tree: Tree
    parts: tuple[Part, ...] = ()  # of full attention: as they are now, whatever becomes of the span
    codec: AffineCodec | None = None  # that all of them have
    state: Any = None  # an mlx-lm cache, of the others


def layers_out(layout: Layout, runs: Sequence[SpanRange], mark: Mark | None) -> list[LayerOut]:
    """What is to be written of `runs`, which start at 0 and follow each other. Copies nothing of full attention."""
    num_tokens = runs[-1].end
    states = states_at(layout, mark, num_tokens)
    made: list[LayerOut] = []
    for i, spec in enumerate(layout.flat()):
        if spec.kind == "full":
            parts = tuple(part for run in runs for part in run.span.parts(i, run.start, run.end))
            made.append(_full(spec, parts, num_tokens))
        else:
            cache = given(spec, i, states[i], num_tokens)
            tree = _stored(cache.state)
            made.append(LayerOut(spec, type(cache).__name__, tree, state=cache))
    return made


def trees_of(layout: Layout, layers: Sequence[LayerOut]) -> tuple[list[str], list[Tree]]:
    """Names and states by layer of the model, as mlx-lm's list of caches has them."""
    flat = iter(layers)
    names, trees = list[str](), list[Tree]()
    for spec in layout.layers:
        if spec.children:
            children = [next(flat) for _ in spec.children]
            names.append(COMPOSITE)
            trees.append([(child.tree, child.cache) for child in children])
        else:
            layer = next(flat)
            names.append(layer.cache)
            trees.append(layer.tree)
    return names, trees


def tensors_of(layer: LayerOut) -> Generator[None, None, list[Octets]]:
    """Its tensors, in the order of its tree."""
    if layer.state is not None:
        arrays = [array for array in _leaves(layer.state.state) if isinstance(array, mx.array)]
        states = [np.empty(array.nbytes, np.uint8) for array in arrays]
        copy_octets(arrays, states)
        return states
    shapes = [leaf.shape for leaf in _leaves(layer.tree) if isinstance(leaf, Stored)]
    made: list[np.ndarray] = []
    at = 0
    for part in _pieces(layer):
        arrays = _piece(layer, part)
        mx.eval(arrays)
        if not made:
            made = [
                np.empty((*shape[1:-1], a.shape[-1] * a.itemsize), np.uint8)
                for shape, a in zip(shapes, arrays, strict=True)
            ]
        for out, array in zip(made, arrays, strict=True):
            out[:, at : at + part.num_tokens] = octets_of(array).reshape(*array.shape[:-1], -1)
        at += part.num_tokens
        yield
    return [out.reshape(-1) for out in made]


def _full(spec: LayerSpec, parts: tuple[Part, ...], num_tokens: int) -> LayerOut:
    codec, dtype = common_affine(parts), DTYPES[spec.dtype]
    sides = (spec.k_dim, spec.v_dim)
    before = (1, spec.kv_heads, num_tokens)
    if codec is None:
        k, v = (Stored(dtype, (*before, dim)) for dim in sides)
        return LayerOut(spec, "KVCache", (k, v, num_tokens), parts)
    packed = [
        (
            Stored("U32", (*before, dim * codec.bits // 32)),
            Stored(dtype, (*before, dim // codec.group)),
            Stored(dtype, (*before, dim // codec.group)),
        )
        for dim in sides
    ]
    return LayerOut(spec, "QuantizedKVCache", (*packed, num_tokens, codec.group, codec.bits), parts, codec)


def _pieces(layer: LayerOut) -> list[Part]:
    """Short enough to be decoded in some milliseconds."""
    size = grain_of(layer.spec).piece_tokens
    pieces: list[Part] = []
    for part in layer.parts:
        pieces += [
            piece for at in range(0, part.num_tokens, size)
            for piece in cut_parts([part], at, min(at + size, part.num_tokens))
        ]  # fmt: skip
    return pieces


def _piece(layer: LayerOut, part: Part) -> list[mx.array]:
    """[kv_heads, tokens, width] each."""
    dtype = layer.spec.dtype
    if layer.codec is None:
        k, v = Parts(((part,),)).joined(mx.zeros((), dtype))
        return [k.squeeze(0).astype(dtype), v.squeeze(0).astype(dtype)]
    whole = owned(part) if isinstance(part, CutPart) else part
    assert isinstance(whole, SealedPart)
    arrays: list[mx.array] = []
    for planes in (whole.k, whole.v):
        packed, scales, biases = layer.codec.yield_tuple(planes)
        arrays += [packed, scales.astype(dtype), biases.astype(dtype)]
    return arrays


def _stored(tree: Tree) -> Tree:
    """A cache's state, with what its arrays look like in their place."""
    if isinstance(tree, list | tuple):
        return [_stored(child) for child in tree]
    if isinstance(tree, mx.array):
        return Stored(DTYPES[tree.dtype], tuple(tree.shape))
    return tree


def _leaves(tree: Tree) -> list[Any]:
    if isinstance(tree, list | tuple):
        return [leaf for child in tree for leaf in _leaves(child)]
    return [tree]
