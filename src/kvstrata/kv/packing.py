"""Packing: converts spans and checkpoints to contents of blocks, and back."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.attention.segments import RawSegment, SealedSegment, Segment, SegmentSlice
from kvstrata.codecs import dispatch
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.registry import encoded_from, from_spec
from kvstrata.errors import ConfigError
from kvstrata.kv.checkpoints import Checkpoint, LayerState, RecurrentState
from kvstrata.kv.layout import Layout
from kvstrata.kv.precision_plan import CodecPair, PrecisionPlan
from kvstrata.kv.span import Span, SpanRange, compact_segment
from kvstrata.kv.transcode import transcode_segment
from kvstrata.kv.work_sizes import join_segments, work_sizes_of
from kvstrata.tiers.block import BLOCK_TOKENS, BlockContent, BlockTensor

# Layers that one step of packing copies: about a millisecond.
LAYERS_AT_ONCE = 4

# Names as in the safetensors format.
DTYPES: Mapping[mx.Dtype, str] = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.bool_: "BOOL",
}

BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


class UnreadableBlock(ConfigError):
    """A block whose content is not KV of this model."""


def block_ends(span: Span, start: int, end: int) -> list[int]:
    """Return where blocks of tokens [start, end) end: multiples of 256, resume points, changes of precision."""
    ends = {end}
    ends.update(range(start - start % BLOCK_TOKENS + BLOCK_TOKENS, end, BLOCK_TOKENS))
    ends.update(at for at in (*span.checkpoints, *span.prompt_ends) if start < at < end)
    for layer in span.layers:
        # After a cut the first and the last segment may be longer than the span.
        segment_ends = (segment.k.end for segment in span.sealed(layer))
        ends.update(at for at in segment_ends if start < at < end)
    return sorted(ends)


def block_bytes(layout: Layout) -> int:
    """Return the most bytes that the arrays of one block, or of one checkpoint, take."""
    widest = sum(spec.kv_heads * (spec.k_dim + spec.v_dim) for spec in layout.flat() if spec.kind == "full")
    # A codec of one value for each token could take more than the values themselves.
    return max(BLOCK_TOKENS * (layout.token_bytes + 8 * widest), 2 * layout.fixed_bytes)


# From a span to a block.


def pack(span: Span, start: int, end: int) -> Generator[None, None, BlockContent]:
    """Pack tokens [start, end) of a sealed span in small steps. The tokens are in one segment of each layer. The result
    has the contents that the span had at the first step."""
    missing = set(_full_layers(span.layout)).difference(span.layers)
    if missing:
        raise ValueError(f"tokens {start} to {end} cannot be packed: their span does not have layers {missing}")
    found = [(layer, span.segments(layer, start, end)) for layer in span.layers]
    segments: dict[int, SealedSegment] = {}
    for number, (layer, held) in enumerate(found, 1):
        (segments[layer],) = [compact_segment(segment) for segment in held]
        if number % LAYERS_AT_ONCE == 0:
            yield
    return (yield from _pack_segments(segments))


def pack_checkpoint(checkpoint: Checkpoint) -> BlockContent:
    tensors: dict[str, BlockTensor] = {}
    states: list[Any] = []
    for i, state in enumerate(checkpoint.states):
        if isinstance(state, RecurrentState):
            held = [j for j, array in enumerate(state.arrays) if array is not None]
            tensors |= {f"{i}.{j}": _pack_array(array) for j, array in enumerate(state.arrays) if array is not None}
            states.append({"recurrent": len(state.arrays), "held": held})
        elif isinstance(state, SealedSegment):
            for side in ("k", "v"):
                encoded = getattr(state, side)
                tensors |= {f"{i}.{side}.{name}": _pack_array(array) for name, array in encoded.arrays.items()}
            states.append({"k": _describe(state.k), "v": _describe(state.v)})
        else:
            states.append(None)
    return BlockContent(tensors, {"position": checkpoint.position, "states": states})


class FewerBits(Exception):
    """The spans hold fewer bits than a block should have."""


def pack_shared(ranges: Sequence[SpanRange], plan: PrecisionPlan) -> Generator[None, None, BlockContent]:
    """Pack tokens of consecutive sealed spans with the plan's codecs, a layer in each step. The result has the contents
    that the spans had at the first step. Raises FewerBits."""
    layout = ranges[0].span.layout
    found = {
        layer: [segment for each in ranges for segment in each.span.segments(layer, each.start, each.end)]
        for layer in ranges[0].span.layers
    }
    segments: dict[int, SealedSegment] = {}
    for layer, held in found.items():
        segments[layer] = _shared_segment(held, plan.pairs[layer], layout.flat()[layer].dtype)
        mx.eval(segments[layer].arrays())
        yield
    return (yield from _pack_segments(segments))


def pack_shared_checkpoint(checkpoint: Checkpoint, plan: PrecisionPlan, dtypes: Sequence[mx.Dtype]) -> BlockContent:
    """Pack a checkpoint: rings with the plan's codecs, states as they are. Raises FewerBits."""
    states = [
        _require_codecs(transcode_segment(state, pair, dtype), pair) if isinstance(state, SealedSegment) else state
        for state, pair, dtype in zip(checkpoint.states, plan.pairs, dtypes, strict=True)
    ]
    return pack_checkpoint(replace(checkpoint, states=tuple(states)))


