"""Measured speeds of passes and steps, for metrics and for the scheduler."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable

from kvstrata.engine.runner import PendingStep
from kvstrata.engine.scheduler import (
    MIN_CHUNK_BESIDE_STREAMS,
    UNMEASURED,
    ChunkCost,
    PassCost,
    PrefillSharing,
    chunk_tokens,
    chunk_tokens_beside_streams,
)
from kvstrata.metrics import Metrics

# Token rates cover the last ten seconds of work.
WINDOW_S = 10.0

# Steps of which the median is the usual time of a step.
RECENT_STEPS = 8

# Latest chunks beside streams, by which the size of the next chunk is chosen.
RECENT_CHUNKS = 6

# Chunks beside streams in a row until a decode step runs without a chunk: its time grows with the streams' contexts.
FRESH_CHUNKS = 64


class TokenRate:
    """Tokens per second, over the time in which such work was pending, even where other work took a part of it."""

    def __init__(self) -> None:
        self._work: deque[tuple[int, float]] = deque()  # tokens, seconds
        self._num_tokens = 0
        self._seconds = 0.0

    def add_work(self, num_tokens: int, seconds: float) -> None:
        self._work.append((num_tokens, seconds))
        self._num_tokens += num_tokens
        self._seconds += seconds
        while self._seconds - self._work[0][1] >= WINDOW_S:
            old_tokens, old_s = self._work.popleft()
            self._num_tokens -= old_tokens
            self._seconds -= old_s

    @property
    def tokens_s(self) -> float:
        return self._num_tokens / self._seconds if self._seconds > 0 else 0.0


class StepTimes:
    """Usual time of a decode step, by number of streams. Only steps without other work in between count."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_STEPS))
        self._last_streams = 0

    def add_step(self, num_streams: int, seconds: float) -> None:
        self._steps[num_streams].append(seconds)
        self._last_streams = num_streams

    def step_s(self, num_streams: int | None = None) -> float:
        """Return the usual time with this many streams (None: as many as in the last step); 0: unknown."""
        steps = self._steps.get(self._last_streams if num_streams is None else num_streams)
        return statistics.median(steps) if steps else 0.0


class ChunkCosts:
    """Time that prompt chunks add to the steps of running streams."""

    def __init__(self, min_tokens: int) -> None:
        self.step_times = StepTimes()
        self._min_tokens = min_tokens  # shorter chunks do not count: all of them cost the same
        self._recent: deque[ChunkCost] = deque(maxlen=RECENT_CHUNKS)
        self._chunks_since_step = 0
        self.steps_since_chunk = 0

    def add_step(self, num_streams: int, seconds: float | None) -> None:
        """Count a decode step without a chunk. `seconds`: None where other work fell into its time."""
        self.steps_since_chunk += 1
        if seconds is not None:
            self._chunks_since_step = 0
            self.step_times.add_step(num_streams, seconds)

    def add_chunk(self, num_tokens: int, seconds: float) -> None:
        """Count a chunk, and the time that it added to a step."""
        self.steps_since_chunk = 0
        self._chunks_since_step += 1
        if num_tokens >= self._min_tokens:
            self._recent.append(ChunkCost(num_tokens, seconds))

    @property
    def recent(self) -> tuple[ChunkCost, ...]:
        return tuple(self._recent)

    def step_s(self, num_streams: int) -> float:
        """Return the usual time of a step without a chunk; 0: such a step has to be measured first."""
        return 0.0 if self._chunks_since_step >= FRESH_CHUNKS else self.step_times.step_s(num_streams)


class StepSpeeds:
    """Measured speeds of all passes and steps, and the sizes of prompt chunks that follow from them.

    `share`: most of the time that prompts may take while streams run. `max_chunk`: largest chunk. `fixed_chunk`: size
    of all chunks; None: chosen from the speeds. `pass_cost`: as measured at startup.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        share: float,
        max_chunk: int,
        fixed_chunk: int | None = None,
        pass_cost: PassCost = UNMEASURED,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._metrics = metrics
        self._share = share
        self._max_chunk = max_chunk
        self._fixed_chunk = fixed_chunk
        self._clock = clock
        self.pass_cost = pass_cost
        self.num_passes = 0  # passes with chunks
        self._last_read_s = 0.0
        self._did_background_work = False  # since the last decode step was read
        self._beside = ChunkCosts(MIN_CHUNK_BESIDE_STREAMS)
        self.decode = TokenRate()
        self.prefill = TokenRate()
        self.alone = TokenRate()  # prefill without running streams
        if pass_cost.tokens_s:
            # The first request already needs a prefill speed: it decides whether a read from the disk pays.
            self.alone.add_work(1, 1 / pass_cost.tokens_s)

    @property
    def step_s(self) -> float:
        """Usual time of a decode step; 0: unknown."""
        return self._beside.step_times.step_s()

    def chunk_tokens(self) -> int:
        """Return the size of the next chunk while no stream runs."""
        return self._fixed_chunk or chunk_tokens(self.alone.tokens_s, self._max_chunk)

    def chunk_tokens_beside_streams(self, num_streams: int) -> int:
        """Return the size of the next chunk beside this many streams; 0: the next step takes no chunk."""
        if self._fixed_chunk:
            return self._fixed_chunk
        beside = self._beside
        step_s = beside.step_s(num_streams)
        sharing = PrefillSharing(
            self._share, step_s, self.alone.tokens_s, beside.recent, beside.steps_since_chunk, self.pass_cost
        )
        return chunk_tokens_beside_streams(sharing, least=MIN_CHUNK_BESIDE_STREAMS, most=self._max_chunk)

    def note_background_work(self) -> None:
        """Keep the next decode step out of the usual times, because background work fell into its time."""
        self._did_background_work = True

    def count_chunk(self, num_tokens: int, seconds: float, *, has_streams: bool) -> None:
        """Count a pass that computed only prompt chunks."""
        self.num_passes += 1
        self.prefill.add_work(num_tokens, seconds)
        self._metrics.step_s.labels(kind="prefill").observe(seconds)
        if has_streams:
            self.decode.add_work(0, seconds)
            self._beside.add_chunk(num_tokens, seconds)
        else:
            self.alone.add_work(num_tokens, seconds)

    def count_step(self, step: PendingStep, num_kept: int, *, is_last: bool, has_prompts: bool) -> None:
        """Count a step that was read. `num_kept`: tokens that streams got. `is_last`: no later step is launched."""
        now_s = self._clock()
        # Steps overlap: the time of a step begins when the step before it was read.
        is_overlapped = step.began_s < self._last_read_s
        seconds = now_s - max(step.began_s, self._last_read_s)
        # The first of overlapping steps is read after two launches, the last after none. On a CPU a launch is most of
        # the work, so neither counts as usual.
        is_usual = is_overlapped != is_last and not (is_overlapped and self._did_background_work)
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
        """Count a step with chunks: the time beyond that of a usual step belongs to the chunks."""
        self.num_passes += 1
        step_s = min(self._beside.step_times.step_s(len(step.ids)), seconds)
        self._beside.add_chunk(step.num_prompt_tokens, seconds - step_s)
        self.prefill.add_work(step.num_prompt_tokens, seconds)
        self._metrics.step_s.labels(kind="prefill").observe(seconds - step_s)
        self._metrics.step_s.labels(kind="decode").observe(step_s)
