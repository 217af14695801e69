"""Sampling: tokens from logits, each row of the batch with its own settings, on the device.

The order is that of transformers: bias and penalties, grammar mask, temperature, top-k, top-p of the tokens that top-k
keeps, min-p, draw. The draw inverts the cumulative distribution at one uniform number per row. The request's own
generator on the host gives that number, so a seed gives the same tokens in any batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from kvstrata.engine.request import Sampling, TokenLogprob

# Below this temperature only the largest logit matters, and a division by the temperature would overflow.
_GREEDY_BELOW = 1e-5
# One bit less than a float32 has: u * total then stays below total, and no draw runs past the last token.
_DRAW_BITS = 23


class Sampler:
    """Sampling state of one request: its random numbers and the tokens seen so far."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], vocab_size: int) -> None:
        self.sampling = sampling
        self._random = random.Random(sampling.seed)
        self._bias = _dense_bias(sampling, vocab_size)
        self._seen = _token_mask(prompt, vocab_size) if sampling.repetition_penalty != 1.0 else None  # [vocab]
        counts_reply = sampling.presence_penalty or sampling.frequency_penalty
        self._counts = mx.zeros((vocab_size,)) if counts_reply else None  # [vocab], tokens of the reply

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < _GREEDY_BELOW

    @property
    def adjusts(self) -> bool:
        """Whether bias or penalties change the logits."""
        return self._bias is not None or self._seen is not None or self._counts is not None

    def draw(self) -> float:
        """Return the next uniform number of the request."""
        return self._random.getrandbits(_DRAW_BITS) / 2**_DRAW_BITS

    def adjust(self, logits: mx.array) -> mx.array:  # [1, vocab]
        """Apply bias and penalties."""
        if self._bias is not None:
            logits = logits + self._bias
        if self._seen is not None:
            penalty = self.sampling.repetition_penalty
            logits = mx.where(self._seen, mx.where(logits > 0, logits / penalty, logits * penalty), logits)
        if self._counts is not None:
            logits = logits - self.sampling.frequency_penalty * self._counts
            logits = logits - self.sampling.presence_penalty * (self._counts > 0)
        return logits

    def record(self, token: mx.array) -> None:  # [1]
        """Count a token of the reply for the penalties. The token may still be computed."""
        if self._seen is not None:
            self._seen = self._seen | (mx.arange(self._seen.size) == token)
        if self._counts is not None:
            self._counts = self._counts + (mx.arange(self._counts.size) == token)

    def arrays(self) -> list[mx.array]:
        return [array for array in (self._seen, self._counts) if array is not None]


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens of a step. The device may still compute them."""

    tokens: mx.array  # int32 [rows]
    logprobs: dict[int, RowLogprobs]  # by row, where the request asks for logprobs

    def read(self) -> list[int]:
        """Wait for the tokens, and return them."""
        mx.eval(self.arrays())
        return np.asarray(self.tokens).tolist()

    def arrays(self) -> list[mx.array]:
        return [self.tokens, *(array for row in self.logprobs.values() for array in (row.ids, row.values))]


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of one row."""

    ids: mx.array  # [1 + n], the sampled token, then the most likely tokens, not sorted
    values: mx.array  # [1 + n]

    def read(self, token: int) -> TokenLogprob:
        """Wait for the log-probabilities of the sampled `token`, and return them."""
        (chosen, *values), (_, *ids) = _floats(self.values), _floats(self.ids)
        pairs = sorted(zip(values, ids, strict=True), reverse=True)
        return TokenLogprob(token, chosen, tuple((int(id_), value) for value, id_ in pairs))


def sample(
    logits: mx.array,  # [rows, vocab]
    samplers: Sequence[Sampler],
    allowed: np.ndarray | None = None,  # [rows, vocab], bool, at least one in each row; None: all
) -> SampledTokens:
    """Sample a token for each row. `allowed`: tokens that the grammars allow."""
    logits = logits.astype(mx.float32)
    adjusted = logits
    if any(sampler.adjusts for sampler in samplers):
        adjusted = mx.concatenate([sampler.adjust(_row(logits, row)) for row, sampler in enumerate(samplers)])
    if allowed is not None:
        adjusted = mx.where(mx.array(allowed), adjusted, -mx.inf)  # pyright: ignore[reportArgumentType]
    tokens = mx.argmax(adjusted, axis=-1).astype(mx.int32)
    if not all(sampler.greedy for sampler in samplers):
        greedy = mx.array([sampler.greedy for sampler in samplers])
        tokens = mx.where(greedy, tokens, _draw_tokens(adjusted, samplers))
    for row, sampler in enumerate(samplers):
        sampler.record(_row(tokens, row))
    return SampledTokens(tokens, _row_logprobs(logits, tokens, samplers))


