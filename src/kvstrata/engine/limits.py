"""How much the engine may take on at once. Plain values; where they come from is config's business."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstrata.disk.files import Files

# Of a long prompt, between two points that models with window or recurrent layers can be resumed at.
MARK_EVERY_TOKENS = 4096


@dataclass(frozen=True)
class Limits:
    max_running: int = 16  # sequences that hold KV
    max_waiting: int = 256  # requests past those; then QueueFull
    context_tokens: int | None = None  # None: what the model was made for
    prefill_chunk_tokens: int | None = None  # None: from the speed that is measured
    prefill_share: float = 0.5  # of the time, that prompts may take while streams run
    max_kv_size: int | None = None  # tokens that a sequence keeps at most: the first few and the newest; None: all
    tail_step_tokens: int = 2048  # room for the reply is added in steps of this
    memory_bytes: int | None = None  # weights, KV and scratch; None: 75 % of the device's memory
    wired_bytes: int = 0  # that macOS must not page out; 0: it decides
    slice_s: float = 0.005  # of work on stored KV between two decode steps


@dataclass(frozen=True)
class Disk:
    """Where KV goes that memory has no room for, and how much of it."""

    directory: Path
    limit_bytes: int
    reserve_bytes: int  # of the volume, that are left to others
    queue_bytes: int  # on their way to the disk
    daily_write_bytes: int = 0  # 0: no limit
    second_touch: bool = False  # write only what was asked for twice
    wait_s: float = 5.0  # most that a request waits for what has to go to get there; 0: it does not
    # Read and not yet used, at most: a second of a fast disk, and several blocks of any model that fits such a machine.
    # A small budget for KV lowers it.
    read_ahead_bytes: int = 256 << 20
    flush_s: float = 30.0  # for what is not written yet when the server ends
    files: Files | None = None  # how files are read and written; None: as the system does


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
