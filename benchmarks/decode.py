"""Decoding one sequence over a long prefix: full precision and sealed precisions, beside mlx-lm's own caches.

The prefix is random KV, because the time of a step does not depend on the values. All caches are measured alternately
in one process over several rounds; rates are medians. A cache that cannot run reports the reason instead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import mlx.core as mx
import typer
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from benchmarks.common import Rounds, command_line, run_app
from benchmarks.random_model import RandomWeights, load_model
from kvstrata.bench.figures import MIB, Figure, Progress, in_turns, lay_out, median_ratio, silent
from kvstrata.cli.bench_options import Json, Model, say, show, words
from kvstrata.codecs.registry import parse
from kvstrata.errors import ModelError
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.precision_plan import make_plan
from kvstrata.kv.raw_window import RawWindow
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.models.load import LoadedModel
from kvstrata.models.probe import probe

PRECISIONS = ("raw", "planes:8", "planes:4")
QUANTIZED_BITS = (8, 4)  # of mlx-lm's quantized cache, in groups of 64
WARM_UP_TOKENS = 8
CHUNK_TOKENS = 4096  # filled with random KV at a time


@dataclass(frozen=True)
class DecodeFigures(Figure):
    cache: str
    context_tokens: int
    nbytes: int  # K and V of all layers
    tokens_s: float
    ratio: float  # to the first cache, median of the rounds' ratios
    failed: str = ""  # why there are no figures


class DecodingCache(Protocol):
    """A filled cache that decodes."""

    @property
    def nbytes(self) -> int: ...

    def step(self, token: mx.array) -> mx.array:
        """Start one decode step on a token [1] and return the next token, without waiting for it."""
        ...


def measure(
    loaded: LoadedModel,
    *,
    context_tokens: int = 4096,
    reply_tokens: int = 64,
    rounds: int = 3,
    precisions: Sequence[str] = PRECISIONS,
    progress: Progress = silent,
) -> list[DecodeFigures]:
    shapes = _shapes(loaded)
    room = WARM_UP_TOKENS + rounds * reply_tokens
    makers: dict[str, Callable[[], DecodingCache]] = {
        name: lambda name=name: _KvstrataCache(loaded, shapes, name, context_tokens, room) for name in precisions
    }
    for bits in (0, *QUANTIZED_BITS):
        makers[f"mlx-lm quantized {bits}" if bits else "mlx-lm"] = lambda bits=bits: _MlxLmCache(
            loaded, shapes, bits, context_tokens
        )
    running: dict[str, DecodingCache] = {}
    failed: dict[str, str] = {}
    for name, make in makers.items():
        progress(f"{name}, warming up")
        try:
            cache = make()
            _decode_s(cache, WARM_UP_TOKENS)
        except (RuntimeError, ValueError) as error:
            # MLX's own error for an operation without a kernel.
            failed[name] = " ".join(str(error).split())[:200]
        else:
            running[name] = cache
    cases = {name: lambda cache=cache: _decode_s(cache, reply_tokens) for name, cache in running.items()}
    times = in_turns(cases, rounds, progress)
    first = next(iter(times.values()), [])
    return [
        DecodeFigures(name, context_tokens, 0, 0.0, 0.0, failed[name])
        if name in failed
        else DecodeFigures(
            cache=name,
            context_tokens=context_tokens,
            nbytes=running[name].nbytes,
            tokens_s=reply_tokens / statistics.median(times[name]),
            ratio=median_ratio(first, times[name]),
        )
        for name in makers
    ]


def table(rows: Sequence[DecodeFigures]) -> str:
    return lay_out(
        rows,
        [
            ("cache", "<22", lambda row: row.cache),
            ("context", ">9", lambda row: row.context_tokens),
            ("MiB", ">10.1f", lambda row: f"   failed: {row.failed}" if row.failed else row.nbytes / MIB),
            ("tokens/s", ">10.1f", lambda row: "" if row.failed else row.tokens_s),
            ("ratio", ">8.2f", lambda row: "" if row.failed else row.ratio),
        ],
    )


class _KvstrataCache:
    def __init__(self, loaded: LoadedModel, shapes: Shapes, name: str, context_tokens: int, room: int) -> None:
        self._model: Any = loaded.module
        layout = probe(loaded.module)
        self._cache = SequenceCache(layout, loaded.module, context_tokens + room)
        plan = make_plan(layout, parse(name), parse(name))
        for layer, shape, pair in zip(self._cache.layers, shapes, plan.pairs, strict=True):
            assert isinstance(layer, FullLayer)
            for k, v in _random_kv(shape, context_tokens):
                layer.append(k, v)
                mx.eval(layer.arrays())
            if name != "raw":
                layer.own.encode_past_at_once(*pair, RawWindow())
        self._cache.end_pass(context_tokens)

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    def step(self, token: mx.array) -> mx.array:
        logits = self._model(token[None], cache=self._cache.caches())
        self._cache.end_pass(1)
        following = mx.argmax(logits[:, -1], axis=-1)
        mx.async_eval(following, self._cache.arrays())
        return following


class _MlxLmCache:
    """mlx-lm's KVCache, or its QuantizedKVCache where `bits` is not 0."""

    def __init__(self, loaded: LoadedModel, shapes: Shapes, bits: int, context_tokens: int) -> None:
        self._model: Any = loaded.module
        self._caches: list[KVCache | QuantizedKVCache] = []
        for shape in shapes:
            cache = KVCache()
            for k, v in _random_kv(shape, context_tokens):
                cache.update_and_fetch(k, v)
                mx.eval(cache.keys, cache.values)
            self._caches.append(cache.to_quantized(bits=bits) if bits else cache)
            mx.eval(self._caches[-1].keys, self._caches[-1].values)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes or 0 for cache in self._caches)

    def step(self, token: mx.array) -> mx.array:
        following = mx.argmax(self._model(token[None], cache=self._caches)[:, -1], axis=-1)
        mx.async_eval(following)
        return following


