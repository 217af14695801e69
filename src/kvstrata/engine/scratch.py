"""What forward passes take beside KV, and how fast prompts are computed: measured once, before the first request.

Without it a memory limit would be a guess: scratch depends on the model's shapes and on how attention is computed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import mlx.core as mx

from kvstrata.engine.memory import Scratch
from kvstrata.engine.runner import Runner
from kvstrata.layers.sequence import SequenceCache

# Largest prefill chunk: past these sizes a chunk gets no faster by token, only longer.
MAX_CHUNK_CPU = 256
MAX_CHUNK_GPU = 2048
MEASURED_TOKENS = 128
# Arrays of logits that drawing tokens has alive at once; seen with every sampling option on.
LOGITS_COPIES = 10
LOGIT_BYTES = 4


@dataclass(frozen=True)
class Passes:
    scratch: Scratch
    prefill_tokens_s: float


def max_chunk() -> int:
    return MAX_CHUNK_CPU if mx.default_device() == mx.cpu else MAX_CHUNK_GPU


def measure_passes(runner: Runner, *, rows: int, vocab_size: int, chunk_tokens: int | None = None) -> Passes:
    """Of chunks of so many tokens, and of batches of `rows`. Activations grow with the chunk, and attention's scores
    with the chunk and with all that comes before it."""
    cache = runner.new_cache(2 * MEASURED_TOKENS)
    first, _ = _prefill(runner, cache)
    second, seconds = _prefill(runner, cache)
    chunks = (chunk_tokens or max_chunk()) / MEASURED_TOKENS
    base = max(int(chunks * first), LOGITS_COPIES * LOGIT_BYTES * rows * vocab_size)
    scratch = Scratch(base, int(chunks * max(0, second - first) / MEASURED_TOKENS))
    return Passes(scratch, MEASURED_TOKENS / seconds)


def _prefill(runner: Runner, cache: SequenceCache) -> tuple[int, float]:
    """What one chunk had alive at most beside what stays, and its time."""
    mx.reset_peak_memory()
    began_s = time.perf_counter()
    runner.prefill(cache, [0] * MEASURED_TOKENS)
    mx.synchronize()
    seconds = time.perf_counter() - began_s
    return max(0, mx.get_peak_memory() - mx.get_active_memory()), seconds
