"""Checks that imported KV has exactly the form that this model's own forward passes produce.

They are stricter than `unpack`: anyone may have written an import, while this server wrote the blocks of its disk tier.
Kernels do not check their input, so every shape, dtype and mean run must be this model's. Nothing here reads files.

Descriptions are checked first, without arrays and on any thread (`check_description`): afterwards no loop of `unpack`
is longer than the number of layers of the model, or of tokens that a block may have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from kvstrata.attention.segments import SealedSegment
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.mean_runs import GROUP_TOKENS
from kvstrata.codecs.raw import RawCodec
from kvstrata.codecs.registry import from_spec
from kvstrata.kv.checkpoints import Checkpoint, LayerState, RecurrentState
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.packing import UnreadableBlock
from kvstrata.kv.window_layer import Ring
from kvstrata.tiers.block import BLOCK_TOKENS, CHECKPOINT, Block

MAX_PLANES = 8  # of K or V; no codec has as many


def check_description(layout: Layout, block: Block, like: Checkpoint | None) -> None:
    """Raise UnreadableBlock where the counts in a block's description are not this model's. `like`: any checkpoint of
    the model; None: it needs none."""
    try:
        if block.part != CHECKPOINT:
            max_arrays = 2 * MAX_PLANES * _check_groups(layout, block.description["groups"])
        elif like is None:
            raise UnreadableBlock("The file has a checkpoint, which this model does not need.")
        else:
            end = block.start + block.num_tokens
            max_arrays = _check_states(layout.flat(), like.states, block.description["states"], end)
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreadableBlock(f"A block's description does not say what it holds: {error!r}") from error
    if block.num_tokens > BLOCK_TOKENS or len(block.tensors) > max_arrays:
        raise UnreadableBlock(
            f"A block of {block.num_tokens} tokens has {len(block.tensors)} arrays; at most {BLOCK_TOKENS} tokens and "
            f"{max_arrays} arrays are possible."
        )


def _check_groups(layout: Layout, groups: Sequence[Mapping[str, Any]]) -> int:
    """Raise UnreadableBlock where the groups are not this model's. Return their number."""
    num_full = sum(spec.kind == "full" for spec in layout.flat())
    num_layers = 0
    for group in groups[: num_full + 1]:
        num_layers += len(group["layers"])
        for side in ("k", "v"):
            _check_side(group[side], BLOCK_TOKENS)
    if len(groups) > num_full or num_layers != num_full:
        raise UnreadableBlock(f"A block describes other layers than the {num_full} of this model.")
    return len(groups)


def _check_states(
    specs: Sequence[LayerSpec], ours: Sequence[LayerState], states: Sequence[Mapping[str, Any] | None], position: int
) -> int:
    """Raise UnreadableBlock where the states are not this model's. Return the most arrays that they may have."""
    if len(states) != len(ours):
        raise UnreadableBlock(f"A checkpoint has {len(states)} states, and this model {len(ours)} layers.")
    max_arrays = 0
    for layer, (spec, state, our) in enumerate(zip(specs, states, ours, strict=True)):
        if state is None or our is None:
            if state is not our:
                raise UnreadableBlock(f"A checkpoint has a state for layer {layer}, which has none, or lacks it.")
        elif isinstance(our, RecurrentState):
            num_arrays = len(our.arrays)
            if state["recurrent"] != num_arrays or len(state["held"]) > num_arrays:
                raise UnreadableBlock(f"A checkpoint's state of layer {layer} does not have {num_arrays} arrays.")
            max_arrays += num_arrays
        else:
            if "recurrent" in state:
                raise UnreadableBlock(f"A checkpoint has a recurrent state for layer {layer}, which is none.")
            for side in ("k", "v"):
                _check_side(state[side], held_tokens(spec, position))
            max_arrays += 2 * MAX_PLANES
    return max_arrays


