"""Quality of a precision: KL divergence to full precision, top-1 agreement, perplexity.

The reference is the same weights and kernels with full-precision KV. In `prefill` mode a whole window is one pass and
every token but the first few is encoded; in `decode` mode the window is a prompt, and the following tokens of the text
are fed one by one and encoded in blocks. Scores cover the second half of a window, or every token that was fed. Full
and window layers are encoded; recurrent state is never quantized, so it stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import CacheList, make_prompt_cache

from kvstrata.bench.figures import Figure
from kvstrata.bench.load import UNWATCHED, Watch
from kvstrata.codecs.base import Codec
from kvstrata.codecs.registry import parse
from kvstrata.errors import ConfigError
from kvstrata.kv.layout import LayerSpec, Layout, arrays_in
from kvstrata.kv.precision_plan import PrecisionPlan, make_plan, raw_plan
from kvstrata.models.load import LoadedModel
from kvstrata.models.probe import probe


class EncodedSide:
    """K or V of one layer. The first tokens stay raw; the others are encoded as soon as a block is full."""

    def __init__(self, codec: Codec, first_raw: int, block: int) -> None:
        self._codec = codec
        self._first_raw = first_raw
        self._block = block
        self._done: mx.array | None = None  # [1, heads, tokens, dim]: raw and decoded, in order
        self._num_done = 0
        self._pending: mx.array | None = None  # tokens of an incomplete block
        self.encoded_bytes = 0
        self.encoded_values = 0

    def add(self, x: mx.array) -> mx.array:
        pending = x if self._pending is None else mx.concatenate([self._pending, x], axis=2)
        if self._num_done < self._first_raw:
            count = min(self._first_raw - self._num_done, pending.shape[2])
            self._append(pending[:, :, :count])
            pending = pending[:, :, count:]
        # A prompt is encoded as a whole, like a span; single tokens wait until their block is full.
        if pending.shape[2] >= self._block:
            self._append(self._passed_through(pending))
            pending = pending[:, :, :0]
        self._pending = pending
        return self._all()

    def arrays(self) -> list[mx.array]:
        return [array for array in (self._done, self._pending) if array is not None]

    def _append(self, x: mx.array) -> None:
        self._done = x if self._done is None else mx.concatenate([self._done, x], axis=2)
        self._num_done += x.shape[2]

    def _passed_through(self, x: mx.array) -> mx.array:
        planes = self._codec.encode(x[0], self._num_done)
        self.encoded_bytes += planes.nbytes
        self.encoded_values += planes.num_values
        return self._codec.decode(planes, x.dtype)[None]

    def _all(self) -> mx.array:
        parts = [part for part in self.arrays() if part.shape[2]]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


class EncodingLayer:
    """An encoding KV cache of one layer and sequence, with mlx-lm's interface. A window is a mask, not a ring
    buffer."""

    def __init__(self, k: Codec, v: Codec, *, first_raw: int = 4, block: int = 1, window: int | None = None) -> None:
        self.offset = 0
        self._window = window
        self.k = EncodedSide(k, first_raw, block)
        self.v = EncodedSide(v, first_raw, block)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        return self.k.add(keys), self.v.add(values)

    def arrays(self) -> list[mx.array]:
        return self.k.arrays() + self.v.arrays()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:  # noqa: N803
        window_size = window_size or self._window
        if N == 1 and window_size is None:
            return None
        if return_array or window_size is not None:
            return create_causal_mask(N, self.offset, window_size=window_size)
        return "causal"


MODES = ("prefill", "decode")
DECODE_TOKENS = 128
DECODE_BLOCK = 32


@dataclass(frozen=True)
class QualitySubject:
    """The measured model and its layers."""

    loaded: LoadedModel
    layout: Layout


def subject_of(loaded: LoadedModel) -> QualitySubject:
    """Return the model with its layout. Refuse layers that cannot be encoded token by token, and models with none to
    encode."""
    layout = probe(loaded.module)
    specs = layout.flat()
    odd = {spec.kind for spec in specs if spec.kind in ("chunked", "foreign")}
    odd |= {"windows that keep their first tokens" for spec in specs if spec.keep}
    if odd or all(spec.kind == "recurrent" for spec in specs):
        has = f"layers that are {' and '.join(sorted(odd))}" if odd else "recurrent state alone, which stays as it is"
        raise ConfigError(
            f"This benchmark encodes full and window attention; this model has {has}. For what its cache takes in each "
            "precision use: kvstrata bench kv-cache --layers N --heads N --head-dim N"
        )
    return QualitySubject(loaded, layout)


@dataclass(frozen=True)
class SampleText:
    name: str
    ids: Sequence[int]


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a text: the context, the tokens fed in `decode` mode, and one more to predict."""

    ids: tuple[int, ...]
    context: int
    mode: str


