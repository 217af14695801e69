"""Scheduler: decides from plain values what the next step runs. Pure, and owned by property tests.

Fairness: memory is given first come, first served. The oldest sequence always gets its next KV buffer, if need be from
the youngest, so that one sequence always finishes. The prompt with the fewest tokens left is prefilled first, so that a
short prompt does not wait for a long one, but every fourth pass prefills the oldest, so that the long one ends too.
Short prompts share a pass: beside streams if the chunk size allows, else up to the fixed cost of the pass. While
streams run, chunks get a share of the time: their size follows what recent chunks have added to the streams' steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

OLDEST_EVERY = 4

# Time of a chunk while nothing decodes, where the speed allows it: a request that arrives waits for the chunk.
CHUNK_S = 0.5
MIN_CHUNK_TOKENS = 128
# A chunk beside streams costs about one step of theirs, however few tokens it has: on a CPU because BLAS copies all
# weights for a product of more than one row. A chunk of fewer tokens is hardly shorter, and the prompt takes several
# times as long. On a GPU the fixed cost of a pass equals far more tokens: there it is measured (`PassCost`).
MIN_CHUNK_BESIDE_STREAMS = 16
# A chunk beside streams may be longer by this share of its size where that ends the prompt: the rest would cost another
# pass.
OVER_SIZE = 0.25
# While chunks cost at most this multiple of the expected time, the cost measured at startup holds.
AS_EXPECTED = 1.5
# A chunk that costs more than this multiple of the expected time of a large one is too large.
MOST_OF_EXPECTED = 3.0
# Largest growth from one chunk to the next: one measurement may be off.
MAX_GROWTH = 2.0


@dataclass(frozen=True)
class SequenceInput:
    """Waiting or running sequence, as the scheduler sees it."""

    id: int
    nbytes: int  # KV that it holds, or that admission would take
    prefill_left: int  # 0: it decodes
    chunk_limit: int | None = None  # tokens until its prefill has to pause
    context: int = 0  # tokens before its next one: cached or computed
    grow_bytes: int = 0  # bytes of its next KV buffer; 0: the present one has space for the next token
    is_complete: bool = False  # all tokens that it may still produce are launched
    is_blocked: bool = False  # waits for a tier or for another prefill; holds up no other


@dataclass(frozen=True)
class Chunk:
    """Tokens of one prompt in a pass."""

    id: int
    num_tokens: int


@dataclass(frozen=True)
class ChunkCost:
    """Time that a chunk added to a step of the running streams."""

    num_tokens: int
    seconds: float


class PassCost(NamedTuple):
    """Cost of a pass, as measured at startup."""

    tokens_s: float = 0.0  # tokens per second in a long pass; 0: not known
    pass_tokens: int = 0  # tokens that take as long as the fixed cost of a pass; 0: not measured
    pass_s: float = 0.0  # time of a chunk of `pass_tokens`
    token_s: float = 0.0  # time that each further token adds

    def seconds(self, num_tokens: int) -> float:
        """Return the expected time of a chunk."""
        return self.pass_s + (num_tokens - self.pass_tokens) * self.token_s


UNMEASURED = PassCost()


@dataclass(frozen=True)
class PrefillSharing:
    """Measurements that decide how streams and prompts share the time."""

    share: float  # share of the time that chunks may take while streams run
    step_s: float  # usual time of a decode step of these streams without a chunk; 0: not known
    prefill_tokens_s: float  # speed of chunks while nothing decoded; 0: not known
    recent: Sequence[ChunkCost] = ()
    steps_since_chunk: int = 0  # decode steps without one, in a row
    cost: PassCost = UNMEASURED


@dataclass(frozen=True)
class StepLimits:
    """Limits of a step."""

    free_bytes: int
    max_running: int
    chunk_tokens: int  # size of chunks while no stream runs
    chunk_tokens_beside_streams: int  # size of chunks while streams run; 0: no chunk in this step
    mixes: bool = False  # whether such chunks ride along with a decode step, and several with each other
    num_passes: int = 0  # passes with chunks so far
    max_batched_tokens: int = 0  # most tokens of several chunks in one pass while no stream runs
    max_batched_context: int = 0  # most tokens that such chunks may read: they take memory at the same time


@dataclass(frozen=True)
class StepPlan:
    """Plan of a step, by ids of sequences."""

    preempt: tuple[int, ...] = ()
    grow: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    prefill: tuple[Chunk, ...] = ()  # in one pass
    decode: tuple[int, ...] = ()
    is_mixed: bool = False  # the chunks go through the same pass as the decode step


def schedule(waiting: Sequence[SequenceInput], running: Sequence[SequenceInput], limits: StepLimits) -> StepPlan:
    """Plan the next step. Both lists are in order of arrival, and ids grow with it."""
    preempt, grow, free_bytes = _preempt_for_growth(running, limits.free_bytes)
    left = [sequence for sequence in running if sequence.id not in preempt]
    # A preempted sequence has the first claim on memory: no other is admitted before it.
    admit = () if preempt else _admit(waiting, len(left), free_bytes, limits.max_running)
    left += [sequence for sequence in waiting if sequence.id in admit]
    left.sort(key=lambda sequence: sequence.id)
    streams = [s for s in left if not s.prefill_left and not s.is_complete]
    chunks = _next_chunks(left, limits, beside=bool(streams))
    rides = limits.mixes and bool(chunks) and bool(streams)
    # A prompt whose last chunk rides along has its first token in the next step: the rows of this step are streams.
    decoding = streams if rides else [s for s in left if _decodes(s, chunks)]
    decode = tuple(s.id for s in decoding if not s.grow_bytes or s.id in grow)
    return StepPlan(preempt, grow, admit, chunks, decode, rides)


def _preempt_for_growth(
    running: Sequence[SequenceInput], free_bytes: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    preempt: list[int] = []
    grow: list[int] = []
    youngest_first = list(reversed(running))
    for sequence in running:
        if not sequence.grow_bytes or sequence.id in preempt:
            continue
        while sequence.grow_bytes > free_bytes and sequence.id not in preempt:
            victim = next(s for s in youngest_first if s.id not in preempt)
            preempt.append(victim.id)
            free_bytes += victim.nbytes
        if sequence.id not in preempt:
            grow.append(sequence.id)
            free_bytes -= sequence.grow_bytes
    return tuple(preempt), tuple(grow), free_bytes


def _admit(waiting: Sequence[SequenceInput], num_running: int, free_bytes: int, max_running: int) -> tuple[int, ...]:
    admit: list[int] = []
    for request in waiting:
        if request.is_blocked:
            continue
        if num_running + len(admit) >= max_running or request.nbytes > free_bytes:
            break
        admit.append(request.id)
        free_bytes -= request.nbytes
    return tuple(admit)


def _next_chunks(running: Sequence[SequenceInput], limits: StepLimits, *, beside: bool) -> tuple[Chunk, ...]:
    """Choose the chunk of one prompt, and chunks of others that fit into the same pass."""
    prefilling = [sequence for sequence in running if sequence.prefill_left]
    size = limits.chunk_tokens_beside_streams if beside else limits.chunk_tokens
    if not prefilling or not size:
        return ()
    shortest = sorted(prefilling, key=lambda sequence: sequence.prefill_left)
    is_oldests_turn = limits.num_passes % OLDEST_EVERY == OLDEST_EVERY - 1
    chosen = prefilling[0] if is_oldests_turn else shortest[0]
    longer = min(int(size * (1 + OVER_SIZE)), max(size, limits.chunk_tokens)) if beside else size
    chunks = [Chunk(chosen.id, _max_tokens(chosen) if _max_tokens(chosen) <= longer else size)]
    tokens_left = (size if beside else min(size, limits.max_batched_tokens)) - chunks[0].num_tokens
    context_left = limits.max_batched_context - chosen.context - chunks[0].num_tokens
    for sequence in shortest if limits.mixes else ():
        count = _max_tokens(sequence)
        if sequence is not chosen and count <= tokens_left and sequence.context + count <= context_left:
            chunks.append(Chunk(sequence.id, count))
            tokens_left -= count
            context_left -= sequence.context + count
    return tuple(chunks)


def _max_tokens(sequence: SequenceInput) -> int:
    """Return the tokens of the next chunk if no size limited it."""
    limit = sequence.chunk_limit
    return sequence.prefill_left if limit is None else min(sequence.prefill_left, limit)


def _decodes(sequence: SequenceInput, chunks: Sequence[Chunk]) -> bool:
    """Whether the prompt is computed, or a chunk of this step ends it, so that its first token comes in this step."""
    ends_now = any(chunk.id == sequence.id and chunk.num_tokens == sequence.prefill_left for chunk in chunks)
    return not sequence.is_complete and (not sequence.prefill_left or ends_now)


def chunk_tokens(prefill_tokens_s: float, max_tokens: int) -> int:
    """Return the size of a prefill chunk, from the measured speed (0: not measured yet)."""
    if not prefill_tokens_s:
        return MIN_CHUNK_TOKENS
    wanted = int(prefill_tokens_s * CHUNK_S) // MIN_CHUNK_TOKENS * MIN_CHUNK_TOKENS
    return max(MIN_CHUNK_TOKENS, min(wanted, max_tokens))


def chunk_tokens_beside_streams(sharing: PrefillSharing, *, least: int, most: int) -> int:
    """Return the size of a chunk beside running streams; 0: this step has no chunk.

    A chunk may add share / (1 - share) of a step to a step. Where that is too short for a chunk that is worth its cost,
    steps without a chunk come first until prefill has saved up its share.
    """
    if sharing.share >= 1:
        return most
    if not sharing.step_s:
        return 0
    least = min(_worthwhile(sharing, least), most)
    allowed_s = sharing.share / (1 - sharing.share) * sharing.step_s
    wanted = _tokens_in(allowed_s, sharing, least)
    if wanted >= least:
        return min(wanted, most)
    saved_s = allowed_s * (1 + sharing.steps_since_chunk)
    return least if _cost_s(least, sharing) <= saved_s else 0


def _worthwhile(sharing: PrefillSharing, least: int) -> int:
    """Return the smallest size that is worth a pass: fewer tokens spare the streams little and delay the prompt. The
    cost of a pass was measured without a context: where the largest recent chunk cost far more, smaller chunks are
    worth a pass."""
    cost = sharing.cost
    if not sharing.recent or not cost.pass_s:
        return max(least, cost.pass_tokens)
    size = max(chunk.num_tokens for chunk in sharing.recent)
    took_s = statistics.median(chunk.seconds for chunk in sharing.recent if chunk.num_tokens == size)
    if took_s <= AS_EXPECTED * cost.seconds(size):
        return max(least, cost.pass_tokens)
    is_dear = took_s > MOST_OF_EXPECTED * cost.pass_s
    return max(least, min(cost.pass_tokens, size // 2 if is_dear else int(MAX_GROWTH * size)))


def _tokens_in(seconds: float, sharing: PrefillSharing, least: int) -> int:
    """Return the tokens that fit into `seconds`: the median of what each recent chunk says, all else equal.

    The fixed cost is part of what chunks added, so sizes converge step by step.
    """
    if not sharing.recent:
        return round(seconds * sharing.prefill_tokens_s) if sharing.prefill_tokens_s else least
    return round(statistics.median(_size_in(seconds, chunk, least) for chunk in sharing.recent))


def _cost_s(num_tokens: int, sharing: PrefillSharing) -> float:
    """Return the time that a chunk of `num_tokens` would add; 0: not known."""
    if not sharing.recent:
        return num_tokens / sharing.prefill_tokens_s if sharing.prefill_tokens_s else 0.0
    return statistics.median(_scaled_s(chunk, num_tokens, sharing.prefill_tokens_s) for chunk in sharing.recent)


def _scaled_s(chunk: ChunkCost, num_tokens: int, tokens_s: float) -> float:
    """Return the time that the chunk would have added with `num_tokens`. Its fixed cost stays."""
    proportional_s = chunk.seconds * num_tokens / chunk.num_tokens
    if not tokens_s:
        return proportional_s
    shifted_s = chunk.seconds + (num_tokens - chunk.num_tokens) / tokens_s
    return shifted_s if num_tokens > chunk.num_tokens else max(proportional_s, shifted_s)


def _size_in(seconds: float, chunk: ChunkCost, least: int) -> float:
    most = max(MAX_GROWTH * chunk.num_tokens, least)
    return min(most, chunk.num_tokens * seconds / chunk.seconds) if chunk.seconds > 0 else most


def buffer_tokens(capacity: int, wanted: int, step_tokens: int) -> int:
    """Return the capacity to add for `wanted` more tokens: in steps that grow with the sequence, so that a sequence has
    few KV buffers."""
    return min(wanted, max(step_tokens, capacity // 4))
