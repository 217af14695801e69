"""Prompt cache files of mlx-lm: read, verified, written."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from kvstrata.attention.dispatch import segments_to_arrays
from kvstrata.attention.segments import SealedSegment
from kvstrata.codecs.affine import AffineCodec
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.runner import ModelRunner
from kvstrata.errors import InvalidRequest, UnusableFile
from kvstrata.kv.block_checks import check_checkpoint, check_segments
from kvstrata.kv.checkpoints import Checkpoint, LayerState, RecurrentState, needs_checkpoints, take_checkpoint
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.layout import Layout
from kvstrata.kv.mixed_pass import PromptCaches
from kvstrata.kv.mlx_caches import adopt_mlx_lm
from kvstrata.kv.mlx_prompt_files import (
    TOKENS,
    FileArray,
    FullLayerIn,
    PromptCacheFile,
    TensorNamed,
    TensorTable,
    cut_tensor,
    encode_table,
    flattened,
    full_layer,
    layers_in,
    layers_out,
    make_segment,
    metadata_of,
    num_tokens_in,
    other_layer,
    tensors_of,
    trees_of,
)
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.span import Span, SpanRange, prefix_of
from kvstrata.prefix_cache.jobs import Steps
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.transfer import ExportProgress
from kvstrata.tiers.bundle import CHANGED

# Tokens at both ends of a span that are recomputed in all layers.
FIRST_TOKENS, LAST_TOKENS = 32, 8

CHUNK_TOKENS = 64  # recomputed in one step

MLX_CHUNK_TOKENS = 2048  # chunk length of `mlx_lm.cache_prompt`

# Largest error of K and V: the distance from recomputed ones, as a share of the distance between tokens. K and V of
# another token are at 1.4.
EXACT, HALF = 0.02, 0.15

BY_BITS = {8: 0.2, 6: 0.3, 5: 0.35, 4: 0.6, 3: 0.8, 2: 0.9}

# K and V of the first layer depend on the token alone, so errors of other layers do not add up in them.
FIRST_LAYER = {8: 0.1, 6: 0.2, 5: 0.25, 4: 0.35, 3: 0.4, 2: 0.45}

# Lower bound of the distance between tokens, as a share of their norm: nearly equal tokens must not look far apart.
SMALLEST_SHARE = 0.05

PROMPT_NEEDED = (
    "A prompt cache of mlx-lm does not say which tokens it holds. Give the prompt that it was made of: --prompt-file "
    f"TEXT, --messages JSON or --tokens JSON. {CHANGED}"
)

RunTask = Callable[[Callable[[EngineCore], Steps[Any]]], Any]  # runs a client task, and waits for its result

# Verification, on the engine thread.


def verify_span(runner: ModelRunner, ids: TokenIds, span: Span) -> Steps[None]:
    """Recompute some of a span's tokens. Raises UnusableFile where the span is not what this model computes."""
    tokens: list[int] = ids.tolist()
    if needs_checkpoints(runner.layout):
        try:
            yield from _verify_in_chunks(runner, tokens, span)
        except UnusableFile:
            if not _keeps_first_tokens(runner.layout):
                raise
            yield from _verify_like_mlx_lm(runner, tokens, span)
        return
    yield from _verify_first_layer(runner, tokens, span)
    first = min(FIRST_TOKENS, len(tokens))
    yield from _verify_tokens(runner, tokens, span, 0, first)
    start = max(first, len(tokens) - LAST_TOKENS)
    if start < len(tokens):
        yield from _verify_tokens(runner, tokens, span, start, len(tokens))


class _FirstLayerDone(Exception):
    """Ends a forward pass once the first layer's K and V are known; raised and caught in this module."""


