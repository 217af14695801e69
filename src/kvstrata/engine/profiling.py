"""Startup profile: scratch memory, prefill speed, kernels warmed up.

Scratch is what a forward pass, or encoding cached KV, has alive at most beside the arrays that stay. It is measured on
zeros, because the memory of a pass does not depend on values, and kept in a file for the next start.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from blake3 import blake3

import kvstrata
from kvstrata.attention.cuda.trials import join_works
from kvstrata.attention.metal import trials as metal_trials
from kvstrata.attention.segments import RawSegment, SealedSegment, Segment, SegmentSource
from kvstrata.codecs import trials
from kvstrata.codecs.backends import VectorKind, runtime
from kvstrata.codecs.base import UnsupportedCodec
from kvstrata.codecs.cuda import host_copy as cuda_host_copy
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.engine.memory_plan import (
    LEEWAY,
    LOGIT_BYTES,
    LOGITS_COPIES,
    MAX_CHUNK_CPU,
    MAX_CHUNK_GPU,
    Scratch,
    ScratchLine,
)
from kvstrata.engine.request import Sampling
from kvstrata.engine.runner import ModelRunner
from kvstrata.engine.sampling import Sampler, sample
from kvstrata.engine.scheduler import PassCost
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.precision_plan import CodecPair
from kvstrata.kv.recurrent_layer import RecurrentLayer
from kvstrata.kv.sequence_cache import Prefix, SequenceCache
from kvstrata.models.load import LoadedModel
from kvstrata.platform.device import device
from kvstrata.platform.files import read_notes, write_notes
from kvstrata.platform.memory import limits_restored
from kvstrata.platform.source_digest import source_digest
from kvstrata.prefix_cache.ladder import STEP_BITS

# Any module may change the memory of a pass.
SOURCES = Path(kvstrata.__file__).parent

# A chunk is measured whole up to this product of weights and tokens, because it then takes only a moment.
MAX_QUICK_WORK = 2e9

# Larger chunks are measured in part, one in this many tokens: a whole chunk of a large model takes a minute on a CPU.
# Some recurrent layers compare all tokens of a chunk with each other, which only longer chunks show.
CHUNK_SHARE = 8
RECURRENT_CHUNK_SHARE = 4
MIN_MEASURED_TOKENS = 16

# Measured context: long enough for attention to take about as much memory as the rest of a layer.
CONTEXT_CPU = 1024
CONTEXT_GPU = 16384

# Segments of the measured context on Metal: more than a single launch decodes.
NUM_METAL_SEGMENTS = 7

# Binary digits that a measured size is rounded up to.
KEPT_BITS = 5

# Most repetitions until the smallest size was seen twice.
MAX_TRIES = 8

# Tokens of the timed passes: the first pass, and on a GPU a second one, longer or, after a long first pass, shorter.
# Where the second pass takes hardly longer than the first, a third one shows what a token costs.
TIMED_TOKENS = 64
MANY_TIMED_TOKENS, MOST_TIMED_TOKENS = 512, 2048
FEW_TIMED_TOKENS = 16
HARDLY_LONGER = 1.5
LONG_PASS_S = 0.1
TIMED_PASSES = 4

# File of remembered scratch in the cache folder, and the number of starts that it holds.
NOTES = "scratch"
MAX_NOTES = 256

# A faster measurement is repeated at each start instead of being remembered.
WORTH_KEEPING_S = 0.05

RAW: CodecPair = (RawCodec(), RawCodec())


@dataclass(frozen=True)
class PassShape:
    """The sizes that scratch depends on, beside the model."""

    rows: int  # most sequences in a batch
    vocab_size: int
    max_context_tokens: int  # the engine serves no longer context, so none is measured
    chunk_tokens: int  # largest prefill chunk
    pairs: tuple[CodecPair, ...] | None = None  # codecs of cached KV, for each layer; None: raw


def max_chunk() -> int:
    """Return the largest prefill chunk of this device."""
    return MAX_CHUNK_CPU if mx.default_device() == mx.cpu else MAX_CHUNK_GPU


def measured_context() -> int:
    """Return the longest context that is measured on this device."""
    return CONTEXT_CPU if mx.default_device() == mx.cpu else CONTEXT_GPU


def remembered_scratch(loaded: LoadedModel, runner: ModelRunner, shape: PassShape) -> Scratch:
    """Return the scratch that an earlier start measured under the same conditions, or measure it now."""
    key = _notes_key(loaded, runner, shape)
    notes = read_notes(NOTES)
    if (remembered := _parse_scratch(notes.get(key))) is not None:
        return remembered
    began_s = time.perf_counter()
    scratch = measure_scratch(runner, shape)
    if time.perf_counter() - began_s > WORTH_KEEPING_S:
        newest = list(notes.items())[1 - MAX_NOTES :]
        lines = [[line.base_bytes, line.token_bytes, line.of_all_rows] for line in scratch.lines]
        write_notes(NOTES, {**dict(newest), key: lines})
    return scratch


def _notes_key(loaded: LoadedModel, runner: ModelRunner, shape: PassShape) -> str:
    """Return a digest of every condition that scratch depends on."""
    codecs = shape.pairs and [(k.name, v.name) for k, v in shape.pairs]
    conditions = [
        [loaded.fingerprint, loaded.dtype, loaded.weight_bytes, loaded.config],
        [repr(spec) for spec in runner.layout.flat()],
        [shape.rows, shape.vocab_size, shape.chunk_tokens, codecs],
        min(shape.max_context_tokens, measured_context() + shape.chunk_tokens),
        [device().name, runtime().backend, version("mlx"), version("mlx-lm"), source_digest(SOURCES)],
        [*metal_trials.used(), *trials.used()],
    ]
    return blake3(json.dumps(conditions, sort_keys=True, default=repr).encode()).hexdigest()


def _parse_scratch(lines: Any) -> Scratch | None:
    try:
        return Scratch(tuple(ScratchLine(int(base), float(token), bool(rows)) for base, token, rows in lines))
    except (TypeError, ValueError):
        return None


def measure_scratch(runner: ModelRunner, shape: PassShape) -> Scratch:
    """Measure the scratch of drawing tokens, of forward passes and of encoding cached KV."""
    chunk = shape.chunk_tokens
    tokens = _measured_tokens(runner, chunk)
    profiler = ScratchProfiler(runner, max(1, min(measured_context(), shape.max_context_tokens - tokens)))
    logits = ScratchLine(LOGITS_COPIES * LOGIT_BYTES * shape.rows * shape.vocab_size)
    with one_operation_at_a_time():
        return Scratch((logits, *profiler.measure_lines(tokens, chunk / tokens, shape.pairs)))


def _measured_tokens(runner: ModelRunner, chunk: int) -> int:
    """Return how many tokens of a chunk are measured."""
    if runner.num_weights * chunk <= MAX_QUICK_WORK:
        return chunk
    is_recurrent = any(spec.kind == "recurrent" for spec in runner.layout.flat())
    share = RECURRENT_CHUNK_SHARE if is_recurrent else CHUNK_SHARE
    return min(chunk, max(MIN_MEASURED_TOKENS, chunk // share))


class ScratchProfiler:
    """Measures the scratch of passes behind a context of `context` tokens."""

    def __init__(self, runner: ModelRunner, context: int) -> None:
        self._runner = runner
        self._context = context
        self._layout: Layout = runner.layout
        self._states: tuple[Any, ...] = ()  # a state of each recurrent layer; their sizes do not depend on the context

    def measure_lines(self, tokens: int, factor: float, pairs: Sequence[CodecPair] | None) -> list[ScratchLine]:
        """Measure a chunk of `tokens`, and extrapolate to a chunk `factor` times as long.

        The growth with the chunk follows from a chunk of half the length. The growth with the context is at most the
        measured one, except for windows: a chunk joins them to itself, and their size is fixed.
        """
        specs, half_tokens = self._layout.flat(), max(1, tokens // 2)
        without_context = self.chunk_bytes(tokens, 0)
        if any(spec.kind == "foreign" for spec in specs):
            return [self._foreign_line(tokens, factor)]
        whole, half = self.chunk_bytes(tokens, self._context), self.chunk_bytes(half_tokens, self._context)
        extrapolated = whole + 2 * (factor - 1) * max(0, whole - half)
        squared = 0.0  # growth with the square of the chunk
        if factor > 1 and any(spec.kind == "recurrent" for spec in specs):
            half_without_context = self.chunk_bytes(half_tokens, 0)
            squared = 2 * factor * (factor - 1) * max(0, without_context - 2 * half_without_context)
        lines = [_scratch_line(factor * without_context + squared)]
        token_bytes = max(0.0, extrapolated - self._window_bytes(self._context)) / self._context
        if pairs is not None:
            sealed = self.chunk_bytes(half_tokens, self._context, pairs)
            token_bytes += max(0, sealed - half) / self._context  # decoding takes the same whatever the chunk
            lines += [
                _scratch_line(0, self._encoding_token_bytes(pairs)),
                _scratch_line(0, self._step_token_bytes(pairs), of_all_rows=True),
            ]
        return [*lines, _scratch_line(self._window_bytes() + squared, token_bytes)]

    def chunk_bytes(self, tokens: int, context: int, pairs: Sequence[CodecPair] | None = None) -> int:
        """Return the scratch of one chunk behind `context` tokens that are encoded by `pairs`."""
        return _smallest_seen_twice(lambda: self._prefill_chunk(tokens, context, pairs))

    def _prefill_chunk(self, tokens: int, context: int, pairs: Sequence[CodecPair] | None) -> int:
        prefix = self._make_prefix(context, pairs) if context else None
        cache = self._runner.new_cache(tokens, prefix)
        scratch_bytes, _ = _measure_action(partial(self._runner.prefill, cache, [0] * tokens))
        self._states = self._states or _recurrent_states(cache)
        return scratch_bytes

    def _window_bytes(self, context: int | None = None) -> int:
        """Return the bytes of all windows behind a context of this length; None: of full windows."""
        windows = [spec for spec in self._layout.flat() if spec.kind in ("window", "chunked")]
        return sum(spec.token_bytes * min(spec.max_size, context or spec.max_size) for spec in windows)

    def _foreign_line(self, tokens: int, factor: float) -> ScratchLine:
        """Measure two chunks in a row: a cache that only the model can read cannot be filled with zeros."""
        cache = self._runner.new_cache(2 * tokens)
        first, _ = _measure_action(partial(self._runner.prefill, cache, [0] * tokens))
        second, _ = _measure_action(partial(self._runner.prefill, cache, [0] * tokens))
        return _scratch_line(factor * first, factor * max(0, second - first) / tokens)

    def _step_token_bytes(self, pairs: Sequence[CodecPair]) -> float:
        """Return the scratch of a decode step, for each token that its row reads."""
        return self.chunk_bytes(1, self._context, pairs) / self._context

    def _encoding_token_bytes(self, pairs: Sequence[CodecPair]) -> float:
        """Return the scratch of encoding one layer of a cached span, for each token: the layer before and after."""
        full = {(spec, pair) for spec, pair in zip(self._layout.flat(), pairs, strict=True) if spec.kind == "full"}
        sizes = [_smallest_seen_twice(partial(self._encode_layer, spec, pair)) for spec, pair in full]
        return max(sizes, default=0) / self._context

    def _encode_layer(self, spec: LayerSpec, pair: CodecPair) -> int:
        k, v = _zeros(spec, self._context)
        mx.eval(k, v)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        _seal(k, v, pair)
        return mx.get_peak_memory() - before

    def _make_prefix(self, num_tokens: int, pairs: Sequence[CodecPair] | None) -> Prefix:
        """Return a prefix of zeros. Layers of one shape share their arrays."""
        specs = self._layout.flat()
        by_layer: dict[tuple[LayerSpec, CodecPair], tuple[SegmentSource, ...]] = {}
        sources = []
        for spec, pair in zip(specs, pairs or (RAW,) * len(specs), strict=True):
            if spec.kind == "full" and (spec, pair) not in by_layer:
                by_layer[spec, pair] = context_sources(spec, pair, num_tokens)
            sources.append(by_layer[spec, pair] if spec.kind == "full" else ())
        states = [_window_or_state(spec, num_tokens, state) for spec, state in zip(specs, self._states, strict=True)]
        return Prefix(num_tokens, tuple(sources), tuple(states))


@dataclass(frozen=True)
class OtherSequenceTokens:
    """Tokens of another running sequence, which still writes to them."""

    part: RawSegment
    version: int = 0

    @property
    def num_tokens(self) -> int:
        return self.part.num_tokens

    def segments(self) -> tuple[Segment, ...]:
        return (self.part,)


def context_sources(spec: LayerSpec, pair: CodecPair, num_tokens: int) -> tuple[SegmentSource, ...]:
    """Return a context of zeros in the segments that take most memory to join.

    On a GPU these are segments that no single launch decodes: on Metal many, on CUDA some that another sequence writes.
    """
    if runtime().backend == "metal":
        return tuple(_seal(*_zeros(spec, size), pair) for size in _split_evenly(num_tokens, NUM_METAL_SEGMENTS))
    if runtime().backend == "cuda" and num_tokens > 1:
        num_sealed, num_others = _split_evenly(num_tokens, 2)
        k, v = (array[None] for array in _zeros(spec, num_others))
        mx.eval(k, v)
        return _seal(*_zeros(spec, num_sealed), pair), OtherSequenceTokens(RawSegment(k, v, num_others))
    return (_seal(*_zeros(spec, num_tokens), pair),)


def _split_evenly(num_tokens: int, num_segments: int) -> list[int]:
    bounds = [num_tokens * i // num_segments for i in range(num_segments + 1)]
    return [b - a for a, b in pairwise(bounds) if b > a]


def _scratch_line(base_bytes: float, token_bytes: float = 0.0, *, of_all_rows: bool = False) -> ScratchLine:
    return ScratchLine(int(_add_leeway(base_bytes)), _add_leeway(token_bytes), of_all_rows)


def _add_leeway(measured: float) -> float:
    """Add the leeway and round up to a few binary digits, so that starts that differ by a few kB get one result."""
    fraction, exponent = math.frexp(LEEWAY * measured)
    return math.ldexp(math.ceil(math.ldexp(fraction, KEPT_BITS)), exponent - KEPT_BITS)


def _recurrent_states(cache: SequenceCache) -> tuple[Any, ...]:
    return tuple(layer.copy_state() if isinstance(layer, RecurrentLayer) else None for layer in cache.flat)


def _zeros(spec: LayerSpec, num_tokens: int) -> tuple[mx.array, mx.array]:
    """Return K and V of zeros, each [kv_heads, tokens, dim]."""
    k, v = (mx.zeros((spec.kv_heads, num_tokens, dim), spec.dtype) for dim in (spec.k_dim, spec.v_dim))
    return k, v


def _window_or_state(spec: LayerSpec, num_tokens: int, state: Any) -> Any:
    if spec.kind in ("window", "chunked"):
        return tuple(array[None] for array in _zeros(spec, min(num_tokens, spec.max_size)))
    return state


def _seal(k: mx.array, v: mx.array, pair: CodecPair) -> SealedSegment:
    k_planes, v_planes = (
        codec.adopt(array, 0) if isinstance(codec, RawCodec) else codec.encode(array, 0)
        for codec, array in zip(pair, (k, v), strict=True)
    )
    part = SealedSegment(k_planes, v_planes)
    mx.eval(part.arrays())
    return part


def _smallest_seen_twice(measure: Callable[[], int]) -> int:
    """Repeat a measurement until its smallest result was seen twice.

    MLX sometimes starts an operation before it has freed the inputs of the last one, more often on a busy machine.
    """
    seen = [measure(), measure()]
    while seen.count(min(seen)) < 2 and len(seen) < MAX_TRIES:
        seen.append(measure())
    return min(seen)


def _measure_action(action: Callable[[], None]) -> tuple[int, float]:
    """Run an action. Return the most memory beside the arrays that stay, and the seconds."""
    mx.synchronize()
    mx.reset_peak_memory()
    began_s = time.perf_counter()
    action()
    mx.synchronize()
    seconds = time.perf_counter() - began_s
    return max(0, mx.get_peak_memory() - mx.get_active_memory()), seconds


@contextmanager
def one_operation_at_a_time() -> Iterator[None]:
    """Make MLX keep no freed buffer, and start no operation before the last one has ended."""
    with limits_restored():
        mx.set_cache_limit(0)
        mx.set_memory_limit(0)
        yield


def measure_prefill(runner: ModelRunner, chunk_tokens: int) -> PassCost:
    """Time passes over short prompts, of at most `chunk_tokens`."""
    return fit_prefill(partial(_time_pass, runner), chunk_tokens, is_cpu=mx.default_device() == mx.cpu)


def fit_prefill(time_pass: Callable[[int], float], chunk_tokens: int, *, is_cpu: bool) -> PassCost:
    """Choose the lengths of the timed passes, and return the cost that follows from their seconds."""
    first = min(chunk_tokens, TIMED_TOKENS)
    first_s = time_pass(first)
    second = min(chunk_tokens, MANY_TIMED_TOKENS if first_s <= LONG_PASS_S else FEW_TIMED_TOKENS)
    if is_cpu or second == first:
        return PassCost(first / first_s)
    second_s = time_pass(second)
    most = min(chunk_tokens, MOST_TIMED_TOKENS)
    if first < second < most and second_s <= HARDLY_LONGER * first_s:
        second, second_s = most, time_pass(most)
    return pass_cost((first, first_s), (second, second_s))


def pass_cost(*timed: tuple[int, float]) -> PassCost:
    """Return the fixed cost of a pass and the cost of a token, from two passes: (tokens, seconds) of each."""
    (few, few_s), (many, many_s) = sorted(timed)
    token_s = max(many_s - few_s, 0.0) / (many - few)
    pass_tokens = max(0, min(many, int(few_s / max(token_s, 1e-9)) - few))
    return PassCost(many / many_s, pass_tokens, few_s + (pass_tokens - few) * token_s, token_s)


def _time_pass(runner: ModelRunner, tokens: int) -> float:
    """Return the seconds of the fastest pass but the first, which may load kernels. On a CPU one other pass runs."""
    count = 2 if mx.default_device() == mx.cpu else TIMED_PASSES
    prefill = runner.prefill
    _, *seconds = [_measure_action(partial(prefill, runner.new_cache(tokens), [0] * tokens))[1] for _ in range(count)]
    return min(seconds)


def warm_up_kernels(layout: Layout) -> int:
    """Compile or try the kernels for planes; return for how many vectors, on CUDA times the precisions.

    Each vector is a combination of dimension, dtype and rotation in the layers. Keys are also decoded to float32,
    because a change of precision is assessed in float32.
    """
    cached = [spec for spec in layout.flat() if spec.kind in ("full", "window")]
    if runtime().backend == "metal":
        return _try_kernels(cached)
    return _compile_kernels(cached) if runtime().backend == "cuda" else 0


def _try_kernels(specs: Sequence[LayerSpec]) -> int:
    """Try the kernels for Metal on a vector of each dtype and dimension."""
    codec = PlanesCodec(8)
    vectors = {VectorKind(spec.dtype, dim) for spec in specs for dim in (spec.k_dim, spec.v_dim)}
    assessed = {VectorKind(mx.float32, spec.k_dim) for spec in specs} - vectors
    tried = [trials.try_now(vector, codec) for vector in vectors]
    return sum(tried) + sum(trials.try_now(vector, codec, ("decode",)) for vector in assessed)


def _compile_kernels(specs: Sequence[LayerSpec]) -> int:
    """Encode and decode a vector of each dtype, dimension and rotation under each precision, on CUDA."""
    cuda_host_copy.works()
    # MLX also compiles a kernel for the gather of log-probabilities.
    mx.eval(sample(mx.zeros((1, 8)), [Sampler(Sampling(num_logprobs=1), (), 8)]).arrays())
    for dtype, k_dim, v_dim, rotation in {(spec.dtype, spec.k_dim, spec.v_dim, spec.k_rotation) for spec in specs}:
        join_works(dtype, k_dim, v_dim, rotation)
    keys = {(spec.k_dim, spec.k_rotation, spec.dtype) for spec in specs}
    values = {(spec.v_dim, spec.v_rotation, spec.dtype) for spec in specs}
    num_compiled = 0
    for vector in keys | values:
        dim, rotation, dtype = vector
        dtypes = (dtype, mx.float32) if vector in keys else (dtype,)
        for bits in STEP_BITS:
            codec = PlanesCodec(bits, rotation)
            with suppress(UnsupportedCodec):
                planes = codec.encode(mx.zeros((1, 1, dim), dtype))
                mx.eval([codec.decode(planes, to) for to in dtypes])
                num_compiled += 1
    return num_compiled
