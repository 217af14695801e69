"""How much the engine may take on at once. Plain values; where they come from is config's business."""

from __future__ import annotations

from dataclasses import dataclass


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
class Storage:
    """What becomes of KV that was computed."""

    k: str = "raw"  # precision of stored keys, as in codecs/registry.py
    v: str = "raw"
    edge_layers: int = 0  # so many first and last attention layers
    edge: str = "planes:8"  # are stored like this instead
    min_quantize_tokens: int = 256  # shorter sequences stay raw
    live: bool = False  # running sequences are encoded too,
    first_raw_tokens: int = 4  # but for their first
    recent_raw_tokens: int = 128  # and newest tokens
    dynamic: bool = False  # precision steps down as memory fills up,
    floor_k_bits: int = 4  # not below this
    floor_v_bits: int = 4
    dynamic_at: tuple[tuple[int, str], ...] = ()  # (tokens, precision): longer sequences step down, whatever the memory
    hot_bytes: int | None = None  # most that stored KV takes in memory; None: what running sequences leave
    put_away: bool = True  # to the disk, what stepping down takes away
    write_through: bool = False  # to the disk at once, not when memory runs short
    ttl_s: float | None = None  # what no request used for so long goes; None: it stays while there is room
    max_marks: int = 8  # resume points that a stored conversation keeps, in models that need them
    mark_every_tokens: int = 4096  # of a long prompt, in such models


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