def _shared_segment(segments: Sequence[Segment], pair: CodecPair, dtype: mx.Dtype) -> SealedSegment:
    """Transcode and join consecutive segments to one.

    Raw neighbours are joined before they are encoded, so that a group of 256 tokens has one mean.
    """
    if any(isinstance(segment, RawSegment) for segment in segments):
        raise ValueError("buffers that their owner still writes cannot be packed")
    sealed = [compact_segment(each) if isinstance(each, SegmentSlice) else each for each in segments]
    joined = [
        segment
        for is_raw, group in groupby(sealed, key=lambda each: isinstance(each, SealedSegment) and each.is_raw)
        for segment in ([join_segments(list(group))] if is_raw else list(group))  # pyright: ignore[reportArgumentType]
    ]
    transcoded = [
        _require_codecs(transcode_segment(segment, pair, dtype), pair)
        for segment in joined
        if isinstance(segment, SealedSegment)
    ]
    if len({(segment.k.codec, segment.v.codec) for segment in transcoded}) > 1:
        raise FewerBits  # codecs of the same name whose means differ
    return join_segments(transcoded)


def _require_codecs(segment: SealedSegment, pair: CodecPair) -> SealedSegment:
    if (segment.k.codec.name, segment.v.codec.name) != (pair[0].name, pair[1].name):
        raise FewerBits
    return segment


def _pack_segments(segments: Mapping[int, SealedSegment]) -> Generator[None, None, BlockContent]:
    """Pack segments of the same tokens, one for each layer. Layers of the same shape and codecs share arrays."""
    groups: dict[tuple[Any, ...], list[tuple[int, SealedSegment]]] = {}
    for layer, segment in segments.items():
        groups.setdefault(_group_key(segment), []).append((layer, segment))
    tensors: dict[str, BlockTensor] = {}
    described = []
    for g, members in enumerate(groups.values()):
        _, first = members[0]
        for side in ("k", "v"):
            for name in getattr(first, side).arrays:
                arrays = [getattr(segment, side).arrays[name] for _, segment in members]
                tensors[f"{g}.{side}.{name}"] = yield from _pack_stacked(arrays)
        described.append({"layers": [layer for layer, _ in members], "k": _describe(first.k), "v": _describe(first.v)})
    return BlockContent(tensors, {"groups": described})


def _group_key(segment: SealedSegment) -> tuple[Any, ...]:
    return tuple(
        (each.codec, each.mean_runs, tuple((name, a.shape, a.dtype) for name, a in each.arrays.items()))
        for each in (segment.k, segment.v)
    )


