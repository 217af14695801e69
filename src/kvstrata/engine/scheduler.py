"""Who runs next. Pure: values in, a plan out; property tests own it.

Fairness: first come, first served, for memory. The oldest sequence always gets its next piece of tail, if need be from
the youngest, so one always finishes. Prefill goes to the shortest rest, so that a short prompt does not wait for a
long one, but every fourth pass to the oldest, so that the long one ends too. Short prompts share a pass: beside
streams if it has room for them, else up to what the pass itself costs. While streams run, chunks get a share of the
time: their size follows what chunks of late have added to the streams' steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

OLDEST_EVERY = 4

# While nothing decodes a chunk takes about this long, where the speed allows it: a request that comes waits for it.
CHUNK_S = 0.5
MIN_CHUNK_TOKENS = 128
# However few tokens a chunk beside streams has, it costs about one step of theirs: on a CPU because BLAS copies all
# weights for a product of more than one row. So a chunk of fewer tokens is hardly shorter, and the prompt takes several
# times as long. Where a pass costs as much as far more tokens, as on a GPU, that is measured (`PassCost`).
MIN_BESIDE_TOKENS = 16
# A chunk beside streams may be longer by this share of its size where that ends the prompt: what would be left costs a
# pass of its own.
OVER_SIZE = 0.25
# While chunks cost at most so many times what was expected of them, what was measured at the start holds.
AS_EXPECTED = 1.5
# A chunk that costs more than so many times what was expected of a large one is too large.
MOST_OF_EXPECTED = 3.0
# From one chunk to the next, sizes grow by no more than this: one measurement may be off.
MAX_GROWTH = 2.0


@dataclass(frozen=True)
class Waiting:
    id: int
    nbytes: int  # KV to begin with, and what it keeps from being evicted
    prefill_left: int
    chunk_limit: int | None = None  # tokens until its prefill has to pause
    context: int = 0  # tokens that are stored for it
    is_blocked: bool = False  # another computes what it needs: it waits for that, and holds up no other


@dataclass(frozen=True)
class Running:
    id: int
    nbytes: int
    prefill_left: int  # 0: it decodes
    chunk_limit: int | None = None  # tokens until its prefill has to pause
    grow_bytes: int = 0  # what its next piece of tail takes; 0: there is room for the next token
    is_complete: bool = False  # everything was launched that it may still produce
    context: int = 0  # tokens before its next one


@dataclass(frozen=True)
class Chunk:
    id: int
    num_tokens: int


@dataclass(frozen=True)
class ChunkCost:
    """What a chunk added to a step of the running streams."""

    num_tokens: int
    seconds: float


class PassCost(NamedTuple):
    """What a pass takes, as measured at the start."""

    tokens_s: float = 0.0  # in a long pass; 0: not known
    pass_tokens: int = 0  # how many tokens take as long as the fixed cost of a pass; 0: not measured
    pass_s: float = 0.0  # how long a chunk of so many takes
    token_s: float = 0.0  # how much longer for each token

    def seconds(self, num_tokens: int) -> float:
        return self.pass_s + (num_tokens - self.pass_tokens) * self.token_s


UNMEASURED = PassCost()


@dataclass(frozen=True)
class PrefillSharing:
    """What is known when streams and prompts have to share."""

    share: float  # of the time, that chunks may take while streams run
    step_s: float  # usual time of a decode step of these streams without a chunk; 0: not known
    prefill_tokens_s: float  # of chunks while nothing decoded; 0: not known
    recent: Sequence[ChunkCost] = ()
    steps_since_chunk: int = 0  # decode steps without one, in a row
    cost: PassCost = UNMEASURED


@dataclass(frozen=True)
class StepLimits:
    """What a plan goes by beside the sequences."""

    free_bytes: int
    max_running: int
    chunk_tokens: int
    beside_tokens: int  # of chunks while streams run; 0: none in this step
    mixes: bool = False  # whether such chunks ride along with their step, and several with each other
    num_passes: int = 0  # passes with chunks so far
    joined_tokens: int = 0  # of several chunks in one pass while no stream runs
    joined_context: int = 0  # that several chunks of one pass may read in all: they take memory at the same time


@dataclass(frozen=True)
class StepPlan:
    preempt: tuple[int, ...] = ()
    grow: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    prefill: tuple[Chunk, ...] = ()  # in one pass
    decode: tuple[int, ...] = ()
    is_mixed: bool = False  # the chunks go through the same pass as the decode step


def schedule(waiting: Sequence[Waiting], running: Sequence[Running], terms: StepLimits) -> StepPlan:
    """Both in order of arrival; ids grow with it."""
    set_aside, grow, free_bytes = _preempt_for_growth(running, terms.free_bytes)
    left = [sequence for sequence in running if sequence.id not in set_aside]
    # A sequence that was set aside has first call on the memory: no other is let in before it.
    admit = () if set_aside else _admit(waiting, len(left), free_bytes, terms.max_running)
    left += [
        Running(w.id, w.nbytes, w.prefill_left, w.chunk_limit, context=w.context) for w in waiting if w.id in admit
    ]
    left.sort(key=lambda sequence: sequence.id)
    streams = [s for s in left if not s.prefill_left and not s.is_complete]
    chunks = _next_chunks(left, terms, beside=bool(streams))
    rides = terms.mixes and bool(chunks) and bool(streams)
    # A prompt whose last chunk rides along has its first token in the next step: this one's rows are those of streams.
    decoding = streams if rides else [s for s in left if _decodes(s, chunks)]
    decode = tuple(s.id for s in decoding if not s.grow_bytes or s.id in grow)
    return StepPlan(set_aside, grow, admit, chunks, decode, rides)


def _preempt_for_growth(running: Sequence[Running], free_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    set_aside: list[int] = []
    grow: list[int] = []
    youngest_first = list(reversed(running))
    for sequence in running:
        if not sequence.grow_bytes or sequence.id in set_aside:
            continue
        while sequence.grow_bytes > free_bytes and sequence.id not in set_aside:
            victim = next(s for s in youngest_first if s.id not in set_aside)
            set_aside.append(victim.id)
            free_bytes += victim.nbytes
        if sequence.id not in set_aside:
            grow.append(sequence.id)
            free_bytes -= sequence.grow_bytes
    return tuple(set_aside), tuple(grow), free_bytes


def _admit(waiting: Sequence[Waiting], num_running: int, free_bytes: int, max_running: int) -> tuple[int, ...]:
    admit: list[int] = []
    for request in waiting:
        if request.is_blocked:
            continue
        if num_running + len(admit) >= max_running or request.nbytes > free_bytes:
            break
        admit.append(request.id)
        free_bytes -= request.nbytes
    return tuple(admit)


def _next_chunks(running: Sequence[Running], terms: StepLimits, *, beside: bool) -> tuple[Chunk, ...]:
    """Of one prompt, and of those that it leaves room for in the pass."""
    prefilling = [sequence for sequence in running if sequence.prefill_left]
    size = terms.beside_tokens if beside else terms.chunk_tokens
    if not prefilling or not size:
        return ()
    shortest = sorted(prefilling, key=lambda sequence: sequence.prefill_left)
    is_oldests_turn = terms.num_passes % OLDEST_EVERY == OLDEST_EVERY - 1
    chosen = prefilling[0] if is_oldests_turn else shortest[0]
    longer = min(int(size * (1 + OVER_SIZE)), max(size, terms.chunk_tokens)) if beside else size
    chunks = [Chunk(chosen.id, _most(chosen) if _most(chosen) <= longer else size)]
    room = (size if beside else min(size, terms.joined_tokens)) - chunks[0].num_tokens
    context_room = terms.joined_context - chosen.context - chunks[0].num_tokens
    for sequence in shortest if terms.mixes else ():
        count = _most(sequence)
        if sequence is not chosen and count <= room and sequence.context + count <= context_room:
            chunks.append(Chunk(sequence.id, count))
            room -= count
            context_room -= sequence.context + count
    return tuple(chunks)


def _most(sequence: Running) -> int:
    """Tokens of its next chunk, however large that may be."""
    limit = sequence.chunk_limit
    return sequence.prefill_left if limit is None else min(sequence.prefill_left, limit)


def _decodes(sequence: Running, chunks: Sequence[Chunk]) -> bool:
    """Its prompt is done, or a chunk of this step ends it: then its first token comes in this step."""
    ends_now = any(chunk.id == sequence.id and chunk.num_tokens == sequence.prefill_left for chunk in chunks)
    return not sequence.is_complete and (not sequence.prefill_left or ends_now)


def chunk_tokens(prefill_tokens_s: float, max_tokens: int) -> int:
    """The size of a prefill chunk, from the speed that was measured (0: not yet)."""
    if not prefill_tokens_s:
        return MIN_CHUNK_TOKENS
    wanted = int(prefill_tokens_s * CHUNK_S) // MIN_CHUNK_TOKENS * MIN_CHUNK_TOKENS
    return max(MIN_CHUNK_TOKENS, min(wanted, max_tokens))


def beside_tokens(sharing: PrefillSharing, *, least: int, most: int) -> int:
    """The size of a chunk beside running streams; 0: they go on without one.

    A chunk may add share / (1 - share) of a step to a step. Where that is too short for a chunk that is worth its cost,
    steps without one go before it until it has had its share.
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
    """Fewer tokens spare the streams little and hold up the prompt. What a pass is worth was measured without a
    context: where the largest chunk of late cost far more, it is worth fewer."""
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
    """Each chunk of late says how many it would have been, all else equal; the middle one counts.

    What does not grow with the tokens is in what they added, so sizes close in on the right one step by step.
    """
    if not sharing.recent:
        return round(seconds * sharing.prefill_tokens_s) if sharing.prefill_tokens_s else least
    return round(statistics.median(_size_in(seconds, chunk, least) for chunk in sharing.recent))