class _FirstLayerProbe(KVCache):
    """Stands for the first layer's cache at a position, and ends the forward pass when it has K and V."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.offset = position
        self.first_layer_kv: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.first_layer_kv = keys, values
        raise _FirstLayerDone


def _verify_first_layer(runner: ModelRunner, tokens: Sequence[int], span: Span) -> Steps[None]:
    for last in range(CHUNK_TOKENS, len(tokens) + CHUNK_TOKENS, CHUNK_TOKENS):
        end = min(last, len(tokens))
        # The last chunk is as long as the others: a few tokens do not show how far apart tokens are.
        start = max(0, end - CHUNK_TOKENS)
        probe = _FirstLayerProbe(start)
        caches = runner.new_cache(1).caches()
        with contextlib.suppress(_FirstLayerDone):
            runner.model(mx.array([tokens[start:end]]), cache=PromptCaches([probe, *caches[1:]]))
        assert probe.first_layer_kv is not None
        _compare(span, 0, start, probe.first_layer_kv, is_first=True)
        yield


def _verify_tokens(runner: ModelRunner, tokens: Sequence[int], span: Span, start: int, end: int) -> Steps[None]:
    """Verify tokens [start, end) in all layers, computed after the span's own tokens before them."""
    prefix = prefix_of(runner.layout, [SpanRange(span, 0, start)], None) if start else None
    cache = runner.new_cache(end - start, prefix)
    runner.prefill(cache, tokens[start:end])
    yield
    yield from _compare_layers(cache, span, start, end)


def _verify_in_chunks(runner: ModelRunner, tokens: Sequence[int], span: Span) -> Steps[None]:
    """Verify all tokens and the checkpoint at their end.

    Full attention reads the span, which is verified up to each chunk; the other layers resume from their own state.
    """
    layout, checkpoint = runner.layout, None
    for start in range(0, len(tokens), CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, len(tokens))
        prefix = prefix_of(layout, [SpanRange(span, 0, start)], checkpoint) if start else None
        cache = runner.new_cache(end - start, prefix)
        runner.prefill(cache, tokens[start:end])
        checkpoint = take_checkpoint(cache)
        yield
        yield from _compare_layers(cache, span, start, end)
    assert checkpoint is not None
    _compare_checkpoints(span.checkpoints[len(tokens)], checkpoint)


def _keeps_first_tokens(layout: Layout) -> bool:
    return all(spec.kind == "window" and spec.keep for spec in layout.layers)


def _verify_like_mlx_lm(runner: ModelRunner, tokens: Sequence[int], span: Span) -> Steps[None]:
    """Verify the checkpoint by chunks of `mlx_lm.cache_prompt`: chunk lengths decide what a token attends to."""
    caches: list[Any] = [RotatingKVCache(spec.max_size, keep=spec.keep) for spec in runner.layout.layers]
    last = len(tokens) - 1
    for start in range(0, last, MLX_CHUNK_TOKENS):
        runner.model(mx.array([tokens[start : min(start + MLX_CHUNK_TOKENS, last)]]), cache=caches)
        mx.eval([cache.state for cache in caches])
        yield
    runner.model(mx.array([tokens[last:]]), cache=caches)
    mx.eval([cache.state for cache in caches])
    _compare_checkpoints(
        span.checkpoints[span.end], adopt_mlx_lm(runner.layout, caches, span.end).checkpoints[span.end]
    )


def _compare_layers(cache: SequenceCache, span: Span, start: int, end: int) -> Steps[None]:
    for layer, own in enumerate(cache.flat):
        if not isinstance(own, FullLayer):
            continue
        dtype = span.layout.flat()[layer].dtype
        ours = segments_to_arrays(own.own.segments(start, end), dtype)
        _compare(span, layer, start, ours, is_first=False)
        yield


def _compare(span: Span, layer: int, start: int, ours: tuple[mx.array, mx.array], *, is_first: bool) -> None:
    """Raise UnusableFile where a span's K and V are too far from `ours`.

    `ours`: recomputed K and V from position `start` on, [1, kv_heads, tokens, dim].
    """
    segments = span.segments(layer, start, start + ours[0].shape[2])
    codec = span.sealed(layer)[0].k.codec  # a prompt cache has one codec per layer
    bits = codec.bits if isinstance(codec, AffineCodec) else None
    limit = _limit(bits, ours[0].dtype, is_first=is_first)
    for theirs, computed in zip(segments_to_arrays(segments, ours[0].dtype), ours, strict=True):
        # Encoded by the same codec, equal values get equal codes.
        decoded = codec.decode(codec.encode(computed.squeeze(0)), computed.dtype)[None] if bits else computed
        errors = _errors_by_token(_as_rows(decoded), _as_rows(theirs))
        worst = float(errors.max()) if is_first else float(np.sqrt((errors**2).mean()))
        if not worst <= limit:
            place = start + int(np.nan_to_num(errors, nan=np.inf).argmax())
            raise _mismatch(f"what it holds near token {place} is {worst:.2f} from what this model computes", limit)


