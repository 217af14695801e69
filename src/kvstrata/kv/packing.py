"""Packing: converts spans and checkpoints to contents of blocks, and back."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.attention.segments import CutPart, Part, RawPart, SealedPart
from kvstrata.codecs import backends
from kvstrata.codecs.base import Planes
from kvstrata.codecs.cuda import host_copy as cuda_host_copy
from kvstrata.codecs.registry import from_spec, planes_from
from kvstrata.errors import ConfigError
from kvstrata.kv.checkpoints import Mark, MarkState, RecurrentState
from kvstrata.kv.convert import lowered, owned
from kvstrata.kv.layout import Layout
from kvstrata.kv.precision_plan import Plan
from kvstrata.kv.sequence_cache import Pair
from kvstrata.kv.span import Span, SpanRange
from kvstrata.kv.work_sizes import grain_of, join
from kvstrata.tiers.block import BLOCK_TOKENS

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
    """A block whose bytes do not make a span of this model."""


@dataclass(frozen=True)
class PackedArray:
    dtype: str
    shape: tuple[int, ...]
    octets: np.ndarray  # uint8, contiguous


@dataclass(frozen=True)
class Packed:
    arrays: dict[str, PackedArray]
    description: dict[str, Any]  # JSON


def boundaries(span: Span, start: int, end: int) -> list[int]:
    """Return where blocks of tokens [start, end) end: multiples of 256, resume points, changes of precision."""
    places = {end}
    places.update(range(start - start % BLOCK_TOKENS + BLOCK_TOKENS, end, BLOCK_TOKENS))
    places.update(at for at in (*span.marks, *span.ends) if start < at < end)
    for layer in span.layers:
        # After a cut the first and the last segment may be longer than the span.
        ends = (part.k.position + part.num_tokens for part in span.sealed(layer))
        places.update(at for at in ends if start < at < end)
    return sorted(places)


def packing(span: Span, start: int, end: int) -> Generator[None, None, Packed]:
    """Pack tokens [start, end) of a sealed span, which are in one segment of each layer, in small steps. The result has
    what the span held at the first step."""
    missing = set(_full_layers(span.layout)).difference(span.layers)
    if missing:
        raise ValueError(f"tokens {start} to {end} cannot be packed: their span does not have layers {missing}")
    found = [(layer, span.parts(layer, start, end)) for layer in span.layers]
    made: dict[int, SealedPart] = {}
    for number, (layer, parts) in enumerate(found, 1):
        (made[layer],) = [owned(part) for part in parts]
        if number % LAYERS_AT_ONCE == 0:
            yield
    return (yield from packing_parts(made))


def packing_parts(made: Mapping[int, SealedPart]) -> Generator[None, None, Packed]:
    """Pack segments of the same tokens, one for each layer."""
    groups: dict[tuple[Any, ...], list[tuple[int, SealedPart]]] = {}
    for layer, part in made.items():
        groups.setdefault(_likeness(part), []).append((layer, part))
    arrays: dict[str, PackedArray] = {}
    described = []
    for g, members in enumerate(groups.values()):
        _, first = members[0]
        for side in ("k", "v"):
            for name in getattr(first, side).arrays:
                stacked = [getattr(part, side).arrays[name] for _, part in members]
                arrays[f"{g}.{side}.{name}"] = yield from _stacking(stacked)
        described.append(
            {"layers": [layer for layer, _ in members], "k": _described(first.k), "v": _described(first.v)}
        )
    return Packed(arrays, {"groups": described})


def unpack(layout: Layout, packed: Packed, start: int, end: int) -> dict[int, SealedPart]:
    """Return tokens [start, end) by layer. Raises UnreadableBlock, or ConfigError where the codec is unknown."""
    parts: dict[int, SealedPart] = {}
    try:
        stacks_of: dict[str, dict[str, mx.array]] = defaultdict(dict)  # by group
        for name, array in packed.arrays.items():
            stacks_of[name.partition(".")[0]][name] = array_of(array)
        for g, group in enumerate(packed.description["groups"]):
            stacks = stacks_of[str(g)]
            _require_rows(stacks, len(group["layers"]))
            for i, layer in enumerate(group["layers"]):
                parts[layer] = SealedPart(*(_planes(stacks, g, side, i, group[side]) for side in ("k", "v")))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UnreadableBlock(f"A block's description does not fit its arrays: {error!r}") from error
    _check(layout, parts, start, end)
    return parts


def pack_mark(mark: Mark) -> Packed:
    """Pack a checkpoint: window and recurrent layers at one position."""
    arrays: dict[str, PackedArray] = {}
    states: list[Any] = []
    for i, state in enumerate(mark.states):
        if isinstance(state, RecurrentState):
            held = [j for j, array in enumerate(state.arrays) if array is not None]
            arrays |= {f"{i}.{j}": _alone(array) for j, array in enumerate(state.arrays) if array is not None}
            states.append({"recurrent": len(state.arrays), "held": held})
        elif isinstance(state, SealedPart):
            for side in ("k", "v"):
                planes = getattr(state, side)
                arrays |= {f"{i}.{side}.{name}": _alone(array) for name, array in planes.arrays.items()}
            states.append({"k": _described(state.k), "v": _described(state.v)})
        else:
            states.append(None)
    return Packed(arrays, {"position": mark.position, "states": states})


def unpack_mark(packed: Packed) -> Mark:
    try:
        stacks = {name: array_of(array) for name, array in packed.arrays.items()}
        _require_rows(stacks, 1)
        states = [_state(stacks, i, described) for i, described in enumerate(packed.description["states"])]
        return Mark(int(packed.description["position"]), tuple(states))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UnreadableBlock(f"A mark's description does not fit its arrays: {error!r}") from error


def span_of(layout: Layout, blocks: Sequence[Mapping[int, SealedPart]], start: int, end: int) -> Span:
    """Join consecutive blocks into one span."""
    joining = span_joining(layout, blocks, start, end)
    while True:
        try:
            next(joining)
        except StopIteration as whole:
            return whole.value


def span_joining(
    layout: Layout, blocks: Sequence[Mapping[int, SealedPart]], start: int, end: int
) -> Generator[None, None, Span]:
    """Join consecutive blocks into one span, a layer at a time."""
    span = Span(layout, start, end - start, {})
    specs = layout.flat()
    for layer in _full_layers(layout):
        span.replace(layer, grain_of(specs[layer]).join([block[layer] for block in blocks]))
        yield
    return span


def block_bytes(layout: Layout) -> int:
    """Return the most bytes that the arrays of one block, or of one checkpoint, take."""
    widest = sum(spec.kv_heads * (spec.k_dim + spec.v_dim) for spec in layout.flat() if spec.kind == "full")
    # A codec of one value for each token could take more than the values themselves.
    return max(BLOCK_TOKENS * (layout.token_bytes + 8 * widest), 2 * layout.fixed_bytes)


def _require_rows(stacks: Mapping[str, mx.array], num_rows: int) -> None:
    """Raise UnreadableBlock where an array does not have `num_rows` rows: MLX reads past its end without an error."""
    if any(not stack.ndim or stack.shape[0] != num_rows for stack in stacks.values()):
        raise UnreadableBlock(f"A block has arrays that are not of {num_rows} layers.")


def _likeness(part: SealedPart) -> tuple[Any, ...]:
    return tuple(
        (planes.codec, planes.segments, tuple((name, a.shape, a.dtype) for name, a in planes.arrays.items()))
        for planes in (part.k, part.v)
    )


def _described(planes: Planes) -> dict[str, Any]:
    return {"spec": planes.spec, "where": planes.where()}


def _planes(stacks: Mapping[str, mx.array], g: int, side: str, i: int, described: Mapping[str, Any]) -> Planes:
    prefix = f"{g}.{side}."
    arrays = {name.removeprefix(prefix): stack[i] for name, stack in stacks.items() if name.startswith(prefix)}
    mx.eval(list(arrays.values()))
    return planes_from(described["spec"], described["where"], arrays)


def _state(stacks: Mapping[str, mx.array], i: int, described: Mapping[str, Any] | None) -> MarkState:
    if described is None:
        return None
    if "recurrent" in described:
        held = set(described["held"])
        return RecurrentState(
            tuple(stacks[f"{i}.{j}"][0] if j in held else None for j in range(described["recurrent"]))
        )
    return SealedPart(*(_planes(stacks, i, side, 0, described[side]) for side in ("k", "v")))


def _check(layout: Layout, parts: Mapping[int, SealedPart], start: int, end: int) -> None:
    """Raise UnreadableBlock where segments do not fit the layout. A block of the same model identity always fits; the
    check costs nothing."""
    specs = layout.flat()
    for layer in _full_layers(layout):
        spec, part = specs[layer], parts.get(layer)
        if part is None or part.num_heads != spec.kv_heads or (part.k.dim, part.v.dim) != (spec.k_dim, spec.v_dim):
            raise UnreadableBlock(f"A block does not fit layer {layer} of this model.")
        if any((planes.position, planes.end) != (start, end) for planes in (part.k, part.v)):
            raise UnreadableBlock(f"A block of tokens {start} to {end} has others in layer {layer}.")


def _full_layers(layout: Layout) -> list[int]:
    return [layer for layer, spec in enumerate(layout.flat()) if spec.kind == "full"]


def _alone(array: mx.array) -> PackedArray:
    """Pack one array as [1, ...], copied."""
    return PackedArray(DTYPES[array.dtype], (1, *array.shape), own_octets(array))


def _stacking(arrays: Sequence[mx.array]) -> Generator[None, None, PackedArray]:
    """Pack arrays as [len(arrays), ...], copied once, a few at a time."""
    first = arrays[0]
    out = np.empty((len(arrays), first.nbytes), np.uint8)
    for at in range(0, len(arrays), LAYERS_AT_ONCE):
        copy_octets(arrays[at : at + LAYERS_AT_ONCE], list(out[at : at + LAYERS_AT_ONCE]))
        if at + LAYERS_AT_ONCE < len(arrays):
            yield
    return PackedArray(DTYPES[first.dtype], (len(arrays), *first.shape), out.reshape(-1))


def copy_octets(arrays: Sequence[mx.array], into: Sequence[np.ndarray]) -> None:  # of each: uint8 [bytes]
    """Copy the bytes of each array, without gaps, into given memory: new memory for each would cost more."""
    if backends.active() == "cuda":
        cuda_host_copy.copy_octets(arrays, into)
        return
    mx.eval(arrays)
    for array, octets in zip(arrays, into, strict=True):
        octets[:] = _looked_at(array)


def octets_of(array: mx.array) -> np.ndarray:
    """Return the bytes of an array, without gaps. The result may be a view of an array that has none."""
    if backends.active() == "cuda":
        return own_octets(array)
    mx.eval(array)
    return _looked_at(array)


def own_octets(array: mx.array) -> np.ndarray:
    """Return the bytes of an array, in memory of their own."""
    octets = np.empty(array.nbytes, np.uint8)
    copy_octets([array], [octets])
    return octets


def _looked_at(array: mx.array) -> np.ndarray:
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.ascontiguousarray(np.asarray(bits)).reshape(-1).view(np.uint8)


def array_of(packed: PackedArray) -> mx.array:
    dtype = BY_NAME[packed.dtype]
    if dtype == mx.bfloat16:
        return mx.array(packed.octets.view(np.uint16).reshape(packed.shape)).view(mx.bfloat16)
    kind = np.dtype(str(dtype).removeprefix("mlx.core.").removesuffix("_"))
    return mx.array(packed.octets.view(kind).reshape(packed.shape))


class FewerBits(Exception):
    """The spans hold fewer bits than a block should have."""


def packing_shared(runs: Sequence[SpanRange], plan: Plan) -> Generator[None, None, Packed]:
    """Pack tokens of consecutive sealed spans with the plan's codecs, a layer in each step. The result has what the
    spans held at the first step. Raises FewerBits."""
    layout = runs[0].span.layout
    found = {
        layer: [part for run in runs for part in run.span.parts(layer, run.start, run.end)]
        for layer in runs[0].span.layers
    }
    made: dict[int, SealedPart] = {}
    for layer, parts in found.items():
        made[layer] = _under(parts, plan.pairs[layer], layout.flat()[layer].dtype)
        mx.eval(made[layer].arrays())
        yield
    return (yield from packing_parts(made))


def pack_shared_mark(mark: Mark, plan: Plan, dtypes: Sequence[mx.Dtype]) -> Packed:
    """Pack a checkpoint: rings with the plan's codecs, states as they are. Raises FewerBits."""
    states = [
        _exactly(lowered(state, pair, dtype), pair) if isinstance(state, SealedPart) else state
        for state, pair, dtype in zip(mark.states, plan.pairs, dtypes, strict=True)
    ]
    return pack_mark(replace(mark, states=tuple(states)))


