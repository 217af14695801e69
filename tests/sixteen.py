"""16-bit models as a Mac runs them, beside the same weights in float32 and beside mlx-lm's own caches."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from kvstrata.kv.layout import Layout
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.models.probe import probe
from tests.kv.test_batch_cache import steady_module
from tests.tiny import ARCHITECTURES, VOCAB

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16}
NUM_SEEDS = 3
NUM_TOKENS, NUM_SCORED = 68, 4
MOST = 1.5  # of mlx-lm's own error
# Heads of 32, so that MLX's quantized products take them; these have sizes of their own.
OWN_HEADS = {"mamba2", "deepseek_v3"}
# Keys of Qwen2.5 have a constant part that is many times larger than what differs between tokens.
OFFSET = "llama, keys with an offset"
CASES = (*ARCHITECTURES, OFFSET)
# Both dtypes for one of each kind of layer.
WITH_DTYPES = [
    *((case, "bfloat16") for case in CASES),
    *((case, "float16") for case in ("llama", "gemma3_text", "qwen3_next", OFFSET)),
]


@dataclass(frozen=True)
class Error:
    """Of each token that is scored."""

    ours: np.ndarray
    theirs: np.ndarray  # of the same values in 16 bits


@dataclass(frozen=True)
class Sixteen:
    """One model with the same weights in 16 and in 32 bits, and forced tokens."""

    dtype: mx.Dtype
    model: Any
    layout: Layout
    wide: Any
    wide_layout: Layout
    ids: tuple[int, ...]
    expected: np.ndarray  # [scored, vocab]: float32, mlx-lm's caches
    theirs: np.ndarray  # [scored]: the error of mlx-lm's 16-bit caches

    def error(self, logits: np.ndarray) -> Error:
        return Error(rms(logits - self.expected), self.theirs)


@cache
def sixteen(case: str, dtype_name: str, seed: int) -> Sixteen:
    wide = _module(case, seed)
    dtype = DTYPES[dtype_name]
    wide.update(cast(wide.parameters(), dtype, mx.float32))
    model = _module(case, seed)
    model.update(cast(model.parameters(), dtype))
    mx.eval(wide.parameters(), model.parameters())
    rng = random.Random(f"{case}{seed}")
    ids = tuple(rng.randrange(VOCAB) for _ in range(NUM_TOKENS))
    expected = _mlx_lm(wide, ids)
    theirs = rms(_mlx_lm(model, ids) - expected)
    return Sixteen(dtype, model, _layout(case, dtype_name), wide, _layout(case, None), ids, expected, theirs)


@cache
def _layout(case: str, dtype_name: str | None) -> Layout:
    """It follows from the configuration, not from the weights."""
    model = _module(case, 0)
    model.update(cast(model.parameters(), DTYPES[dtype_name] if dtype_name else mx.float32))
    return probe(model)


def _module(case: str, seed: int) -> Any:
    architecture = case.split(",")[0]
    overrides: dict[str, Any] = {} if architecture in OWN_HEADS else {"head_dim": 32}
    if case != OFFSET:
        return steady_module(architecture, seed=seed, **overrides)
    model = steady_module(architecture, seed=seed, attention_bias=True, **overrides)
    rng = np.random.default_rng(seed)
    for layer in model.layers:
        bias = layer.self_attn.k_proj.bias
        layer.self_attn.k_proj.bias = mx.array(rng.normal(0, 40, bias.shape).astype(np.float32))
    return model


def cast(parameters: Any, *dtypes: mx.Dtype) -> Any:
    for dtype in dtypes:
        parameters = tree_map(
            lambda a, to=dtype: a.astype(to) if mx.issubdtype(a.dtype, mx.floating) else a, parameters
        )
    return parameters


def _mlx_lm(model: Any, ids: Sequence[int]) -> np.ndarray:
    """The last tokens one by one, after a prefill of the others."""
    caches = make_prompt_cache(model)
    model(mx.array([ids[:-NUM_SCORED]]), cache=caches)
    return _stacked([model(mx.array([[token]]), cache=caches)[0, -1] for token in ids[-NUM_SCORED:]])


def run(model: Any, cache_: SequenceCache, tokens: Sequence[int]) -> mx.array:
    """-> [vocab], of the last"""
    logits = model(mx.array([tokens]), cache=cache_.caches())[0, -1]
    cache_.end_pass(len(tokens))
    mx.eval(logits, cache_.arrays())
    return logits


def scored(model: Any, cache_: SequenceCache, ids: Sequence[int], between: Callable[[], None] = lambda: None) -> Any:
    """Logits of the last tokens, one by one; what lies before them and is missing is prefilled."""
    missing = ids[cache_.num_tokens : -NUM_SCORED]
    if missing:
        run(model, cache_, missing)
    logits = []
    for token in ids[-NUM_SCORED:]:
        logits.append(run(model, cache_, [token]))
        between()
    return _stacked(logits)


def _stacked(logits: Sequence[mx.array]) -> np.ndarray:
    return np.array(mx.stack(list(logits)).astype(mx.float32))


def rms(difference: np.ndarray) -> np.ndarray:
    """Over the vocabulary, of each token."""
    return np.sqrt(np.mean(difference.astype(np.float64) ** 2, axis=-1))


def check(case: str, dtype_name: str, error: Callable[[Sixteen], Error], num_seeds: int = NUM_SEEDS) -> None:
    """The median error over seeds and tokens is at most so many times mlx-lm's. In one of the tokens another expert
    may be chosen, by either, and then all logits are others."""
    errors = [error(sixteen(case, dtype_name, seed)) for seed in range(num_seeds)]
    ours, theirs = np.median([e.ours for e in errors]), np.median([e.theirs for e in errors])
    assert ours <= MOST * theirs, f"{ours:.3g}, mlx-lm {theirs:.3g}"