def _describe(encoded: EncodedArray) -> dict[str, Any]:
    return {"spec": encoded.spec, "where": encoded.where()}


def _pack_array(array: mx.array) -> BlockTensor:
    """Pack one array as [1, ...], copied."""
    return BlockTensor(DTYPES[array.dtype], (1, *array.shape), own_octets(array))


def _pack_stacked(arrays: Sequence[mx.array]) -> Generator[None, None, BlockTensor]:
    """Pack arrays as [len(arrays), ...], copied once, a few at a time."""
    first = arrays[0]
    out = np.empty((len(arrays), first.nbytes), np.uint8)
    for at in range(0, len(arrays), LAYERS_AT_ONCE):
        dispatch.copy_to_host(arrays[at : at + LAYERS_AT_ONCE], list(out[at : at + LAYERS_AT_ONCE]))
        if at + LAYERS_AT_ONCE < len(arrays):
            yield
    return BlockTensor(DTYPES[first.dtype], (len(arrays), *first.shape), out.reshape(-1))


# From a block to a span.


def unpack(layout: Layout, content: BlockContent, start: int, end: int) -> dict[int, SealedSegment]:
    """Return segments of tokens [start, end) by layer. Raises UnreadableBlock, or ConfigError for an unknown codec."""
    segments: dict[int, SealedSegment] = {}
    try:
        stacks_of: dict[str, dict[str, mx.array]] = defaultdict(dict)  # by group
        for name, tensor in content.tensors.items():
            stacks_of[name.partition(".")[0]][name] = array_of(tensor)
        for g, group in enumerate(content.description["groups"]):
            stacks = stacks_of[str(g)]
            _require_rows(stacks, len(group["layers"]))
            for i, layer in enumerate(group["layers"]):
                segments[layer] = SealedSegment(
                    *(_unpack_array(stacks, g, side, i, group[side]) for side in ("k", "v"))
                )
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UnreadableBlock(f"A block's description does not fit its arrays: {error!r}") from error
    _require_layout(layout, segments, start, end)
    return segments


def unpack_checkpoint(content: BlockContent) -> Checkpoint:
    try:
        stacks = {name: array_of(tensor) for name, tensor in content.tensors.items()}
        _require_rows(stacks, 1)
        states = [_unpack_state(stacks, i, described) for i, described in enumerate(content.description["states"])]
        return Checkpoint(int(content.description["position"]), tuple(states))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UnreadableBlock(f"A checkpoint's description does not fit its arrays: {error!r}") from error


def join_blocks(
    layout: Layout, blocks: Sequence[Mapping[int, SealedSegment]], start: int, end: int
) -> Generator[None, None, Span]:
    """Join consecutive blocks into one span, a layer at a time."""
    span = Span(layout, start, end - start, {})
    specs = layout.flat()
    for layer in _full_layers(layout):
        span.replace(layer, work_sizes_of(specs[layer]).join_neighbours([block[layer] for block in blocks]))
        yield
    return span


def _require_rows(stacks: Mapping[str, mx.array], num_rows: int) -> None:
    """Raise UnreadableBlock where an array does not have `num_rows` rows: MLX reads past its end without an error."""
    if any(not stack.ndim or stack.shape[0] != num_rows for stack in stacks.values()):
        raise UnreadableBlock(f"A block has arrays that are not of {num_rows} layers.")


def _require_layout(layout: Layout, segments: Mapping[int, SealedSegment], start: int, end: int) -> None:
    """Raise UnreadableBlock where segments do not fit the layout. A block of the same model identity always fits; the
    check costs nothing."""
    specs = layout.flat()
    for layer in _full_layers(layout):
        spec, segment = specs[layer], segments.get(layer)
        if (
            segment is None
            or segment.num_heads != spec.kv_heads
            or (segment.k.dim, segment.v.dim) != (spec.k_dim, spec.v_dim)
        ):
            raise UnreadableBlock(f"A block does not fit layer {layer} of this model.")
        if any((each.position, each.end) != (start, end) for each in (segment.k, segment.v)):
            raise UnreadableBlock(f"A block of tokens {start} to {end} has others in layer {layer}.")