def windows_of(ids: Sequence[int], context: int, mode: str, count: int) -> list[Window]:
    """Return windows spread over the text without overlap. Both modes use the same length, and so the same text."""
    size = context + DECODE_TOKENS + 1
    if len(ids) < size * count:
        raise ConfigError(
            f"The text has {len(ids)} tokens; {count} windows of {context} need {size * count}. Use a longer --text."
        )
    step = (len(ids) - size) // max(1, count - 1) if count > 1 else 0
    return [Window(tuple(ids[i * step : i * step + size]), context, mode) for i in range(count)]


@dataclass(frozen=True)
class WindowRun:
    logprobs: np.ndarray  # float32 [positions, vocab]
    targets: np.ndarray  # [positions]: the tokens that really follow
    encoded_bytes: int
    encoded_values: int


def run(subject: QualitySubject, plan: PrecisionPlan, window: Window) -> WindowRun:
    module, ids, context = subject.loaded.module, window.ids, window.context
    caches, encoding = _caches(subject, plan, DECODE_BLOCK if window.mode == "decode" else 1)
    logits = module(mx.array([ids[:context]]), cache=caches)
    if window.mode == "prefill":
        start = context // 2
        scored = logprobs_of(logits[0, start:])
        targets = ids[start + 1 : context + 1]
    else:
        mx.eval([layer.arrays() for layer in encoding], arrays_in(caches))
        fed = ids[context : context + DECODE_TOKENS]
        scored = np.concatenate([logprobs_of(module(mx.array([[id_]]), cache=caches)[0]) for id_ in fed])
        targets = ids[context + 1 : context + DECODE_TOKENS + 1]
    sides = [side for layer in encoding for side in (layer.k, layer.v)]
    return WindowRun(
        scored, np.array(targets), sum(s.encoded_bytes for s in sides), sum(s.encoded_values for s in sides)
    )


def _caches(subject: QualitySubject, plan: PrecisionPlan, block: int) -> tuple[list[Any], list[EncodingLayer]]:
    """Return the caches for the model, and the encoding layers among them."""
    codecs = iter(plan.pairs)
    encoding: list[EncodingLayer] = []

    def cache_of(spec: LayerSpec, theirs: Any) -> Any:
        if spec.kind == "composite":
            return CacheList(*(cache_of(*child) for child in zip(spec.children, theirs.caches, strict=True)))
        k, v = next(codecs)
        if spec.kind == "recurrent":
            return theirs
        encoding.append(EncodingLayer(k, v, block=block, window=spec.max_size or None))
        return encoding[-1]

    made = zip(subject.layout.layers, make_prompt_cache(subject.loaded.module), strict=True)
    return [cache_of(spec, theirs) for spec, theirs in made], encoding


def logprobs_of(logits: mx.array) -> np.ndarray:
    logits = logits.astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@dataclass(frozen=True)
class Score:
    """Scores of a run against the full-precision run over the same window. Unlike a run it keeps no logits, so it is
    small."""

    kl: np.ndarray  # [positions], in nats
    same: np.ndarray  # bool [positions]: the most likely token is the same
    surprise: np.ndarray  # [positions], of the token that really follows
    encoded_bytes: int
    encoded_values: int


def score(reference: WindowRun, other: WindowRun) -> Score:
    return Score(
        kl=kl_of(reference.logprobs, other.logprobs),
        same=reference.logprobs.argmax(-1) == other.logprobs.argmax(-1),
        surprise=-other.logprobs[np.arange(len(other.targets)), other.targets],
        encoded_bytes=other.encoded_bytes,
        encoded_values=other.encoded_values,
    )


