"""One pass of a model over a window of text, with each layer's K and V under a plan, and how it compares with raw.

In `prefill` mode the whole window is one pass and every token but the first few is encoded; in `decode` mode the window
is a prompt and further tokens of the text are fed one by one, encoded in blocks as they come. Scored is the second half
of a window, or every token that was fed. Full and window layers are encoded; recurrent state is never stored in fewer
bits, so it stays as it is here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList, make_prompt_cache

from kvstrata.bench.encoding_cache import EncodingLayer
from kvstrata.errors import ConfigError
from kvstrata.kv.layout import LayerSpec, Layout, arrays_in
from kvstrata.kv.precision_plan import PrecisionPlan
from kvstrata.models.load import LoadedModel
from kvstrata.models.probe import probe

MODES = ("prefill", "decode")
DECODE_TOKENS = 128
DECODE_BLOCK = 32


@dataclass(frozen=True)
class Subject:
    """The model that is measured, and its layers."""

    loaded: LoadedModel
    layout: Layout


def subject_of(loaded: LoadedModel) -> Subject:
    """Refuses what cannot be followed token by token, and what has nothing to encode."""
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
    return Subject(loaded, layout)


@dataclass(frozen=True)
class Text:
    name: str
    ids: Sequence[int]


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a text: the context, those that decoding feeds, and one more to predict."""

    ids: tuple[int, ...]
    context: int
    mode: str


def windows_of(ids: Sequence[int], context: int, mode: str, count: int) -> list[Window]:
    """Spread over the whole text, without overlap. They are as long for both modes, so that both see the same text."""
    size = context + DECODE_TOKENS + 1
    if len(ids) < size * count:
        raise ConfigError(
            f"The text has {len(ids)} tokens; {count} windows of {context} need {size * count}. Use a longer --text."
        )
    step = (len(ids) - size) // max(1, count - 1) if count > 1 else 0
    return [Window(tuple(ids[i * step : i * step + size]), context, mode) for i in range(count)]


@dataclass(frozen=True)
class Run:
    logprobs: np.ndarray  # float32 [positions, vocab]
    targets: np.ndarray  # [positions]: the tokens that really follow
    encoded_bytes: int
    encoded_values: int


def run(subject: Subject, plan: PrecisionPlan, window: Window) -> Run:
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
    return Run(scored, np.array(targets), sum(s.encoded_bytes for s in sides), sum(s.encoded_values for s in sides))


def _caches(subject: Subject, plan: PrecisionPlan, block: int) -> tuple[list[Any], list[EncodingLayer]]:
    """What the model is called with, and those of it that encode."""
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
    """One run beside the run over the same window in full precision. Small: a run has every logit, this has none."""

    kl: np.ndarray  # [positions], in nats
    same: np.ndarray  # bool [positions]: the most likely token is the same
    surprise: np.ndarray  # [positions], of the token that really follows
    encoded_bytes: int
    encoded_values: int


def score(reference: Run, other: Run) -> Score:
    return Score(
        kl=kl_of(reference.logprobs, other.logprobs),
        same=reference.logprobs.argmax(-1) == other.logprobs.argmax(-1),
        surprise=-other.logprobs[np.arange(len(other.targets)), other.targets],
        encoded_bytes=other.encoded_bytes,
        encoded_values=other.encoded_values,
    )


def kl_of(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Of each position. Rounding can make it a hair negative."""
    return np.maximum((np.exp(reference) * (reference - other)).sum(-1), 0.0)
