"""How many bytes of KV the engine may hold, and what a sequence takes of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvstrata.backend import MlxBackend
from kvstrata.engine.rungs import RAW, Plans, Rung
from kvstrata.errors import ConfigError, NeverFits
from kvstrata.layers.buffers import round_up
from kvstrata.layers.kinds import Layout
from kvstrata.layers.sequence import SequenceCache
from kvstrata.spans.plan import Plan

DEFAULT_SHARE = 0.75
# Kept free beside what passes were seen to take: for what the disk sends ahead, and for the allocator's rounding.
SPARE_SHARE = 0.1
# MLX keeps freed buffers for the next allocation of that size; more than this goes back to the system. One part in so
# many of what the weights leave: buffers of passes, which would otherwise come back as pages to be cleared. On CUDA the
# arrays of many operations are alive at once, and one pass that has to ask the driver for them takes 60 ms longer.
ALLOCATOR_CACHE_SHARE = 16
MAX_ALLOCATOR_CACHE_BYTES = 512 << 20
MAX_ALLOCATOR_CACHE_BYTES_CUDA = 4096 << 20
MIB = 1 << 20


@dataclass(frozen=True)
class Budget:
    total_bytes: int  # for KV
    fixed_bytes: int  # of each sequence: rings and recurrent state
    token_bytes: int

    rungs: tuple[Rung, ...] = (RAW,)  # how a running sequence may be held, the most exact first
    live_rungs: Mapping[int, Rung] = field(default_factory=dict)  # what other settings would allow, by bits

    def bytes_for(self, num_tokens: int, rung: Rung = RAW) -> int:
        raw = num_tokens if rung.raw_tokens is None else round_up(min(num_tokens, rung.raw_tokens))
        return self.fixed_bytes + raw * self.token_bytes + math.ceil(max(0, num_tokens - raw) * rung.token_bytes)

    def tokens_in(self, nbytes: int, rung: Rung = RAW) -> int:
        """How many a sequence can have in so many bytes beside its fixed ones; tokens that take none apart."""
        raw = nbytes // self.token_bytes
        if rung.raw_tokens is None:
            return raw
        if raw <= rung.raw_tokens:
            return round_up(raw + 1) - round_up(1)
        return rung.raw_tokens + int((nbytes - rung.raw_tokens * self.token_bytes) / rung.token_bytes)

    def growth_bytes(self, num_tokens: int, held_tokens: int, rung: Rung) -> int:
        """Of a sequence that has room for `held_tokens`."""
        return self.bytes_for(held_tokens + num_tokens, rung) - self.bytes_for(held_tokens, rung)

    def tail_tokens(self, num_tokens: int, held_tokens: int, rung: Rung, room_bytes: int | None) -> int:
        """How much room to give to a sequence that has some already and wants so much more. One that is alone takes
        what there is, `room_bytes`: no other will leave it more."""
        size = round_up(num_tokens) if rung.raw_tokens is None else num_tokens
        if room_bytes is None or not self.token_bytes or self.growth_bytes(size, held_tokens, rung) <= room_bytes:
            return size
        held_bytes = self.bytes_for(held_tokens, rung) - self.fixed_bytes
        return min(num_tokens, self.tokens_in(held_bytes + room_bytes, rung) - held_tokens)

    def held_by(self, cache: SequenceCache, rung: Rung = RAW) -> int:
        """What is reserved for a sequence's own tokens."""
        to_come = math.ceil(cache.unallocated_tokens * rung.token_bytes)
        return self.bytes_for(cache.raw_capacity) + to_come + cache.sealed_bytes

    def most_tokens(self, rung: Rung = RAW) -> int:
        """How long a sequence that grows can get if it is alone. Its last buffer may be larger than what it needs."""
        return self.tokens_in(self.total_bytes - self.fixed_bytes, rung) - (round_up(1) - 1)

    def rung_for(self, num_tokens: int) -> Rung | None:
        """The most exact way to hold a sequence that may get so long, if it is alone; None: it never fits."""
        allowed = (rung for rung in self.rungs if num_tokens >= rung.from_tokens)
        return next((rung for rung in allowed if not self.token_bytes or num_tokens <= self.most_tokens(rung)), None)

    def reply_tokens(self, prompt_tokens: int, wanted: int, *, may_be_less: bool = False) -> int:
        """How much of the wanted reply memory allows if the sequence is alone."""
        needed = prompt_tokens + wanted - 1  # the last token of a reply is never fed, so it needs no room
        if self.rung_for(needed) is not None:
            return wanted
        most = max((tokens for rung in self.rungs if (tokens := self.most_tokens(rung)) >= rung.from_tokens), default=0)
        if may_be_less and most >= prompt_tokens:
            return min(wanted, most - prompt_tokens + 1)
        raise NeverFits(
            f"{prompt_tokens} tokens of prompt and {wanted} of reply need "
            f"{self.bytes_for(needed, self.rungs[-1]) // MIB} MiB of KV cache, and the budget is "
            f"{self.total_bytes // MIB} MiB, {most} tokens. Raise --memory-limit, shorten the prompt, lower max_tokens"
            f"{self._lower_precision(needed)}."
        )

    def _lower_precision(self, num_tokens: int) -> str:
        """The setting that would let so many tokens in, as the end of a sentence."""
        fitting = [bits for bits, rung in self.live_rungs.items() if num_tokens <= self.most_tokens(rung)]
        if not fitting:
            return ""
        bits = max(fitting)
        most = self.most_tokens(self.live_rungs[bits])
        return f", or start the server with --kv-cache-live --kv-cache-bits {bits}, which holds {most} tokens"