def _check_side(described: Mapping[str, Any], max_tokens: int) -> None:
    """Check the codec and the number of mean runs of K or V."""
    where = described["where"]
    if len(where["segments"]) > max_tokens:
        raise UnreadableBlock(f"A block has {len(where['segments'])} means; at most {max_tokens} are possible.")
    from_spec(described["spec"]).check(where["dim"])


def check_segments(layout: Layout, segments: Mapping[int, SealedSegment]) -> None:
    """Raise UnreadableBlock where the segments of a block, from `unpack`, are not this model's."""
    specs = layout.flat()
    full = {layer for layer, spec in enumerate(specs) if spec.kind == "full"}
    if set(segments) != full:
        raise UnreadableBlock(f"A block holds the layers {sorted(segments)}, not {sorted(full)}.")
    for layer, segment in segments.items():
        _check_segment(specs[layer], segment, layer)


def check_checkpoint(layout: Layout, checkpoint: Checkpoint, position: int, like: Checkpoint) -> None:
    """Raise UnreadableBlock where a checkpoint is not this model's. `like`: a checkpoint of the model, at any position,
    which has the shapes of states."""
    specs = layout.flat()
    if checkpoint.position != position or len(checkpoint.states) != len(specs):
        raise UnreadableBlock(
            f"A checkpoint is at {checkpoint.position} with {len(checkpoint.states)} layers, not at {position}."
        )
    for layer, (spec, state, ours) in enumerate(zip(specs, checkpoint.states, like.states, strict=True)):
        _check_state(spec, state, ours, position, layer)


def _check_state(spec: LayerSpec, state: LayerState, ours: LayerState, position: int, layer: int) -> None:
    if ours is None:
        if state is not None:
            raise UnreadableBlock(f"A checkpoint has a state for layer {layer}, which has none.")
    elif isinstance(ours, RecurrentState):
        if not isinstance(state, RecurrentState) or _shapes(state) != _shapes(ours):
            raise UnreadableBlock(f"A checkpoint's state of layer {layer} has other arrays than this model's.")
    elif not isinstance(state, SealedSegment):
        raise UnreadableBlock(f"A checkpoint has no tokens for layer {layer}.")
    else:
        _check_segment(spec, state, layer)
        wanted = held_tokens(spec, position)
        for encoded in (state.k, state.v):
            if (encoded.num_tokens, encoded.end) != (wanted, position):
                raise UnreadableBlock(f"A checkpoint has {encoded.num_tokens} tokens in layer {layer}, not {wanted}.")


def held_tokens(spec: LayerSpec, position: int) -> int:
    """Return how many tokens a window or chunked layer holds after `position` tokens."""
    if spec.kind == "chunked":
        return (position - 1) % spec.max_size + 1
    ring = Ring(spec.max_size, spec.keep)
    return min(ring.keep, position) + position - ring.oldest(position)


def _check_segment(spec: LayerSpec, segment: SealedSegment, layer: int) -> None:
    for encoded, dim in ((segment.k, spec.k_dim), (segment.v, spec.v_dim)):
        if encoded.leading != (spec.kv_heads,) or encoded.dim != dim or encoded.num_tokens != segment.num_tokens:
            raise UnreadableBlock(f"Layer {layer} of the file does not have this model's shapes.")
        if isinstance(encoded.codec, RawCodec) and encoded.arrays["values"].dtype != spec.dtype:
            raise UnreadableBlock(f"Layer {layer} of the file is not in {spec.dtype}, which this model computes in.")
        _check_mean_runs(encoded, layer)


def _check_mean_runs(encoded: EncodedArray, layer: int) -> None:
    """Raise UnreadableBlock where a mean run has tokens of two groups."""
    start = encoded.position
    for size in encoded.mean_runs:
        if start // GROUP_TOKENS != (start + size - 1) // GROUP_TOKENS:
            raise UnreadableBlock(f"Layer {layer} of the file has a mean of tokens that share none.")
        start += size


def _shapes(state: RecurrentState) -> list[tuple[tuple[int, ...], mx.Dtype] | None]:
    return [None if array is None else (array.shape, array.dtype) for array in state.arrays]
