"""Measured speeds of passes and steps, for people and for the scheduler."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable

from kvstrata.engine.runner import PendingStep
from kvstrata.engine.scheduler import (
    MIN_BESIDE_TOKENS,
    UNMEASURED,
    ChunkCost,
    PrefillSharing,
    beside_tokens,
    chunk_tokens,
)
from kvstrata.metrics import Metrics

# Speeds are those of the last so many seconds of work.
WINDOW_S = 10.0

# Steps that the usual one is the median of.
PACE_STEPS = 8

# Chunks beside streams that the size of the next one is chosen by.
ADDED_CHUNKS = 6

# Such chunks, one after the other, after which a decode step runs without one: streams get slower as they get longer.
FRESH_CHUNKS = 64


class TokenRate:
    """Tokens over the time in which there was such work, whether or not all of it went there."""

    def __init__(self) -> None:
        self._spent: deque[tuple[int, float]] = deque()  # tokens, seconds
        self._num_tokens = 0
        self._seconds = 0.0

    def add_work(self, num_tokens: int, seconds: float) -> None:
        self._spent.append((num_tokens, seconds))
        self._num_tokens += num_tokens
        self._seconds += seconds
        while self._seconds - self._spent[0][1] >= WINDOW_S:
            old_tokens, old_s = self._spent.popleft()
            self._num_tokens -= old_tokens
            self._seconds -= old_s

    @property
    def tokens_s(self) -> float:
        return self._num_tokens / self._seconds if self._seconds > 0 else 0.0


class StepTimes:
    """How long a decode step of so many streams usually takes. Only those count that had no other work between them."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=PACE_STEPS))
        self._last_streams = 0

    def add_step(self, num_streams: int, seconds: float) -> None:
        self._steps[num_streams].append(seconds)
        self._last_streams = num_streams

    def step_s(self, num_streams: int | None = None) -> float:
        """Of the number of streams that ran last, if none is given; 0: there was no such step."""
        steps = self._steps.get(self._last_streams if num_streams is None else num_streams)
        return statistics.median(steps) if steps else 0.0


class ChunkCosts:
    """What chunks add to the steps of running streams."""

    def __init__(self, least_tokens: int) -> None:
        self.step_times = StepTimes()
        self._least_tokens = least_tokens  # shorter ones tell nothing of others: they cost as much
        self._added: deque[ChunkCost] = deque(maxlen=ADDED_CHUNKS)
        self._chunks_since_step = 0
        self.steps_since_chunk = 0

    def add_step(self, num_streams: int, seconds: float | None) -> None:
        """A decode step without a chunk; None: how long it took is not known."""
        self.steps_since_chunk += 1
        if seconds is not None:
            self._chunks_since_step = 0
            self.step_times.add_step(num_streams, seconds)

    def add_chunk(self, num_tokens: int, seconds: float) -> None:
        self.steps_since_chunk = 0
        self._chunks_since_step += 1
        if num_tokens >= self._least_tokens:
            self._added.append(ChunkCost(num_tokens, seconds))

    @property
    def recent(self) -> tuple[ChunkCost, ...]:
        return tuple(self._added)

    def step_s(self, num_streams: int) -> float:
        """0: a step without a chunk has to tell first."""
        return 0.0 if self._chunks_since_step >= FRESH_CHUNKS else self.step_times.step_s(num_streams)


class StepSpeeds:
    """Counts passes as they end. `share`: of the time, that prompts may take while streams run. `max_chunk`: largest
    chunk of a prompt; `fixed_chunk`: the size of all, whatever is measured."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        share: float,
        max_chunk: int,
        fixed_chunk: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._metrics = metrics
        self._share = share
        self._max_chunk = max_chunk
        self._fixed_chunk = fixed_chunk
        self._clock = clock
        self.pass_cost = UNMEASURED  # until the start has measured it
        self.num_passes = 0  # with chunks
        self._last_read_s = 0.0
        self._did_background_work = False  # since the last decode step was read
        self._beside = ChunkCosts(MIN_BESIDE_TOKENS)
        self.decode = TokenRate()
        self.prefill = TokenRate()
        self.alone = TokenRate()  # of prompts, while nothing decoded

    @property
    def step_s(self) -> float:
        """How long a decode step usually takes; 0: not known."""
        return self._beside.step_times.step_s()

    def chunk_tokens(self) -> int:
        """Of the next chunk while nothing decodes."""
        return self._fixed_chunk or chunk_tokens(self.alone.tokens_s, self._max_chunk)

    def beside_tokens(self, num_streams: int) -> int:
        """Of the next chunk beside so many streams; 0: they go on without one."""
        if self._fixed_chunk:
            return self._fixed_chunk
        beside = self._beside
        step_s = beside.step_s(num_streams)
        known = beside.recent, beside.steps_since_chunk
        sharing = PrefillSharing(self._share, step_s, self.alone.tokens_s, *known, self.pass_cost)
        return beside_tokens(sharing, least=MIN_BESIDE_TOKENS, most=self._max_chunk)

    def note_background_work(self) -> None:
        self._did_background_work = True

    def count_chunk(self, num_tokens: int, seconds: float, *, has_streams: bool) -> None:
        """A pass of its own."""
        self.num_passes += 1
        self.prefill.add_work(num_tokens, seconds)
        self._metrics.step_s.labels(kind="prefill").observe(seconds)
        if has_streams:
            self.decode.add_work(0, seconds)
            self._beside.add_chunk(num_tokens, seconds)
        else:
            self.alone.add_work(num_tokens, seconds)

    def count_step(self, step: PendingStep, num_kept: int, *, is_last: bool, has_prompts: bool) -> None:
        """A step was read: `num_kept` of its tokens go to streams. `is_last`: no other was launched before that."""
        now_s = self._clock()
        # Steps overlap: what one adds is the time since the one before was read.
        is_behind = step.began_s < self._last_read_s
        seconds = now_s - max(step.began_s, self._last_read_s)
        # On a CPU launching is most of the work: the first of overlapping steps is read after two, the last after none.
        is_usual = is_behind != is_last and not (is_behind and self._did_background_work)
        self._last_read_s, self._did_background_work = now_s, False
        self.decode.add_work(num_kept, seconds)
        if step.num_prompt_tokens:
            self._count_mixed(step, seconds)
            return
        self._beside.add_step(len(step.ids), seconds if is_usual else None)
        self._metrics.step_s.labels(kind="decode").observe(seconds)
        if has_prompts:
            self.prefill.add_work(0, seconds)

    def _count_mixed(self, step: PendingStep, seconds: float) -> None:
        """What it took more than a step without the chunk is the chunk's."""
        self.num_passes += 1
        step_s = min(self._beside.step_times.step_s(len(step.ids)), seconds)
        self._beside.add_chunk(step.num_prompt_tokens, seconds - step_s)
        self.prefill.add_work(step.num_prompt_tokens, seconds)
        self._metrics.step_s.labels(kind="prefill").observe(seconds - step_s)
        self._metrics.step_s.labels(kind="decode").observe(step_s)