def _cost_s(num_tokens: int, sharing: PrefillSharing) -> float:
    """What so many tokens would add; 0: not known."""
    if not sharing.recent:
        return num_tokens / sharing.prefill_tokens_s if sharing.prefill_tokens_s else 0.0
    return statistics.median(_scaled_s(chunk, num_tokens, sharing.prefill_tokens_s) for chunk in sharing.recent)


def _scaled_s(chunk: ChunkCost, num_tokens: int, tokens_s: float) -> float:
    """What the chunk would have added with so many tokens: what does not grow with them stays."""
    proportional_s = chunk.seconds * num_tokens / chunk.num_tokens
    if not tokens_s:
        return proportional_s
    shifted_s = chunk.seconds + (num_tokens - chunk.num_tokens) / tokens_s
    return shifted_s if num_tokens > chunk.num_tokens else max(proportional_s, shifted_s)


def _size_in(seconds: float, chunk: ChunkCost, least: int) -> float:
    most = max(MAX_GROWTH * chunk.num_tokens, least)
    return min(most, chunk.num_tokens * seconds / chunk.seconds) if chunk.seconds > 0 else most


def buffer_tokens(capacity: int, wanted: int, step_tokens: int) -> int:
    """How much room to add for `wanted` more tokens: in steps that grow with the sequence, so that pieces stay few."""
    return min(wanted, max(step_tokens, capacity // 4))