def _under(parts: Sequence[Part], pair: Pair, dtype: mx.Dtype) -> SealedPart:
    """Make one segment. Raw neighbours are joined before they are encoded, so that a run of 256 tokens has one mean."""
    if any(isinstance(part, RawPart) for part in parts):
        raise ValueError("what its owner still writes cannot be packed")
    sealed = [owned(part) if isinstance(part, CutPart) else part for part in parts]
    joined = [
        part
        for is_raw, group in groupby(sealed, key=lambda part: isinstance(part, SealedPart) and part.is_raw)
        for part in ([join(list(group))] if is_raw else list(group))  # pyright: ignore[reportArgumentType]
    ]
    made = [_exactly(lowered(part, pair, dtype), pair) for part in joined if isinstance(part, SealedPart)]
    if len({(part.k.codec, part.v.codec) for part in made}) > 1:
        raise FewerBits  # their family and precision are the same, their means differ
    return join(made)


def _exactly(part: SealedPart, pair: Pair) -> SealedPart:
    if (part.k.codec.name, part.v.codec.name) != (pair[0].name, pair[1].name):
        raise FewerBits
    return part


PRECISION, KIND = "precision ", "kind "

# Label of bytes that only another version of kvstrata can describe.
UNKNOWN = "unknown"


def tally(description: Mapping[str, Any], tensor_bytes: Mapping[str, int]) -> dict[str, int]:
    """Count bytes by label: `precision planes:8`, `kind full`. Each byte counts once by precision and once by kind."""
    found: Counter[str] = Counter()
    for name, nbytes in tensor_bytes.items():
        precision, kind = _labels(description, name)
        found[PRECISION + precision] += nbytes
        found[KIND + kind] += nbytes
    return dict(found)


def by_label(labels: Mapping[str, int], what: str) -> dict[str, int]:
    return {label.removeprefix(what): nbytes for label, nbytes in labels.items() if label.startswith(what) and nbytes}


def _labels(description: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return the precision and the kind of one array, from its name in a block."""
    try:
        place, side, *_ = name.split(".")
        if "groups" in description:
            return _precision(description["groups"][int(place)][side]), "full"
        state = description["states"][int(place)]
        return ("raw", "recurrent") if "recurrent" in state else (_precision(state[side]), "window")
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return UNKNOWN, UNKNOWN


def _precision(described: Mapping[str, Any]) -> str:
    try:
        return from_spec(described["spec"]).name
    except ConfigError:
        return UNKNOWN