def kl_of(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the KL divergence at each position, from log-probabilities [positions, vocab].

    Rounding could make it slightly negative, so it is clipped at 0.
    """
    return np.maximum((np.exp(reference) * (reference - other)).sum(-1), 0.0)


Pair = tuple[str, str]

RAW: Pair = ("raw", "raw")

PAIRS: tuple[Pair, ...] = (
    ("affine:8", "affine:8"),
    ("planes:8", "planes:8"),
    ("affine:8", "affine:4"),
    ("planes:8", "planes:4"),
    ("affine:4", "affine:4"),
    ("planes:4", "planes:4"),
)


@dataclass(frozen=True)
class Quality(Figure):
    text: str
    k: str
    v: str
    bits_per_value: float  # allocated
    mode: str  # prefill or decode
    context: int
    kl_mean: float
    kl_median: float
    kl_p999: float
    top1: float  # share of positions with the same most likely token
    top1_min: float  # the smallest such share of a window
    ppl: float


@dataclass(frozen=True)
class QualityProtocol:
    pairs: tuple[Pair, ...] = PAIRS
    contexts: tuple[int, ...] = (512,)
    windows: int = 2
    modes: tuple[str, ...] = MODES

    def num_passes(self, num_texts: int) -> int:
        return num_texts * len(self.contexts) * len(self.modes) * (1 + len(self.pairs)) * self.windows


FIRST_LOOK = QualityProtocol()

MORE_PAIRS: tuple[Pair, ...] = (("planes:4", "planes:2"), ("affine:2", "affine:2"), ("planes:2", "planes:2"))


def full_protocol(loaded: LoadedModel, texts: Sequence[SampleText]) -> QualityProtocol:
    """Return the full protocol: three contexts, the longest that model and texts allow among them, and up to six
    windows."""
    shortest = min(len(text.ids) for text in texts)
    longest = min(loaded.context_tokens, shortest) - DECODE_TOKENS - 1
    if longest < FIRST_LOOK.contexts[0]:
        needed = FIRST_LOOK.contexts[0] + DECODE_TOKENS + 1
        raise ConfigError(
            f"The whole protocol needs {needed} tokens or more; the text has {shortest} and the model's context "
            f"{loaded.context_tokens}. Use a longer --text."
        )
    contexts = sorted({min(context, longest) for context in (512, 2048, longest)})
    return QualityProtocol(
        (*PAIRS, *MORE_PAIRS), tuple(contexts), min(6, max(1, shortest // (longest + DECODE_TOKENS + 1)))
    )


def parse_pairs(words: str) -> tuple[Pair, ...]:
    """Parse `planes:8/planes:4,planes:4`: K and V with a slash between, or one name for both."""
    pairs = [word.strip().split("/") for word in words.split(",")]
    if not all(1 <= len(pair) <= 2 for pair in pairs):
        raise ConfigError(
            f"'{words}' is not a list of precisions of K and V, such as planes:8/planes:4,planes:4/planes:4"
        )
    return tuple((parse(pair[0]).name, parse(pair[-1]).name) for pair in pairs)


def measure(
    loaded: LoadedModel, texts: Sequence[SampleText], protocol: QualityProtocol = FIRST_LOOK, watch: Watch = UNWATCHED
) -> Iterator[Quality]:
    """Yield a row for each text, context, mode and pair as soon as it is measured; the first of each is full precision
    itself.

    Raises at the call, not at the first row, if the model or the texts cannot be measured.
    """
    subject = subject_of(loaded)
    cases = _cases(texts, protocol)
    plans = {pair: make_plan(subject.layout, *map(parse, pair)) for pair in protocol.pairs}
    return _measured(subject, cases, plans, watch)


def _cases(texts: Sequence[SampleText], protocol: QualityProtocol) -> list[tuple[str, list[Window]]]:
    """Return the windows of each text, context and mode, with the text's name."""
    return [
        (text.name, windows_of(text.ids, context, mode, protocol.windows))
        for text in texts
        for context in protocol.contexts
        for mode in protocol.modes
    ]


def _measured(
    subject: QualitySubject,
    cases: Sequence[tuple[str, list[Window]]],
    plans: Mapping[Pair, PrecisionPlan],
    watch: Watch,
) -> Iterator[Quality]:
    for text, windows in cases:
        title = f"{text}, {windows[0].mode}, context {windows[0].context}"
        yield from _rows(subject, plans, windows, text, watch.under(title))


def _rows(
    subject: QualitySubject, plans: Mapping[Pair, PrecisionPlan], windows: Sequence[Window], text: str, watch: Watch
) -> Iterator[Quality]:
    watch.say("raw / raw")
    raw = raw_plan(subject.layout)
    references = [watch.passed(run(subject, raw, window)) for window in windows]
    yield _row(text, RAW, windows[0], list(map(score, references, references)))
    for pair, plan in plans.items():
        watch.say(f"{pair[0]} / {pair[1]}")
        runs = (watch.passed(run(subject, plan, window)) for window in windows)
        yield _row(text, pair, windows[0], list(map(score, references, runs)))


def _row(text: str, pair: Pair, window: Window, scores: Sequence[Score]) -> Quality:
    kl = np.concatenate([each.kl for each in scores])
    values = sum(each.encoded_values for each in scores)
    return Quality(
        text=text,
        k=pair[0],
        v=pair[1],
        bits_per_value=8 * sum(each.encoded_bytes for each in scores) / values,
        mode=window.mode,
        context=window.context,
        kl_mean=float(kl.mean()),
        kl_median=float(np.median(kl)),
        kl_p999=float(np.quantile(kl, 0.999)),
        top1=float(np.concatenate([each.same for each in scores]).mean()),
        top1_min=min(float(each.same.mean()) for each in scores),
        ppl=float(np.exp(np.concatenate([each.surprise for each in scores]).mean())),
    )
