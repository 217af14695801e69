"""How much the engine may take on at once. Plain values; where they come from is config's business."""

from __future__ import annotations

from dataclasses import dataclass

# Of a long prompt, between two points that models with window or recurrent layers can be resumed at.
MARK_EVERY_TOKENS = 4096


@dataclass(frozen=True)
class Limits:
    max_running: int = 16  # sequences that hold KV
    max_waiting: int = 256  # requests past those; then QueueFull
    shares_queue: bool = False  # no owner takes more than half of the places that other owners leave
    context_tokens: int | None = None  # None: what the model was made for
    prefill_chunk_tokens: int | None = None  # None: from the speed that is measured
    prefill_share: float = 0.5  # of the time, that prompts may take while streams run
    max_kv_size: int | None = None  # tokens that a sequence keeps at most: the first few and the newest; None: all
    tail_step_tokens: int = 2048  # room for the reply is added in steps of this
    memory_bytes: int | None = None  # weights, KV and scratch; None: 75 % of the device's memory
    wired_bytes: int = 0  # that macOS must not page out; 0: it decides
    slice_s: float = 0.005  # of work on stored KV between two decode steps

    @property
    def num_places(self) -> int:
        """Requests that run or wait at once."""
        return self.max_running + self.max_waiting


def share_of(num_places: int) -> int:
    """Half of what is left, so that the next one finds a place too."""
    return (num_places + 1) // 2


@dataclass(frozen=True)
class EngineState:
    """A picture of the engine, taken between two steps."""

    waiting: int = 0
    prefilling: int = 0
    running: int = 0  # those that decode, and those that prefill
    kv_bytes: int = 0  # of running sequences, and stored
    stored_bytes: int = 0
    kv_budget_bytes: int = 0
    active_bytes: int = 0
    peak_bytes: int = 0
    decode_tokens_s: float = 0.0
    prefill_tokens_s: float = 0.0
