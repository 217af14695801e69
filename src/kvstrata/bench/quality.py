"""What a codec does to what the model says: KL to full precision, same first choice, perplexity.

The reference is the same weights and kernels with full-precision KV. `bench/passes.py` says what is encoded and scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.bench.driver import Figure
from kvstrata.bench.passes import (
    DECODE_TOKENS,
    MODES,
    Score,
    Subject,
    Text,
    Window,
    run,
    score,
    subject_of,
    windows_of,
)
from kvstrata.bench.watch import UNWATCHED, Watch
from kvstrata.codecs.registry import parse
from kvstrata.errors import ConfigError
from kvstrata.kv.precision_plan import PrecisionPlan, make_plan, raw_plan
from kvstrata.models.load import LoadedModel

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
class Protocol:
    pairs: tuple[Pair, ...] = PAIRS
    contexts: tuple[int, ...] = (512,)
    windows: int = 2
    modes: tuple[str, ...] = MODES

    def num_passes(self, num_texts: int) -> int:
        return num_texts * len(self.contexts) * len(self.modes) * (1 + len(self.pairs)) * self.windows


FIRST_LOOK = Protocol()
MORE_PAIRS: tuple[Pair, ...] = (("planes:4", "planes:2"), ("affine:2", "affine:2"), ("planes:2", "planes:2"))


def full_protocol(loaded: LoadedModel, texts: Sequence[Text]) -> Protocol:
    """Three contexts, the last one the longest that model and texts allow; six windows where the texts have them."""
    shortest = min(len(text.ids) for text in texts)
    longest = min(loaded.context_tokens, shortest) - DECODE_TOKENS - 1
    if longest < FIRST_LOOK.contexts[0]:
        needed = FIRST_LOOK.contexts[0] + DECODE_TOKENS + 1
        raise ConfigError(
            f"The whole protocol needs {needed} tokens or more; the text has {shortest} and the model's context "
            f"{loaded.context_tokens}. Use a longer --text."
        )
    contexts = sorted({min(context, longest) for context in (512, 2048, longest)})
    return Protocol((*PAIRS, *MORE_PAIRS), tuple(contexts), min(6, max(1, shortest // (longest + DECODE_TOKENS + 1))))


def parse_pairs(words: str) -> tuple[Pair, ...]:
    """`planes:8/planes:4,planes:4`: K and V with a slash between, or one name for both."""
    pairs = [word.strip().split("/") for word in words.split(",")]
    if not all(1 <= len(pair) <= 2 for pair in pairs):
        raise ConfigError(
            f"'{words}' is not a list of precisions of K and V, such as planes:8/planes:4,planes:4/planes:4"
        )
    return tuple((parse(pair[0]).name, parse(pair[-1]).name) for pair in pairs)


def measure(
    loaded: LoadedModel, texts: Sequence[Text], protocol: Protocol = FIRST_LOOK, watch: Watch = UNWATCHED
) -> Iterator[Quality]:
    """One row for each text, context, mode and pair, as soon as it is known; the first of each is full precision
    itself. Refuses what cannot be measured at once."""
    subject = subject_of(loaded)
    cases = _cases(texts, protocol)
    plans = {pair: make_plan(subject.layout, *map(parse, pair)) for pair in protocol.pairs}
    return _measured(subject, cases, plans, watch)


def _cases(texts: Sequence[Text], protocol: Protocol) -> list[tuple[str, list[Window]]]:
    """The names of texts, and windows."""
    return [
        (text.name, windows_of(text.ids, context, mode, protocol.windows))
        for text in texts
        for context in protocol.contexts
        for mode in protocol.modes
    ]


def _measured(
    subject: Subject, cases: Sequence[tuple[str, list[Window]]], plans: Mapping[Pair, PrecisionPlan], watch: Watch
) -> Iterator[Quality]:
    for text, windows in cases:
        title = f"{text}, {windows[0].mode}, context {windows[0].context}"
        yield from _rows(subject, plans, windows, text, watch.under(title))


def _rows(
    subject: Subject, plans: Mapping[Pair, PrecisionPlan], windows: Sequence[Window], text: str, watch: Watch
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