def _draw_tokens(logits: mx.array, samplers: Sequence[Sampler]) -> mx.array:
    temperature = _column([1.0 if sampler.greedy else sampler.sampling.temperature for sampler in samplers])
    probabilities = mx.softmax(logits / temperature, axis=-1)
    probabilities = _truncate(probabilities, [sampler.sampling for sampler in samplers])
    cumulative = mx.cumsum(probabilities, axis=-1)
    draws = _column([sampler.draw() for sampler in samplers])
    drawn = (cumulative <= draws * cumulative[:, -1:]).sum(axis=-1)
    # NaN in the logits of a broken model could give an id past the vocabulary, and the next step uses it as an index.
    return mx.minimum(drawn, logits.shape[-1] - 1).astype(mx.int32)


def _truncate(probabilities: mx.array, rows: Sequence[Sampling]) -> mx.array:
    """Set the probabilities that top-k, top-p and min-p exclude to zero. Each filter keeps all from a floor upward."""
    floor = mx.zeros((len(rows), 1))
    if any(row.top_k or row.top_p < 1 for row in rows):
        descending = _descending(probabilities)
        floor = _top_k_floor(descending, rows)
        kept = mx.where(descending >= floor, descending, 0.0)
        floor = mx.maximum(floor, _top_p_floor(kept, rows))
    if any(row.min_p for row in rows):
        floor = mx.maximum(floor, _column([row.min_p for row in rows]) * probabilities.max(axis=-1, keepdims=True))
    return mx.where(probabilities >= floor, probabilities, 0.0)


def _descending(probabilities: mx.array) -> mx.array:
    if mx.default_device() != mx.cpu:
        return -mx.sort(-probabilities, axis=-1)
    # numpy sorts with vector instructions, about five times as fast as MLX on a CPU.
    return mx.array(np.sort(np.asarray(probabilities), axis=-1))[:, ::-1]


def _top_k_floor(descending: mx.array, rows: Sequence[Sampling]) -> mx.array:
    size = descending.shape[-1]
    counts = mx.array([[min(row.top_k or size, size)] for row in rows])
    return _smallest(descending, mx.arange(size) < counts)


def _top_p_floor(descending: mx.array, rows: Sequence[Sampling]) -> mx.array:
    """Return the floor that keeps the smallest set of tokens with a share of top_p of the sum."""
    cumulative = mx.cumsum(descending, axis=-1)
    # 2.0: a row without top-p keeps all tokens even where the sum was rounded up.
    top_p = _column([row.top_p if row.top_p < 1 else 2.0 for row in rows])
    return _smallest(descending, cumulative - descending < top_p * cumulative[:, -1:])


def _smallest(descending: mx.array, is_kept: mx.array) -> mx.array:
    """Return the smallest kept probability of each row, and keep at least the first -> [rows, 1].

    No index is used: for an index MLX gathers, on CUDA with a kernel that it first compiles.
    """
    kept = mx.where(is_kept, descending, mx.inf)
    return mx.minimum(kept.min(axis=-1, keepdims=True), descending[:, :1])


def _row_logprobs(logits: mx.array, tokens: mx.array, samplers: Sequence[Sampler]) -> dict[int, RowLogprobs]:
    """Return log-probabilities by row, from the model's logits before bias, penalties and temperature."""
    result = {}
    for row, sampler in enumerate(samplers):
        count = sampler.sampling.num_logprobs
        if count is None:
            continue
        values = _row(logits, row).reshape(-1)
        values = values - mx.logsumexp(values)
        ids = mx.argpartition(-values, kth=min(count, values.size - 1))[:count]
        ids = mx.concatenate([_row(tokens, row), ids.astype(mx.int32)])
        result[row] = RowLogprobs(ids, values[ids])
    return result


def _row(array: mx.array, row: int) -> mx.array:
    """Return one row as an array [1, ...]: a slice, because MLX gathers for an index."""
    return array[row : row + 1]


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]


def _floats(array: mx.array) -> list[float]:
    """Return a vector on the host. (`mx.array.tolist` has no precise type.)"""
    return np.asarray(array.astype(mx.float32)).tolist()


def _token_mask(ids: Sequence[int], vocab_size: int) -> mx.array:  # [vocab]
    mask = np.zeros(vocab_size, np.bool_)
    mask[list(ids)] = True
    return mx.array(mask)  # pyright: ignore[reportArgumentType]


def _dense_bias(sampling: Sampling, vocab_size: int) -> mx.array | None:
    if not sampling.logit_bias:
        return None
    bias = np.zeros(vocab_size, np.float32)
    bias[[token for token, _ in sampling.logit_bias]] = [value for _, value in sampling.logit_bias]
    return mx.array(bias)