@dataclass(frozen=True)
class Vectors:
    """Shape and dtype of the keys or the values that a layer keeps of a token."""

    num_heads: int
    dim: int
    dtype: mx.Dtype


Shapes = list[tuple[Vectors, Vectors]]  # K and V of each layer


def _shapes(loaded: LoadedModel) -> Shapes:
    """Return the shapes of K and V in each layer, found by running one token."""
    caches = make_prompt_cache(loaded.module)
    if any(type(cache) is not KVCache for cache in caches):
        raise ModelError(
            f"{loaded.name} has layers other than full attention. Measure it with: python -m benchmarks.engine"
        )
    model: Any = loaded.module
    mx.eval(model(mx.array([[0]]), cache=caches))
    return [(_vectors(cache.keys), _vectors(cache.values)) for cache in caches]


def _vectors(array: mx.array) -> Vectors:
    return Vectors(array.shape[1], array.shape[3], array.dtype)


def _random_kv(shape: tuple[Vectors, Vectors], num_tokens: int) -> Iterator[tuple[mx.array, mx.array]]:
    for start in range(0, num_tokens, CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, num_tokens - start)
        yield _random(shape[0], size), _random(shape[1], size)


def _random(vectors: Vectors, num_tokens: int) -> mx.array:
    return mx.random.normal((1, vectors.num_heads, num_tokens, vectors.dim), vectors.dtype)


def _decode_s(cache: DecodingCache, num_tokens: int) -> float:
    """Return the time of decoding with one step in flight while the step before is read, as in the engine."""
    token = mx.array([0])
    mx.eval(token)
    began_s = time.perf_counter()
    for _ in range(num_tokens):
        following = cache.step(token)
        mx.eval(token)
        token = following
    mx.eval(token)
    return time.perf_counter() - began_s


app = command_line()


@app.command()
def main(
    model: Model = None,
    context_tokens: Annotated[int, typer.Option(min=256, help="Tokens of context.")] = 4096,
    reply_tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded in each round.")] = 16,
    rounds: Rounds = 3,
    precisions: Annotated[
        str, typer.Option(help="Precisions of kvstrata's cache, with commas between.")
    ] = "raw,planes:8,planes:4",
    random_weights: RandomWeights = False,
    as_json: Json = False,
) -> None:
    """Measure decoding over a long context: each precision, beside mlx-lm's plain and quantized caches."""
    rows = measure(
        load_model(model, random_weights=random_weights),
        context_tokens=context_tokens,
        reply_tokens=reply_tokens,
        rounds=rounds,
        precisions=words(precisions),
        progress=say,
    )
    show(rows, table, as_json=as_json)


if __name__ == "__main__":
    run_app(app)