def _compare_checkpoints(theirs: Checkpoint, ours: Checkpoint) -> None:
    for layer, (one, other) in enumerate(zip(theirs.states, ours.states, strict=True)):
        if isinstance(one, SealedSegment) and isinstance(other, SealedSegment):
            dtype = other.k.arrays["values"].dtype
            pairs = list(zip(one.dense(dtype), other.dense(dtype), strict=True))
        elif isinstance(one, RecurrentState) and isinstance(other, RecurrentState):
            pairs = [(a, b) for a, b in zip(one.arrays, other.arrays, strict=True) if a is not None and b is not None]
        else:
            continue
        for a, b in pairs:
            limit = _limit(None, b.dtype, is_first=False)
            x, y = (np.asarray(each.astype(mx.float32)).ravel() for each in (a, b))
            worst = float(np.linalg.norm(x - y) / max(float(np.linalg.norm(y)), 1e-9))
            if not worst <= limit:
                raise _mismatch(f"layer {layer} at its end is {worst:.2f} from what this model computes", limit)


def _as_rows(array: mx.array) -> np.ndarray:
    """Convert [1, kv_heads, tokens, dim] to float32 [tokens, values]."""
    flat = array.squeeze(0).swapaxes(0, 1).astype(mx.float32)
    return np.asarray(flat).reshape(flat.shape[0], -1)


