"""Startup profile: scratch memory, prefill speed, kernels warmed up."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from blake3 import blake3

import kvstrata
from kvstrata.attention import cuda_reading, portable_check
from kvstrata.attention.cuda_check import join_works
from kvstrata.attention.parts import Part, RawPart, SealedPart, Source
from kvstrata.backend import device
from kvstrata.backend.allocator import limits_restored
from kvstrata.backend.notebook import read_notes, write_notes
from kvstrata.codecs import paths, planes_check
from kvstrata.codecs.base import UnsupportedCodec
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
from kvstrata.layers.kinds import LayerSpec, Layout
from kvstrata.layers.recurrent import RecurrentLayer
from kvstrata.layers.sequence import Pair, Prefix, SequenceCache
from kvstrata.models.loaded import LoadedModel
from kvstrata.prefix_cache.ladder import STEP_BITS

# A chunk of so many weights times tokens is measured whole: that takes a moment.
SOON_DONE = 2e9

# Of others, one part in so many is measured: on a CPU a whole one of a large model takes a minute. Some recurrent
# layers compare all tokens of a chunk with each other, which shows in longer ones.
CHUNK_SHARE = 8

RECURRENT_CHUNK_SHARE = 4

MIN_MEASURED_TOKENS = 16

# The context that is measured: long enough that attention takes about as much as the rest of a layer.
CONTEXT_CPU = 1024

CONTEXT_GPU = 16384

# Parts of it, on Metal: more than one launch decodes.
MANY_PARTS = 7

KEPT_BITS = 5

MAX_TRIES = 8

# Passes that are timed: one, and on a GPU a longer one, or a shorter one where the first took long. Where the longer
# one takes hardly longer, a still longer one tells what a token costs.
TIMED_TOKENS = 64

MANY_TIMED_TOKENS, MOST_TIMED_TOKENS = 512, 2048

HARDLY_LONGER = 1.5

FEW_TIMED_TOKENS = 16

LONG_PASS_S = 0.1

TIMED_PASSES = 4

RAW: Pair = (RawCodec(), RawCodec())


@dataclass(frozen=True)
class PassShape:
    """What scratch depends on beside the model."""

    rows: int  # of a batch
    vocab_size: int
    max_context_tokens: int  # longer ones are never served, so none is measured
    chunk_tokens: int  # of a prompt
    pairs: tuple[Pair, ...] | None = None  # how stored KV may be encoded, for each layer; None: raw


def max_chunk() -> int:
    return MAX_CHUNK_CPU if mx.default_device() == mx.cpu else MAX_CHUNK_GPU


def measured_context() -> int:
    return CONTEXT_CPU if mx.default_device() == mx.cpu else CONTEXT_GPU


def measure_scratch(runner: ModelRunner, shape: PassShape) -> Scratch:
    chunk = shape.chunk_tokens
    tokens = _measured_tokens(runner, chunk)
    measure = _Measure(runner, max(1, min(measured_context(), shape.max_context_tokens - tokens)))
    logits = ScratchLine(LOGITS_COPIES * LOGIT_BYTES * shape.rows * shape.vocab_size)
    with _one_by_one():
        return Scratch((logits, *measure.lines(tokens, chunk / tokens, shape.pairs)))


def _measured_tokens(runner: ModelRunner, chunk: int) -> int:
    if runner.num_weights * chunk <= SOON_DONE:
        return chunk
    is_recurrent = any(spec.kind == "recurrent" for spec in runner.layout.flat())
    share = RECURRENT_CHUNK_SHARE if is_recurrent else CHUNK_SHARE
    return min(chunk, max(MIN_MEASURED_TOKENS, chunk // share))


def measure_prefill(runner: ModelRunner, chunk_tokens: int) -> PassCost:
    first = min(chunk_tokens, TIMED_TOKENS)
    first_s = _pass_s(runner, first)
    second = min(chunk_tokens, MANY_TIMED_TOKENS if first_s <= LONG_PASS_S else FEW_TIMED_TOKENS)
    if mx.default_device() == mx.cpu or second == first:
        return PassCost(first / first_s)
    second_s = _pass_s(runner, second)
    most = min(chunk_tokens, MOST_TIMED_TOKENS)
    if first < second < most and second_s <= HARDLY_LONGER * first_s:
        second, second_s = most, _pass_s(runner, most)
    return pass_cost((first, first_s), (second, second_s))


def pass_cost(*timed: tuple[int, float]) -> PassCost:
    """Of two passes: their tokens, and the seconds that they took."""
    (few, few_s), (many, many_s) = sorted(timed)
    token_s = max(many_s - few_s, 0.0) / (many - few)
    pass_tokens = max(0, min(many, int(few_s / max(token_s, 1e-9)) - few))
    return PassCost(many / many_s, pass_tokens, few_s + (pass_tokens - few) * token_s, token_s)


def _pass_s(runner: ModelRunner, tokens: int) -> float:
    """Of those that are not the first of their size, which may load kernels, the fastest; on a CPU there is one."""
    count = 2 if mx.default_device() == mx.cpu else TIMED_PASSES
    _, *seconds = [_peak(partial(runner.prefill, runner.new_cache(tokens), [0] * tokens))[1] for _ in range(count)]
    return min(seconds)


class _Measure:
    def __init__(self, runner: ModelRunner, context: int) -> None:
        self._runner = runner
        self._context = context
        self._layout: Layout = runner.layout
        self._states: tuple[Any, ...] = ()  # of recurrent layers: whatever they are, they have one size

    def lines(self, tokens: int, chunks: float, pairs: Sequence[Pair] | None) -> list[ScratchLine]:
        """Of a chunk of `tokens` times `chunks`.

        What grows with the chunk is told from one half as long; what grows with the context is at most what was seen,
        but for the windows that a chunk joins to itself: those have one size.
        """
        specs, half_tokens = self._layout.flat(), max(1, tokens // 2)
        alone = self.chunk_bytes(tokens, 0)
        if any(spec.kind == "foreign" for spec in specs):
            return [self._foreign_line(tokens, chunks)]
        seen, half = self.chunk_bytes(tokens, self._context), self.chunk_bytes(half_tokens, self._context)
        grown = seen + 2 * (chunks - 1) * max(0, seen - half)
        squared = 0.0
        if chunks > 1 and any(spec.kind == "recurrent" for spec in specs):
            squared = 2 * chunks * (chunks - 1) * max(0, alone - 2 * self.chunk_bytes(half_tokens, 0))
        lines = [_line(chunks * alone + squared)]
        token_bytes = max(0.0, grown - self._windows_bytes(self._context)) / self._context
        if pairs is not None:
            sealed = self.chunk_bytes(half_tokens, self._context, pairs)
            token_bytes += max(0, sealed - half) / self._context  # decoding takes the same whatever the chunk
            lines += [_line(0, self._encoding_bytes(pairs)), _line(0, self._step_bytes(pairs), of_all_rows=True)]
        return [*lines, _line(self._windows_bytes() + squared, token_bytes)]

    def _windows_bytes(self, context: int | None = None) -> int:
        """Behind a context of so many tokens; None: of any length."""
        windows = [spec for spec in self._layout.flat() if spec.kind in ("window", "chunked")]
        return sum(spec.token_bytes * min(spec.max_size, context or spec.max_size) for spec in windows)

    def chunk_bytes(self, tokens: int, context: int, pairs: Sequence[Pair] | None = None) -> int:
        """What one chunk behind a context has alive at most beside what stays."""
        return _least(lambda: self._chunk(tokens, context, pairs))

    def _chunk(self, tokens: int, context: int, pairs: Sequence[Pair] | None) -> int:
        prefix = self._prefix(context, pairs) if context else None
        cache = self._runner.new_cache(tokens, prefix)
        alive, _ = _peak(partial(self._runner.prefill, cache, [0] * tokens))
        self._states = self._states or _states(cache)
        return alive

    def _foreign_line(self, tokens: int, chunks: float) -> ScratchLine:
        """Caches that only the model knows cannot be filled with zeros: two chunks after each other have to do."""
        cache = self._runner.new_cache(2 * tokens)
        first, _ = _peak(partial(self._runner.prefill, cache, [0] * tokens))
        second, _ = _peak(partial(self._runner.prefill, cache, [0] * tokens))
        return _line(chunks * first, chunks * max(0, second - first) / tokens)

    def _step_bytes(self, pairs: Sequence[Pair]) -> float:
        """Of one decode step, for each token that its row reads."""
        return self.chunk_bytes(1, self._context, pairs) / self._context

    def _encoding_bytes(self, pairs: Sequence[Pair]) -> float:
        """Of work on one layer of a stored span, for each of its tokens: the layer as it was and as it becomes."""
        full = {(spec, pair) for spec, pair in zip(self._layout.flat(), pairs, strict=True) if spec.kind == "full"}
        return max((_least(partial(self._encoded, *layer)) for layer in full), default=0) / self._context

    def _encoded(self, spec: LayerSpec, pair: Pair) -> int:
        k, v = _zeros(spec, self._context)
        mx.eval(k, v)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        _sealed(k, v, pair)
        return mx.get_peak_memory() - before

    def _prefix(self, num_tokens: int, pairs: Sequence[Pair] | None) -> Prefix:
        """Zeros: what a pass takes does not depend on what it reads. Layers of one shape read the same ones."""
        specs = self._layout.flat()
        made: dict[tuple[LayerSpec, Pair], tuple[Source, ...]] = {}
        sources = []
        for spec, pair in zip(specs, pairs or (RAW,) * len(specs), strict=True):
            if spec.kind == "full" and (spec, pair) not in made:
                made[spec, pair] = _sources(spec, pair, num_tokens)
            sources.append(made[spec, pair] if spec.kind == "full" else ())
        states = [_zeros_of_ring(spec, num_tokens, state) for spec, state in zip(specs, self._states, strict=True)]
        return Prefix(num_tokens, tuple(sources), tuple(states))


@dataclass(frozen=True)
class _OtherSequenceTokens:
    """Tokens of a sequence that runs."""

    part: RawPart
    version: int = 0

    @property
    def num_tokens(self) -> int:
        return self.part.num_tokens

    def parts(self) -> tuple[Part, ...]:
        return (self.part,)


def _sources(spec: LayerSpec, pair: Pair, num_tokens: int) -> tuple[Source, ...]:
    """A context in such parts as take most to be joined. On a GPU those are parts that no single launch decodes: on
    Metal many of them, on CUDA some that another sequence still writes."""
    if paths.active() == "metal":
        return tuple(_sealed(*_zeros(spec, size), pair) for size in _shared_out(num_tokens, MANY_PARTS))
    if paths.active() == "cuda" and num_tokens > 1:
        stored, others = _shared_out(num_tokens, 2)
        k, v = (array[None] for array in _zeros(spec, others))
        mx.eval(k, v)
        return _sealed(*_zeros(spec, stored), pair), _OtherSequenceTokens(RawPart(k, v, others))
    return (_sealed(*_zeros(spec, num_tokens), pair),)


def _shared_out(num_tokens: int, num_parts: int) -> list[int]:
    bounds = [num_tokens * i // num_parts for i in range(num_parts + 1)]
    return [b - a for a, b in pairwise(bounds) if b > a]


def _line(base_bytes: float, token_bytes: float = 0.0, *, of_all_rows: bool = False) -> ScratchLine:
    return ScratchLine(int(_rounded_up(base_bytes)), _rounded_up(token_bytes), of_all_rows)


def _rounded_up(seen: float) -> float:
    """With its leeway, to a few binary digits: the same where two starts differ by an array of some kB."""
    fraction, exponent = math.frexp(LEEWAY * seen)
    return math.ldexp(math.ceil(math.ldexp(fraction, KEPT_BITS)), exponent - KEPT_BITS)


def _states(cache: SequenceCache) -> tuple[Any, ...]:
    return tuple(layer.held() if isinstance(layer, RecurrentLayer) else None for layer in cache.flat)


def _zeros(spec: LayerSpec, num_tokens: int) -> tuple[mx.array, mx.array]:
    """K and V, [kv_heads, tokens, dim]"""
    k, v = (mx.zeros((spec.kv_heads, num_tokens, dim), spec.dtype) for dim in (spec.k_dim, spec.v_dim))
    return k, v


def _zeros_of_ring(spec: LayerSpec, num_tokens: int, state: Any) -> Any:
    if spec.kind in ("window", "chunked"):
        return tuple(array[None] for array in _zeros(spec, min(num_tokens, spec.max_size)))
    return state


def _sealed(k: mx.array, v: mx.array, pair: Pair) -> SealedPart:
    k_planes, v_planes = (
        codec.adopt(array, 0) if isinstance(codec, RawCodec) else codec.encode(array, 0)
        for codec, array in zip(pair, (k, v), strict=True)
    )
    part = SealedPart(k_planes, v_planes)
    mx.eval(part.arrays())
    return part


def _least(measure: Callable[[], int]) -> int:
    """The least that was seen twice: now and then MLX starts an operation before it has freed what the last one needed,
    the more often the busier the machine."""
    seen = [measure(), measure()]
    while seen.count(min(seen)) < 2 and len(seen) < MAX_TRIES:
        seen.append(measure())
    return min(seen)


def _peak(action: Any) -> tuple[int, float]:
    """What it had alive at most beside what stays, and its time."""
    mx.synchronize()
    mx.reset_peak_memory()
    began_s = time.perf_counter()
    action()
    mx.synchronize()
    seconds = time.perf_counter() - began_s
    return max(0, mx.get_peak_memory() - mx.get_active_memory()), seconds


@contextmanager
def _one_by_one() -> Iterator[None]:
    """MLX keeps nothing that was freed, and starts no operation before the last one has ended."""
    with limits_restored():
        mx.set_cache_limit(0)
        mx.set_memory_limit(0)
        yield


NOTES = "scratch"

MAX_NOTES = 256

WORTH_KEEPING_S = 0.05


def remembered_scratch(loaded: LoadedModel, runner: ModelRunner, shape: PassShape) -> Scratch:
    key = _key(loaded, runner, shape)
    notes = read_notes(NOTES)
    if (known := _parsed(notes.get(key))) is not None:
        return known
    began_s = time.perf_counter()
    scratch = measure_scratch(runner, shape)
    if time.perf_counter() - began_s > WORTH_KEEPING_S:
        newest = list(notes.items())[1 - MAX_NOTES :]
        lines = [[line.base_bytes, line.token_bytes, line.of_all_rows] for line in scratch.lines]
        write_notes(NOTES, {**dict(newest), key: lines})
    return scratch


def _key(loaded: LoadedModel, runner: ModelRunner, shape: PassShape) -> str:
    codecs = shape.pairs and [(k.name, v.name) for k, v in shape.pairs]
    told = [
        [loaded.fingerprint, loaded.dtype, loaded.weight_bytes, loaded.config],
        [repr(spec) for spec in runner.layout.flat()],
        [shape.rows, shape.vocab_size, shape.chunk_tokens, codecs],
        min(shape.max_context_tokens, measured_context() + shape.chunk_tokens),
        [device().name, paths.active(), version("mlx"), version("mlx-lm"), _code()],
        [*portable_check.used(), *planes_check.used()],
    ]
    return blake3(json.dumps(told, sort_keys=True, default=repr).encode()).hexdigest()


@cache
def _code() -> str:
    """Of all our modules: any of them may change what a pass takes."""
    root = Path(kvstrata.__file__).parent
    digest = blake3()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _parsed(lines: Any) -> Scratch | None:
    try:
        return Scratch(tuple(ScratchLine(int(base), float(token), bool(rows)) for base, token, rows in lines))
    except (TypeError, ValueError):
        return None


def warm_up_kernels(layout: Layout) -> int:
    """For each kind of vector that the layers have; tells how many, on CUDA times the precisions. Keys are also decoded
    to float32: a change of precision is judged in it."""
    stored = [spec for spec in layout.flat() if spec.kind in ("full", "window")]
    if paths.active() == "metal":
        return _try(stored)
    return _compile(stored) if paths.active() == "cuda" else 0


def _try(stored: Sequence[LayerSpec]) -> int:
    codec = PlanesCodec(8)
    kinds = {planes_check.Kind(spec.dtype, dim) for spec in stored for dim in (spec.k_dim, spec.v_dim)}
    judged = {planes_check.Kind(mx.float32, spec.k_dim) for spec in stored} - kinds
    tried = [planes_check.try_now(kind, codec) for kind in kinds]
    return sum(tried) + sum(planes_check.try_now(kind, codec, ("decode",)) for kind in judged)


def _compile(stored: Sequence[LayerSpec]) -> int:
    """Encode and decode a vector of each kind, under each precision."""
    cuda_reading.works()
    # Log-probabilities are gathered, which MLX compiles a kernel for.
    mx.eval(sample(mx.zeros((1, 8)), [Sampler(Sampling(num_logprobs=1), (), 8)]).arrays())
    for dtype, k_dim, v_dim, turn in {(spec.dtype, spec.k_dim, spec.v_dim, spec.k_turn) for spec in stored}:
        join_works(dtype, k_dim, v_dim, turn)
    keys = {(spec.k_dim, spec.k_turn, spec.dtype) for spec in stored}
    values = {(spec.v_dim, spec.v_turn, spec.dtype) for spec in stored}
    done = 0
    for vector in keys | values:
        dim, turn, dtype = vector
        for bits in STEP_BITS:
            codec = PlanesCodec(bits, turn)
            with suppress(UnsupportedCodec):
                planes = codec.encode(mx.zeros((1, 1, dim), dtype))
                mx.eval([codec.decode(planes, to) for to in ((dtype, mx.float32) if vector in keys else (dtype,))])
                done += 1
    return done
