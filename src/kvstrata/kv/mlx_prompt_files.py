"""Prompt cache files of mlx-lm: read and write their tensors."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache

from kvstrata.attention.dispatch import segments_to_arrays
from kvstrata.attention.segments import SealedSegment, Segment, SegmentSlice, cut_segments
from kvstrata.codecs.affine import AffineCodec
from kvstrata.codecs.base import EncodedArray, MismatchedArrays
from kvstrata.codecs.dispatch import copy_to_host, host_bytes
from kvstrata.codecs.raw import RawCodec
from kvstrata.errors import UnusableFile
from kvstrata.kv.checkpoints import Checkpoint, LayerState, states_at
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.mlx_caches import CACHE_CLASSES, adopt_layer, common_affine, to_mlx_cache
from kvstrata.kv.packing import DTYPES, array_of
from kvstrata.kv.span import SpanRange, compact_segment
from kvstrata.kv.work_sizes import slices, work_sizes_of
from kvstrata.tiers.block import ITEM_BYTES, BlockTensor
from kvstrata.tiers.bundle import CHANGED

LENGTH_BYTES = 8

MAX_HEADER_BYTES = 64 << 20

# Most commas, lists and objects of a header: parsing them holds up other threads.
MAX_HEADER_VALUES = 1 << 20

MAX_TENSORS = 1 << 16

MAX_AXES = 8

METADATA = "__metadata__"


@dataclass(frozen=True)
class FileTensor:
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the beginning of the file that it is read from
    nbytes: int


@dataclass(frozen=True)
class TensorTable:
    file: BinaryIO
    places: Mapping[str, FileTensor]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(place.nbytes for place in self.places.values())

    def read(self, name: str) -> bytes:
        place = self.places[name]
        self.file.seek(place.offset)
        content = self.file.read(place.nbytes)
        if len(content) != place.nbytes:
            raise _unusable("it ends early")
        return content


def looks_like_tensors(beginning: bytes) -> bool:
    return len(beginning) > LENGTH_BYTES and beginning[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{"


def read_table(file: BinaryIO, offset: int, nbytes: int) -> TensorTable:
    """Read the header of the tensor file that begins at `offset`. Raises UnusableFile."""
    file.seek(offset)
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > min(MAX_HEADER_BYTES, nbytes - LENGTH_BYTES):
        raise _unusable(f"its header would have {length} bytes")
    header = file.read(length)
    if sum(map(header.count, (b",", b"[", b"{"))) > MAX_HEADER_VALUES:
        raise _unusable(f"its header has more than {MAX_HEADER_VALUES} values")
    try:
        fields = json.loads(header)
        metadata = fields.pop(METADATA, {})
        if len(fields) > MAX_TENSORS or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("too many tensors, or metadata that is no text")
        begins = offset + LENGTH_BYTES + length
        places = {name: _place(entry, begins, offset + nbytes) for name, entry in fields.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError) as error:
        raise _unusable(f"its header makes no sense ({type(error).__name__})") from error
    if sum(place.nbytes for place in places.values()) > nbytes:
        raise _unusable("its tensors lie on each other")
    return TensorTable(file, places, metadata)


def _place(entry: Mapping[str, Any], begins: int, ends: int) -> FileTensor:
    first, last = entry["data_offsets"]
    shape, dtype = entry["shape"], entry["dtype"]
    whole_numbers = [first, last, *shape]
    if len(shape) > MAX_AXES or any(type(number) is not int or number < 0 for number in whole_numbers):
        raise ValueError("a size that is no whole number")
    if last - first != prod(shape) * ITEM_BYTES[dtype] or begins + last > ends:
        raise ValueError("a tensor that is not where it should be")
    return FileTensor(dtype, tuple(shape), begins + first, last - first)


@dataclass(frozen=True)
class TensorNamed:
    """A tensor that is about to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def encode_table(tensors: Iterable[TensorNamed], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file whose tensors follow in this order, without gaps."""
    fields: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for tensor in tensors:
        begin, end = end, end + prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        fields[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _unusable(why: str) -> UnusableFile:
    return UnusableFile(f"This is no file of tensors that can be read: {why}. Make it or copy it again. {CHANGED}")


# Name of the tokens beside mlx-lm's own metadata: base64 of int32, little-endian.
TOKENS = "kvstrata_tokens"

COMPOSITE = "CacheList"

OTHER_VERSION = "It was written by another version of mlx-lm, or by another program"

MAX_SCALARS = 1 << 16

MAX_TEXT = 256  # characters of a name

INTEGERS: Mapping[str, str] = {"I32": "<i4", "I64": "<i8", "U32": "<u4", "U64": "<u8", "I16": "<i2", "U16": "<u2"}


@dataclass(frozen=True)
class FileArray:
    """The place of a tensor in the state of a cache that is about to be written."""

    dtype: str
    shape: tuple[int, ...]


Leaf = FileArray | int | str | None

Tree = Any  # lists and tuples of leaves, as mlx-lm's caches give their state


@dataclass(frozen=True)
class LayerFile:
    """A flat layer in a file: the class of its cache, and the path of its state."""

    cache: str
    path: str


def metadata_of(names: Sequence[str], trees: Sequence[Tree], own: Mapping[str, str]) -> dict[str, str]:
    """Return all metadata of a file."""
    scalars = [(path, _kind(leaf)) for path, leaf in flattened(list(trees)) if not isinstance(leaf, FileArray)]
    metadata = {f"0.{name}": text for name, text in own.items()}
    metadata |= {f"1.{i}": name for i, name in enumerate(names)}
    metadata["2.0"] = ""
    for number, (path, kind) in enumerate(scalars, 1):
        metadata |= {f"2.{number}.0": path, f"2.{number}.1": kind}
    return metadata


def flattened(tree: Tree, path: str = "") -> Iterator[tuple[str, Leaf]]:
    if isinstance(tree, list | tuple):
        for i, child in enumerate(tree):
            yield from flattened(child, f"{path}.{i}" if path else str(i))
    else:
        yield path, tree


def _kind(leaf: Leaf) -> str:
    if leaf is None:
        return "none"
    return "string" if isinstance(leaf, str) else "scalar"


class PromptCacheFile:
    """Tensors of a prompt cache file; some of them stand for None, a text or a number."""

    def __init__(self, table: TensorTable) -> None:
        self.table = table
        self._kinds = _scalar_kinds(table.metadata)

    def tensor(self, path: str) -> FileTensor:
        """Return dtype, shape and place of a tensor. Raises MismatchedArrays."""
        found = self.table.places.get(path)
        if found is None:
            raise MismatchedArrays(f"The file has no tensor {path[:40]}.")
        return found

    def read(self, path: str) -> np.ndarray:
        """Return the bytes of a tensor: uint8."""
        return np.frombuffer(self.table.read(path), np.uint8)

    def is_none(self, path: str) -> bool:
        return self._kinds.get(path) == "none"

    def number(self, path: str) -> int:
        """Return a number. Raises MismatchedArrays or UnusableFile."""
        if self._kinds.get(path) != "scalar":
            raise MismatchedArrays(f"{OTHER_VERSION}: there is no number at {path[:40]}.")
        tensor = self.table.places.get(path)
        if tensor is None or tensor.dtype not in INTEGERS or tensor.shape not in ((), (1,)):
            raise UnusableFile(f"The prompt cache has no number at {path[:40]}. {CHANGED}")
        return int(self.read(path).view(INTEGERS[tensor.dtype])[0])

    def text(self, path: str) -> str:
        """Return a name. Raises UnusableFile."""
        tensor = self.table.places.get(path)
        if tensor is None or tensor.dtype not in INTEGERS or len(tensor.shape) != 1 or tensor.shape[0] > MAX_TEXT:
            raise UnusableFile(f"The prompt cache has no name at {path[:40]}. {CHANGED}")
        numbers = self.read(path).view(INTEGERS[tensor.dtype]).tolist()
        return "".join(chr(number) for number in numbers if 0 < number < 128)


def _scalar_kinds(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the kind of each tensor that is no array, by path."""
    kinds: dict[str, str] = {}
    for number in range(1, MAX_SCALARS):
        path, kind = metadata.get(f"2.{number}.0"), metadata.get(f"2.{number}.1")
        if path is None or kind is None:
            break
        kinds[path] = kind
    return kinds


def layers_in(layout: Layout, file: PromptCacheFile) -> list[LayerFile]:
    """Return the layers of a file by flat layer. Raises MismatchedArrays where the file is not of this model."""
    metadata = file.table.metadata
    num_layers = sum(1 for i in range(len(layout.layers) + 1) if f"1.{i}" in metadata)
    if num_layers != len(layout.layers):
        words = "no layers that can be read" if not num_layers else f"{num_layers} layers or more"
        raise MismatchedArrays(f"The file has {words}, this model {len(layout.layers)}.")
    found: list[LayerFile] = []
    for i, spec in enumerate(layout.layers):
        name = metadata[f"1.{i}"]
        if not spec.children:
            found.append(_layer(spec, name, str(i)))
        elif name != COMPOSITE:
            raise MismatchedArrays(f"Layer {i} consists of several caches here, and of one in the file.")
        else:
            for j, child in enumerate(spec.children):
                found.append(_layer(child, file.text(f"{i}.{j}.1"), f"{i}.{j}.0"))
    return found


def _layer(spec: LayerSpec, name: str, path: str) -> LayerFile:
    allowed = [each.__name__ for each in CACHE_CLASSES.get(spec.kind, ())]
    if name not in allowed:
        raise MismatchedArrays(f"Layer {path} is of kind {spec.kind}: no {name[:40]!r} can be taken there.")
    return LayerFile(name, path)


FLOAT_NAMES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class FullLayerIn:
    """A full-attention layer to be read. `sides`: the paths of the tensors of K and of V."""

    spec: LayerSpec
    sides: tuple[tuple[str, ...], tuple[str, ...]]
    codec: AffineCodec | None  # None: raw

    def segment_ranges(self, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield the tokens [start, end) of each segment that the layer is cut into."""
        return slices(0, num_tokens, work_sizes_of(self.spec).segment_tokens)


def num_tokens_in(layers: Sequence[LayerFile], file: PromptCacheFile) -> int | None:
    """Return the number of tokens that layers state; None: no layer does. Raises MismatchedArrays if layers differ."""
    # The state of a cache is keys, values and the number of tokens; an ArraysCache does not have the number.
    stated = {file.number(f"{layer.path}.2") for layer in layers if layer.cache != "ArraysCache"}
    if len(stated) > 1 or any(number < 1 for number in stated):
        raise MismatchedArrays(f"The layers of the file hold different numbers of tokens: {sorted(stated)[:4]}.")
    return next(iter(stated), None)


def full_layer(spec: LayerSpec, layer: LayerFile, file: PromptCacheFile, num_tokens: int) -> FullLayerIn:
    """Return a full-attention layer, whose tensors were checked. Raises MismatchedArrays."""
    if layer.cache == "KVCache":
        for side, dim in ((0, spec.k_dim), (1, spec.v_dim)):
            _require(spec, file, f"{layer.path}.{side}", dim, (DTYPES[spec.dtype],), num_tokens)
        return FullLayerIn(spec, ((f"{layer.path}.0",), (f"{layer.path}.1",)), None)
    codec = AffineCodec(file.number(f"{layer.path}.4"), file.number(f"{layer.path}.3"))
    for side, dim in ((0, spec.k_dim), (1, spec.v_dim)):
        codec.check(dim)
        _require(spec, file, f"{layer.path}.{side}.0", dim * codec.bits // 32, ("U32",), num_tokens)
        for plane in (1, 2):
            _require(spec, file, f"{layer.path}.{side}.{plane}", dim // codec.group, FLOAT_NAMES, num_tokens)
    k, v = (tuple(f"{layer.path}.{side}.{plane}" for plane in range(3)) for side in (0, 1))
    return FullLayerIn(spec, (k, v), codec)


def _require(
    spec: LayerSpec, file: PromptCacheFile, path: str, width: int, dtypes: tuple[str, ...], num_tokens: int
) -> None:
    found = file.table.places.get(path)
    if found is None or found.dtype not in dtypes:
        held = "nothing" if found is None else found.dtype
        raise MismatchedArrays(
            f"Tensor {path} of the file is {held}, and {' or '.join(dtypes)} is needed: make the prompt cache with the "
            "model as it is served here."
        )
    shape = found.shape
    if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (1, spec.kv_heads, width) or shape[2] < num_tokens:
        wanted = (1, spec.kv_heads, num_tokens, width)
        raise MismatchedArrays(f"Tensor {path} of the file is {list(shape)}, not {list(wanted)}: another model's.")


def cut_tensor(octets: np.ndarray, tensor: FileTensor, start: int, end: int) -> BlockTensor:
    """Copy tokens [start, end) of a tensor [1, kv_heads, tokens, width]."""
    rows = octets.reshape(tensor.shape[1], tensor.shape[2], -1)[:, start:end]
    return BlockTensor(
        tensor.dtype, (tensor.shape[1], end - start, tensor.shape[3]), np.ascontiguousarray(rows).reshape(-1)
    )


def make_segment(layer: FullLayerIn, k: list[BlockTensor], v: list[BlockTensor], position: int) -> SealedSegment:
    """Make a segment of the tokens from `position` on. Runs on the thread that owns MLX."""
    return SealedSegment(*(_encoded(layer, arrays, position) for arrays in (k, v)))


def _encoded(layer: FullLayerIn, arrays: list[BlockTensor], position: int) -> EncodedArray:
    made = [array_of(array) for array in arrays]
    if layer.codec is None:
        return RawCodec().adopt(made[0], position)
    return layer.codec.adopt(made[0], made[1], made[2], position)


def other_layer(spec: LayerSpec, layer: LayerFile, file: PromptCacheFile, num_tokens: int) -> LayerState:
    """Read a window, chunk or recurrent state at the end of the tokens. Runs on the thread that owns MLX."""

    def array(path: str) -> Any:
        tensor = file.tensor(path)
        return array_of(BlockTensor(tensor.dtype, tensor.shape, file.read(path)))

    at = layer.path
    cache: Any
    if spec.kind == "recurrent":
        cache = ArraysCache(spec.num_arrays)
        paths = [f"{at}.0.{i}" for i in range(spec.num_arrays)]
        cache.cache = [None if file.is_none(path) else array(path) for path in paths]
        return adopt_layer(spec, cache, num_tokens, 0)
    numbers = [file.number(f"{at}.{i}") for i in range(2, 6 if spec.kind == "window" else 5)]
    k, v = (None if file.is_none(f"{at}.{side}") else array(f"{at}.{side}") for side in (0, 1))
    if k is None or v is None or any(side.ndim != 4 or side.shape[1] != spec.kv_heads for side in (k, v)):
        raise MismatchedArrays(f"Layer {at} of the file has no tokens of this model's heads.")
    if spec.kind == "window":
        cache = RotatingKVCache(numbers[2], keep=numbers[1])
        cache.offset, cache._idx = numbers[0], numbers[3]
        if not 0 <= numbers[3] <= k.shape[2]:
            raise MismatchedArrays(f"Layer {at} of the file goes on outside its ring.")
    else:
        cache = ChunkedKVCache(numbers[1])
        cache.offset, cache.start_position = numbers[0], numbers[2]
    cache.keys, cache.values = k, v
    return adopt_layer(spec, cache, num_tokens, 0)


Octets = np.ndarray  # uint8, contiguous


@dataclass(frozen=True)
class LayerOut:
    """A flat layer to be written: its cache class, its state with a place for each tensor, and the tensors' source."""

    spec: LayerSpec
    cache: str
    tree: Tree
    segments: tuple[Segment, ...] = ()  # full attention: as they are now, even if the span changes later
    codec: AffineCodec | None = None  # of all segments; None: they are decoded
    state: Any = None  # other layers: an mlx-lm cache


def layers_out(layout: Layout, ranges: Sequence[SpanRange], checkpoint: Checkpoint | None) -> list[LayerOut]:
    """Return the layers to be written of consecutive `ranges` from 0 on. Copies nothing of full attention."""
    num_tokens = ranges[-1].end
    states = states_at(layout, checkpoint, num_tokens)
    made: list[LayerOut] = []
    for i, spec in enumerate(layout.flat()):
        if spec.kind == "full":
            segments = tuple(segment for each in ranges for segment in each.span.segments(i, each.start, each.end))
            made.append(_full(spec, segments, num_tokens))
        else:
            cache = to_mlx_cache(spec, i, states[i], num_tokens)
            tree = _without_contents(cache.state)
            made.append(LayerOut(spec, type(cache).__name__, tree, state=cache))
    return made


def trees_of(layout: Layout, layers: Sequence[LayerOut]) -> tuple[list[str], list[Tree]]:
    """Return names and states by layer of the model, as mlx-lm's list of caches has them."""
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
    """Copy the tensors of a layer, in the order of its tree."""
    if layer.state is not None:
        arrays = [array for _, array in flattened(layer.state.state) if isinstance(array, mx.array)]
        states = [np.empty(array.nbytes, np.uint8) for array in arrays]
        copy_to_host(arrays, states)
        return states
    shapes = [leaf.shape for _, leaf in flattened(layer.tree) if isinstance(leaf, FileArray)]
    made: list[np.ndarray] = []
    at = 0
    for segment in _sliced(layer):
        arrays = _slice_arrays(layer, segment)
        mx.eval(arrays)
        if not made:
            made = [
                np.empty((*shape[1:-1], a.shape[-1] * a.itemsize), np.uint8)
                for shape, a in zip(shapes, arrays, strict=True)
            ]
        for out, array in zip(made, arrays, strict=True):
            out[:, at : at + segment.num_tokens] = host_bytes(array).reshape(*array.shape[:-1], -1)
        at += segment.num_tokens
        yield
    return [out.reshape(-1) for out in made]


def _full(spec: LayerSpec, segments: tuple[Segment, ...], num_tokens: int) -> LayerOut:
    codec, dtype = common_affine(segments), DTYPES[spec.dtype]
    sides = (spec.k_dim, spec.v_dim)
    before = (1, spec.kv_heads, num_tokens)
    if codec is None:
        k, v = (FileArray(dtype, (*before, dim)) for dim in sides)
        return LayerOut(spec, "KVCache", (k, v, num_tokens), segments)
    packed = [
        (
            FileArray("U32", (*before, dim * codec.bits // 32)),
            FileArray(dtype, (*before, dim // codec.group)),
            FileArray(dtype, (*before, dim // codec.group)),
        )
        for dim in sides
    ]
    return LayerOut(spec, "QuantizedKVCache", (*packed, num_tokens, codec.group, codec.bits), segments, codec)


def _sliced(layer: LayerOut) -> list[Segment]:
    """Cut a layer's segments into slices that are decoded in some milliseconds."""
    size = work_sizes_of(layer.spec).slice_tokens
    cut: list[Segment] = []
    for segment in layer.segments:
        for at in range(0, segment.num_tokens, size):
            cut += cut_segments([segment], at, min(at + size, segment.num_tokens))
    return cut


def _slice_arrays(layer: LayerOut, segment: Segment) -> list[mx.array]:
    """Return the arrays of a slice, [kv_heads, tokens, width] each."""
    dtype = layer.spec.dtype
    if layer.codec is None:
        k, v = segments_to_arrays((segment,), dtype)
        return [k.squeeze(0).astype(dtype), v.squeeze(0).astype(dtype)]
    whole = compact_segment(segment) if isinstance(segment, SegmentSlice) else segment
    assert isinstance(whole, SealedSegment)
    arrays: list[mx.array] = []
    for side in (whole.k, whole.v):
        packed, scales, biases = layer.codec.yield_tuple(side)
        arrays += [packed, scales.astype(dtype), biases.astype(dtype)]
    return arrays


def _without_contents(tree: Tree) -> Tree:
    """Return a cache's state, with dtype and shape in place of each array."""
    if isinstance(tree, list | tuple):
        return [_without_contents(child) for child in tree]
    if isinstance(tree, mx.array):
        return FileArray(DTYPES[tree.dtype], tuple(tree.shape))
    return tree