def _full_layers(layout: Layout) -> list[int]:
    return [layer for layer, spec in enumerate(layout.flat()) if spec.kind == "full"]


def _unpack_array(
    stacks: Mapping[str, mx.array], g: int, side: str, i: int, described: Mapping[str, Any]
) -> EncodedArray:
    prefix = f"{g}.{side}."
    arrays = {name.removeprefix(prefix): stack[i] for name, stack in stacks.items() if name.startswith(prefix)}
    mx.eval(list(arrays.values()))
    return encoded_from(described["spec"], described["where"], arrays)


def _unpack_state(stacks: Mapping[str, mx.array], i: int, described: Mapping[str, Any] | None) -> LayerState:
    if described is None:
        return None
    if "recurrent" in described:
        held = set(described["held"])
        return RecurrentState(
            tuple(stacks[f"{i}.{j}"][0] if j in held else None for j in range(described["recurrent"]))
        )
    return SealedSegment(*(_unpack_array(stacks, i, side, 0, described[side]) for side in ("k", "v")))


# Arrays and their bytes.


def own_octets(array: mx.array) -> np.ndarray:
    """Return the bytes of an array, in memory of their own."""
    octets = np.empty(array.nbytes, np.uint8)
    dispatch.copy_to_host([array], [octets])
    return octets


def array_of(tensor: BlockTensor) -> mx.array:
    """Copy the bytes of a tensor into an array."""
    dtype = BY_NAME[tensor.dtype]
    octets = np.frombuffer(tensor.view(), np.uint8)
    if dtype == mx.bfloat16:
        return mx.array(octets.view(np.uint16).reshape(tensor.shape)).view(mx.bfloat16)
    kind = np.dtype(str(dtype).removeprefix("mlx.core.").removesuffix("_"))
    return mx.array(octets.view(kind).reshape(tensor.shape))


# Labels of a block's bytes, which a tier keeps for people to read.

PRECISION, KIND = "precision ", "kind "

# Label of bytes that only another version of kvstrata can describe.
UNKNOWN = "unknown"


def count_labels(description: Mapping[str, Any], tensor_bytes: Mapping[str, int]) -> dict[str, int]:
    """Count bytes by label: `precision planes:8`, `kind full`. Each byte counts once by precision and once by kind."""
    found: Counter[str] = Counter()
    for name, nbytes in tensor_bytes.items():
        precision, kind = _labels_of(description, name)
        found[PRECISION + precision] += nbytes
        found[KIND + kind] += nbytes
    return dict(found)


def bytes_by_precision(labels: Mapping[str, int]) -> dict[str, int]:
    return _bytes_by(PRECISION, labels)


def bytes_by_kind(labels: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by kind of layer."""
    return _bytes_by(KIND, labels)


def _bytes_by(prefix: str, labels: Mapping[str, int]) -> dict[str, int]:
    found = {label: nbytes for label, nbytes in labels.items() if label.startswith(prefix) and nbytes}
    return {label.removeprefix(prefix): nbytes for label, nbytes in found.items()}


def _labels_of(description: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return the precision and the kind of one array, from its name in a block."""
    try:
        index, side, *_ = name.split(".")
        if "groups" in description:
            return _precision_of(description["groups"][int(index)][side]), "full"
        state = description["states"][int(index)]
        # Chunked layers are described as window layers are.
        return ("raw", "recurrent") if "recurrent" in state else (_precision_of(state[side]), "window")
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return UNKNOWN, UNKNOWN


def _precision_of(described: Mapping[str, Any]) -> str:
    try:
        return from_spec(described["spec"]).name
    except ConfigError:
        return UNKNOWN
