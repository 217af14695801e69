"""What a decode step asks of a GPU in one attention layer: primitives of MLX's graph, and the bytes that they move.

As a Mac runs it: MLX's own operations, and where a case says so our kernel, which MLX records on any machine. Nothing
is timed, so any machine gives the same figures. New tokens are written before: two slice updates for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvstrata.attention.dispatch import attend
from kvstrata.attention.metal import trials as metal_trials
from kvstrata.attention.segments import RawSegment, SealedSegment, Segment, SegmentedKV, SegmentSlice
from kvstrata.bench.driver import MIB, Figure, lay_out
from kvstrata.codecs import backends
from kvstrata.codecs.base import Codec
from kvstrata.codecs.raw import RawCodec
from kvstrata.codecs.registry import parse

# They move no bytes: what they give is the same memory, seen in another way.
VIEWS = {
    "AsStrided", "Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
    "Unflatten", "View",
}  # fmt: skip
# A model of 8B: heads, heads of keys, values in each.
HEADS, KV_HEADS, DIM = 32, 8, 128
OWN_TOKENS = 100  # of the sequence itself, raw, after what it found
CUT_OF = 3  # a cut reads one part in so many of a longer span
ROWS = 8  # of a batch
KERNEL = "CustomKernel"


@dataclass(frozen=True)
class Graph:
    primitives: int
    nbytes: int  # read and written


@dataclass(frozen=True)
class GraphFigure(Figure):
    case: str
    tokens: int
    primitives: int
    nbytes: int
    part_bytes: int  # of the keys and values that are attended to, as they are stored

    @property
    def ratio(self) -> float:
        return self.nbytes / self.part_bytes

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "ratio": self.ratio}


def graph_of(function: Callable[[mx.array], mx.array], argument: mx.array) -> Graph:
    """What MLX would run for `function`, views apart."""
    count, nbytes = 0, 0
    sizes: dict[str, int] = {}  # of arrays by their name: what a broadcast shows is not read more than once

    def see(entry: Mapping[str, Any]) -> None:
        nonlocal count, nbytes
        if entry["type"] != "primitive":
            return
        # A kernel may be given an array for several of its places, and reads it once.
        inputs = {name: (name, *rest) for name, *rest in entry["inputs"]}.values()
        if entry["name"] != KERNEL:
            inputs = entry["inputs"]
        read = [sizes.get(name, _nbytes(shape, dtype)) for name, shape, dtype in inputs]
        written = [_nbytes(shape, dtype) for _, shape, dtype in entry["outputs"]]
        if entry["name"] in VIEWS:
            sizes.update({name: min(size, *read) for (name, *_), size in zip(entry["outputs"], written, strict=True)})
            return
        count += 1
        nbytes += sum(read) + sum(written)

    mx.export_function(see, function, argument)
    return Graph(count, nbytes)


def _nbytes(shape: Sequence[int], dtype: mx.Dtype) -> int:
    nbytes = dtype.size
    for size in shape:
        nbytes *= size
    return nbytes


def measure(tokens: Sequence[int] = (1024, 8192, 32768), dtype: mx.Dtype = mx.bfloat16) -> list[GraphFigure]:
    with backends.as_on_metal():
        figures = [_figure(case, count, rows, dtype) for count in tokens for case, rows in _cases(count, dtype)]
    return [*figures, *measure_kernel(tokens, dtype)]


def measure_kernel(tokens: Sequence[int], dtype: mx.Dtype = mx.bfloat16) -> list[GraphFigure]:
    """With our kernel, of one row and of a batch."""
    with backends.as_on_metal(), metal_trials.as_if_tried("metal"):
        return [_figure(case, count, rows, dtype) for count in tokens for case, rows in _kernel_cases(count, dtype)]


def table(rows: Sequence[GraphFigure]) -> str:
    return lay_out(
        rows,
        [
            ("over", "<26", lambda row: row.case),
            ("tokens", ">8", lambda row: row.tokens),
            ("operations", ">12", lambda row: row.primitives),
            ("MiB moved", ">11.1f", lambda row: row.nbytes / MIB),
            ("MiB stored", ">12.1f", lambda row: row.part_bytes / MIB),
            ("ratio", ">7.2f", lambda row: row.ratio),
        ],
        "32 heads, 8 of keys, 128 values each, bfloat16; views are not counted",
    )


Rows = tuple[tuple[Segment, ...], ...]


def _cases(num_tokens: int, dtype: mx.Dtype) -> Iterator[tuple[str, Rows]]:
    own = _own(dtype)
    for name in ("raw", "planes:8", "planes:4"):
        yield name, ((_sealed(name, num_tokens, dtype), own),)
    for name in ("raw", "planes:4"):
        longer = _sealed(name, CUT_OF * num_tokens, dtype)
        yield f"cut of {name}", ((SegmentSlice(longer, 0, num_tokens), own),)


def _kernel_cases(num_tokens: int, dtype: mx.Dtype) -> Iterator[tuple[str, Rows]]:
    yield "raw, kernel", ((_sealed("raw", num_tokens, dtype), _own(dtype)),)
    buffers = ((_zeros(num_tokens, dtype)[None], _zeros(num_tokens, dtype)[None]) for _ in range(ROWS))
    yield f"{ROWS} rows, raw, kernel", tuple((RawSegment(k, v, num_tokens),) for k, v in buffers)
    for name in ("planes:8", "planes:4"):
        one = _sealed(name, num_tokens, dtype)
        yield f"{name}, kernel", ((one, _own(dtype)),)
        yield f"{ROWS} rows, {name}, kernel", tuple((_copied(one), _own(dtype)) for _ in range(ROWS))


def _own(dtype: mx.Dtype) -> RawSegment:
    return RawSegment(_zeros(OWN_TOKENS, dtype)[None], _zeros(OWN_TOKENS, dtype)[None], OWN_TOKENS)


def _sealed(name: str, num_tokens: int, dtype: mx.Dtype) -> SealedSegment:
    codec: Codec = parse(name)
    k, v = _zeros(num_tokens, dtype), _zeros(num_tokens, dtype)
    if isinstance(codec, RawCodec):
        return SealedSegment(codec.adopt(k), codec.adopt(v))
    return SealedSegment(codec.encode(k), codec.encode(v))


def _copied(part: SealedSegment) -> SealedSegment:
    """Of another sequence."""
    return SealedSegment(part.k.cut(0, part.num_tokens), part.v.cut(0, part.num_tokens))


def _zeros(num_tokens: int, dtype: mx.Dtype) -> mx.array:
    zeros = mx.zeros((KV_HEADS, num_tokens, DIM), dtype)
    mx.eval(zeros)
    return zeros


def _figure(case: str, num_tokens: int, rows: Rows, dtype: mx.Dtype) -> GraphFigure:
    keys = SegmentedKV(rows)
    q = mx.zeros((len(rows), HEADS, 1, DIM), dtype)
    graph = graph_of(lambda queries: attend(queries, keys, keys, None, DIM**-0.5, None), q)
    part_bytes = sum(_stored_bytes(part) for parts in rows for part in parts)
    return GraphFigure(case, num_tokens, graph.primitives, graph.nbytes, part_bytes)


def _stored_bytes(part: Segment) -> int:
    if isinstance(part, RawSegment):
        return part.k.nbytes + part.v.nbytes
    if isinstance(part, SegmentSlice):
        part = SealedSegment(part.whole.k.view(part.start, part.end), part.whole.v.view(part.start, part.end))
    assert isinstance(part, SealedSegment)
    return part.nbytes