def with_rungs(budget: Budget, plans: Plans, target: Plan) -> Budget:
    """Return the budget with the KV formats that follow from the precision of new spans."""
    rungs, live = plans.rungs(target)
    return replace(budget, rungs=rungs, live_rungs=live)


def no_room_beside_pins(need_bytes: int, free_bytes: int, total_bytes: int) -> str:
    return (
        f"This request needs {need_bytes / MIB:.1f} MiB of KV cache. Of {total_bytes / MIB:.1f} MiB there are "
        f"{free_bytes / MIB:.1f} for it, the rest is pinned. Unpin some (POST /cache/unpin), raise --memory-limit, or "
        "shorten the request."
    )


@dataclass(frozen=True)
class Line:
    """Bytes that some work takes beside KV, over the tokens that it reads."""

    base_bytes: int
    token_bytes: float = 0.0
    of_all_rows: bool = False  # it reads all KV there is; otherwise one sequence's, which the context bounds

    def bytes_for(self, kv_bytes: int, token_bytes: float, context_tokens: int) -> int:
        tokens = kv_bytes / max(1, token_bytes)
        return self.base_bytes + int(self.token_bytes * (tokens if self.of_all_rows else min(tokens, context_tokens)))

    def kv_bytes(self, free_bytes: int, token_bytes: float, context_tokens: int) -> int:
        """What is left for KV: one sequence may have all of it, or be as long as the model allows."""
        free_bytes -= self.base_bytes
        left = int(free_bytes / (1 + self.token_bytes / max(1, token_bytes)))
        return left if self.of_all_rows else max(left, free_bytes - int(self.token_bytes * context_tokens))


@dataclass(frozen=True)
class Scratch:
    """What forward passes and work on stored KV take beside KV: never two of them at once."""

    lines: tuple[Line, ...] = ()

    def bytes_for(self, kv_bytes: int, token_bytes: float, context_tokens: int) -> int:
        return max((line.bytes_for(kv_bytes, token_bytes, context_tokens) for line in self.lines), default=0)

    def kv_bytes(self, free_bytes: int, token_bytes: float, context_tokens: int) -> int:
        """The most KV that leaves room for the scratch that goes with it."""
        return min((line.kv_bytes(free_bytes, token_bytes, context_tokens) for line in self.lines), default=free_bytes)


@dataclass(frozen=True)
class MemoryShares:
    """What a memory limit consists of."""

    limit_bytes: int
    weight_bytes: int
    allocator_cache_bytes: int  # freed, and kept by MLX for the next array of that size
    scratch_bytes: int  # of passes and of work on stored KV, at most
    spare_bytes: int
    kv_bytes: int

    @property
    def run_ahead_bytes(self) -> int:
        """While less than this is alive MLX may start operations before others have ended: their arrays are then alive
        at once. Past it one operation at a time is what the scratch was measured for."""
        return self.limit_bytes - self.allocator_cache_bytes - self.scratch_bytes


def share_memory(
    limit_bytes: int,
    weight_bytes: int,
    scratch: Scratch,
    *,
    token_bytes: float,
    context_tokens: int,
    backend: MlxBackend,
) -> MemoryShares:
    """`token_bytes`: the least that a token of KV takes: the more tokens there are, the more is read."""
    free_bytes = limit_bytes - weight_bytes
    cache_bytes = max(0, min(_most_cached(backend), free_bytes // ALLOCATOR_CACHE_SHARE))
    spare_bytes = max(0, int(free_bytes * SPARE_SHARE))
    kv_bytes = scratch.kv_bytes(free_bytes - cache_bytes - spare_bytes, token_bytes, context_tokens)
    scratch_bytes = scratch.bytes_for(max(0, kv_bytes), token_bytes, context_tokens)
    return MemoryShares(limit_bytes, weight_bytes, cache_bytes, scratch_bytes, spare_bytes, kv_bytes)


def _most_cached(backend: MlxBackend) -> int:
    return MAX_ALLOCATOR_CACHE_BYTES_CUDA if backend == "cuda" else MAX_ALLOCATOR_CACHE_BYTES


def limit_for(
    kv_bytes: int,
    weight_bytes: int,
    scratch: Scratch,
    *,
    token_bytes: float,
    context_tokens: int,
    backend: MlxBackend,
) -> int:
    """The limit that leaves so many bytes for KV. The reverse of `share_memory`."""
    used_bytes = kv_bytes + scratch.bytes_for(kv_bytes, token_bytes, context_tokens)
    shared = used_bytes / (1 - SPARE_SHARE - 1 / ALLOCATOR_CACHE_SHARE)
    capped = (used_bytes + _most_cached(backend)) / (1 - SPARE_SHARE)
    return weight_bytes + int(min(shared, capped)) + ALLOCATOR_CACHE_SHARE


def make_budget(layout: Layout, shares: MemoryShares) -> Budget:
    budget = Budget(shares.kv_bytes, layout.fixed_bytes, layout.token_bytes)
    if shares.kv_bytes < budget.bytes_for(1):
        raise ConfigError(
            f"A memory limit of {shares.limit_bytes // MIB} MiB leaves no room for a KV cache beside the model's own "
            f"{shares.weight_bytes // MIB} MiB and the {shares.scratch_bytes // MIB} MiB that a step takes. Raise "
            "--memory-limit, or serve a smaller model."
        )
    return budget
