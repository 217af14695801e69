"""What a codec does to what the model says: KL to full precision, same first choice, perplexity.

The reference is the same weights and kernels with full-precision KV. In `prefill` mode the whole window is one pass and
every token but the first few is encoded; in `decode` mode the window is a prompt and further tokens of the text are fed
one by one, encoded in blocks as they come. Scored is the second half of a window, or every token that was fed.
Full and window layers are encoded; recurrent state is never stored in fewer bits, so it stays as it is here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList, make_prompt_cache

from kvstrata.bench.encoding_cache import EncodingLayer
from kvstrata.codecs.registry import parse
from kvstrata.errors import ConfigError
from kvstrata.layers.kinds import LayerSpec, Layout, arrays_in
from kvstrata.models.loaded import LoadedModel
from kvstrata.models.probe import probe
from kvstrata.spans.plan import make_plan

Pair = tuple[str, str]

PAIRS: tuple[Pair, ...] = (
    ("affine:8", "affine:8"),
    ("planes:8", "planes:8"),
    ("affine:8", "affine:4"),
    ("planes:8", "planes:4"),
    ("affine:4", "affine:4"),
    ("rotated:4", "rotated:4"),
    ("planes:4", "planes:4"),
)
MODES = ("prefill", "decode")
DECODE_TOKENS = 128
DECODE_BLOCK = 32


@dataclass(frozen=True)
class Quality:
    k: str
    v: str
    bits_per_value: float  # allocated
    mode: str  # prefill or decode
    context: int
    kl_mean: float
    kl_median: float
    kl_p999: float
    top1: float  # share of positions with the same most likely token
    ppl: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Protocol:
    pairs: tuple[Pair, ...] = PAIRS
    contexts: tuple[int, ...] = (512,)
    windows: int = 2
    modes: tuple[str, ...] = MODES


FIRST_LOOK = Protocol()
MORE_PAIRS: tuple[Pair, ...] = (("planes:4", "planes:2"), ("affine:2", "affine:2"), ("planes:2", "planes:2"))


def full_protocol(loaded: LoadedModel, ids: Sequence[int]) -> Protocol:
    """Three contexts, the last one the longest that model and text allow; six windows where the text has them."""
    longest = min(loaded.context_tokens, len(ids)) - DECODE_TOKENS - 1
    if longest < FIRST_LOOK.contexts[0]:
        needed = FIRST_LOOK.contexts[0] + DECODE_TOKENS + 1
        raise ConfigError(
            f"The whole protocol needs {needed} tokens or more; the text has {len(ids)} and the model's context "
            f"{loaded.context_tokens}. Use a longer --text."
        )
    contexts = sorted({min(context, longest) for context in (512, 2048, longest)})
    return Protocol((*PAIRS, *MORE_PAIRS), tuple(contexts), min(6, max(1, len(ids) // (longest + DECODE_TOKENS + 1))))


def measure(
    loaded: LoadedModel,
    ids: Sequence[int],
    protocol: Protocol = FIRST_LOOK,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Quality]:
    """One row for each pair, mode and context; the first row of each is full precision itself."""
    layout = probe(loaded.module)
    _check(layout)
    rows = []
    for context in protocol.contexts:
        texts = _windows(ids, context, protocol.windows)
        for mode in protocol.modes:
            progress(f"{mode}, context {context}: raw")
            reference = [_run(loaded, layout, text, context, ("raw", "raw"), mode) for text in texts]
            rows.append(_row(("raw", "raw"), mode, context, reference, reference))
            for pair in protocol.pairs:
                progress(f"{mode}, context {context}: {pair[0]} / {pair[1]}")
                runs = [_run(loaded, layout, text, context, pair, mode) for text in texts]
                rows.append(_row(pair, mode, context, reference, runs))
    return rows


def _check(layout: Layout) -> None:
    """Refuse what cannot be followed token by token, and what has nothing to encode."""
    specs = layout.flat()
    odd = {spec.kind for spec in specs if spec.kind in ("chunked", "foreign")}
    odd |= {"windows that keep their first tokens" for spec in specs if spec.keep}
    if odd or all(spec.kind == "recurrent" for spec in specs):
        has = f"layers that are {' and '.join(sorted(odd))}" if odd else "recurrent state alone, which stays as it is"
        raise ConfigError(
            f"bench quality encodes full and window attention; this model has {has}. For what its cache takes in each "
            "precision use: kvstrata bench kv-cache --layers N --heads N --head-dim N"
        )


@dataclass(frozen=True)
class _Run:
    logprobs: np.ndarray  # [positions, vocab]
    targets: np.ndarray  # [positions]: the tokens that really follow
    encoded_bytes: int
    encoded_values: int


def _windows(ids: Sequence[int], context: int, count: int) -> list[list[int]]:
    size = context + DECODE_TOKENS + 1
    if len(ids) < size * count:
        raise ConfigError(
            f"The text has {len(ids)} tokens; {count} windows of {context} need {size * count}. Use a longer --text."
        )
    step = (len(ids) - size) // max(1, count - 1) if count > 1 else 0
    return [list(ids[i * step : i * step + size]) for i in range(count)]


def _run(loaded: LoadedModel, layout: Layout, ids: list[int], context: int, pair: Pair, mode: str) -> _Run:
    caches, encoding = _caches(loaded, layout, pair, DECODE_BLOCK if mode == "decode" else 1)
    logits = loaded.module(mx.array([ids[:context]]), cache=caches)
    if mode == "prefill":
        start = context // 2
        scored = _logprobs(logits[0, start:])
        targets = ids[start + 1 : context + 1]
    else:
        mx.eval([layer.arrays() for layer in encoding], arrays_in(caches))
        fed = ids[context : context + DECODE_TOKENS]
        scored = np.concatenate([_logprobs(loaded.module(mx.array([[id_]]), cache=caches)[0]) for id_ in fed])
        targets = ids[context + 1 : context + DECODE_TOKENS + 1]
    sides = [side for layer in encoding for side in (layer.k, layer.v)]
    return _Run(scored, np.array(targets), sum(s.encoded_bytes for s in sides), sum(s.encoded_values for s in sides))


def _caches(loaded: LoadedModel, layout: Layout, pair: Pair, block: int) -> tuple[list[Any], list[EncodingLayer]]:
    """What the model is called with, and those of it that encode: by the plan that the store would have."""
    codecs = iter(make_plan(layout, *map(parse, pair)).pairs)
    encoding: list[EncodingLayer] = []

    def cache_of(spec: LayerSpec, theirs: Any) -> Any:
        if spec.kind == "composite":
            return CacheList(*(cache_of(*child) for child in zip(spec.children, theirs.caches, strict=True)))
        k, v = next(codecs)
        if spec.kind == "recurrent":
            return theirs
        encoding.append(EncodingLayer(k, v, block=block, window=spec.max_size or None))
        return encoding[-1]

    made = zip(layout.layers, make_prompt_cache(loaded.module), strict=True)
    return [cache_of(spec, theirs) for spec, theirs in made], encoding


def _logprobs(logits: mx.array) -> np.ndarray:
    logits = logits.astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def _row(pair: Pair, mode: str, context: int, reference: Sequence[_Run], runs: Sequence[_Run]) -> Quality:
    kl = np.concatenate([_kl(a.logprobs, b.logprobs) for a, b in zip(reference, runs, strict=True)])
    same = [a.logprobs.argmax(-1) == b.logprobs.argmax(-1) for a, b in zip(reference, runs, strict=True)]
    surprise = np.concatenate([-run.logprobs[np.arange(len(run.targets)), run.targets] for run in runs])
    values = sum(run.encoded_values for run in runs)
    return Quality(
        k=pair[0],
        v=pair[1],
        bits_per_value=8 * sum(run.encoded_bytes for run in runs) / values,
        mode=mode,
        context=context,
        kl_mean=float(kl.mean()),
        kl_median=float(np.median(kl)),
        kl_p999=float(np.quantile(kl, 0.999)),
        top1=float(np.concatenate(same).mean()),
        ppl=float(np.exp(surprise.mean())),
    )


def _kl(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Of each position, in nats. Rounding can make it a hair negative."""
    return np.maximum((np.exp(reference) * (reference - other)).sum(-1), 0.0)