def _errors_by_token(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return each token's error as a share of the distance between tokens."""
    norm = float(np.sqrt((ours**2).sum(-1).mean()))
    distance = float(np.sqrt(((ours - ours.mean(0)) ** 2).sum(-1).mean())) if len(ours) > 3 else norm
    return np.linalg.norm(ours - theirs, axis=-1) / max(distance, SMALLEST_SHARE * norm, 1e-9)


def _limit(bits: int | None, dtype: mx.Dtype, *, is_first: bool) -> float:
    if bits is not None:
        return (FIRST_LAYER if is_first else BY_BITS)[bits]
    return EXACT if dtype == mx.float32 else HALF


def _mismatch(difference: str, limit: float) -> UnusableFile:
    return UnusableFile(
        f"This prompt cache is not this model's for this prompt: {difference} (at most {limit:g} is taken). Give the "
        "prompt that it was made of, and serve the model that made it. Nothing was stored.",
        code="other_prompt",
    )


# Reading, on a worker thread.


class PromptCacheReader:
    """Reads one prompt cache file. The constructor checks all but the arrays; it raises ConfigError or UnusableFile."""

    def __init__(self, table: TensorTable, layout: Layout) -> None:
        self._layout = layout
        self._file = PromptCacheFile(table)
        self._layers = layers_in(layout, self._file)
        self.num_tokens = num_tokens_in(self._layers, self._file)

    @property
    def recorded_ids(self) -> TokenIds | None:
        """Token ids that `export --mlx` recorded in the file; None: there are none. Anyone may have written them."""
        text = self._file.table.metadata.get(f"0.{TOKENS}")
        if text is None:
            return None
        try:
            octets = base64.b64decode(text, validate=True)
            return np.frombuffer(octets, "<i4").astype(np.int32)
        except (binascii.Error, ValueError) as error:
            raise UnusableFile(f"The token ids in the file cannot be read. {CHANGED}") from error

    def read_span(self, run_task: RunTask, ids: TokenIds) -> Span:
        """Return the file's KV as a span that was verified against the model. The cache does not hold it yet."""
        num_tokens = len(ids)
        if self.num_tokens is not None and self.num_tokens != num_tokens:
            raise InvalidRequest(
                f"The prompt has {num_tokens} tokens, and the prompt cache holds {self.num_tokens}. Give the prompt "
                f"that it was made of. {CHANGED}",
                code="other_prompt",
            )
        segments: dict[int, tuple[SealedSegment, ...]] = {}
        states: list[LayerState] = []
        for i, (spec, layer) in enumerate(zip(self._layout.flat(), self._layers, strict=True)):
            if spec.kind == "full":
                full = full_layer(spec, layer, self._file, num_tokens)
                segments[i] = tuple(self._read_segments(run_task, full, num_tokens))
                states.append(None)
            else:
                read = partial(other_layer, spec, layer, self._file, num_tokens)
                states.append(run_task(lambda _, read=read: _in_one_step(read)))
        span = Span(self._layout, 0, num_tokens, dict(segments))
        if needs_checkpoints(self._layout):
            span.checkpoints[num_tokens] = Checkpoint(num_tokens, tuple(states))
        run_task(lambda core: self._verify(core, ids, span))
        return span

    def _read_segments(self, run_task: RunTask, layer: FullLayerIn, num_tokens: int) -> Iterator[SealedSegment]:
        octets = {path: self._file.read(path) for side in layer.sides for path in side}
        for start, end in layer.segment_ranges(num_tokens):
            k, v = ([cut_tensor(octets[p], self._file.tensor(p), start, end) for p in side] for side in layer.sides)
            yield run_task(lambda _, k=k, v=v, start=start: _in_one_step(lambda: make_segment(layer, k, v, start)))

    def _verify(self, core: EngineCore, ids: TokenIds, span: Span) -> Steps[None]:
        check_segments(self._layout, {layer: span.sealed(layer)[0] for layer in span.layers})
        if needs_checkpoints(self._layout):
            example = yield from example_checkpoint(core)
            assert example is not None
            check_checkpoint(self._layout, span.checkpoints[span.end], span.end, example)
        yield from verify_span(core.runner, ids, span)


def example_checkpoint(core: EngineCore) -> Steps[Checkpoint | None]:
    """Return a checkpoint of this model, to compare the shapes of others with; None: the model needs none."""
    yield
    if not needs_checkpoints(core.runner.layout):
        return None
    cache = core.runner.new_cache(1)
    core.runner.prefill(cache, [0])
    return take_checkpoint(cache)


def _in_one_step(make: Callable[[], Any]) -> Steps[Any]:
    yield
    return make()


# Writing.


class PromptCacheWriter:
    """Writes an export as a file that mlx-lm's own loader reads."""

    def __init__(self, layout: Layout, export: ExportProgress, model_name: str) -> None:
        """Called on the engine thread."""
        checkpoint = export.checkpoints.get(len(export.ids))
        self._layers = layers_out(layout, export.ranges, checkpoint)
        names, self._trees = trees_of(layout, self._layers)
        tokens = base64.b64encode(export.ids.astype("<i4").tobytes()).decode()
        about = {"model": model_name, "tokenizer_config": json.dumps({}), TOKENS: tokens}
        self._metadata = metadata_of(names, self._trees, about)

    def pieces(self, run_task: RunTask) -> Iterator[memoryview]:
        """Yield the file's bytes: header, scalars, and one layer's tensors at a time."""
        leaves = list(flattened(self._trees))
        scalars = [(path, *_scalar(leaf)) for path, leaf in leaves if not isinstance(leaf, FileArray)]
        named = [TensorNamed(path, dtype, shape) for path, dtype, shape, _ in scalars]
        named += [TensorNamed(path, leaf.dtype, leaf.shape) for path, leaf in leaves if isinstance(leaf, FileArray)]
        yield memoryview(encode_table(named, self._metadata))
        yield memoryview(b"".join(octets for *_, octets in scalars))
        for layer in self._layers:
            for octets in run_task(lambda _, layer=layer: tensors_of(layer)):
                yield memoryview(octets)


def _scalar(leaf: int | str | None) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and bytes of a scalar as mlx-lm writes it: a number, a text's characters, or nothing."""
    if leaf is None:
        return "F32", (0,), b""
    if isinstance(leaf, str):
        return "I32", (len(leaf),), np.array([ord(each) for each in leaf], "<i4").tobytes()
    return "I32", (), np.array(leaf, "<i4").tobytes()
