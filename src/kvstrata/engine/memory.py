"""How many bytes of KV the engine may hold, and what a sequence takes of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.errors import ConfigError, NeverFits
from kvstrata.layers.buffers import round_up
from kvstrata.layers.kinds import Layout
from kvstrata.layers.sequence import SequenceCache

DEFAULT_SHARE = 0.75
# Kept free beside what passes were seen to take: for spans that are rewritten, and for the allocator's rounding.
SPARE_SHARE = 0.1
MIB = 1 << 20


@dataclass(frozen=True)
class Budget:
    total_bytes: int  # for KV
    fixed_bytes: int  # of each sequence: rings and recurrent state
    token_bytes: int

    def bytes_for(self, num_tokens: int) -> int:
        return self.fixed_bytes + num_tokens * self.token_bytes

    def held_by(self, cache: SequenceCache) -> int:
        """What is reserved for a sequence's own tokens."""
        return self.bytes_for(cache.raw_capacity) + cache.sealed_bytes

    def most_tokens(self) -> int:
        """How long a sequence that grows can get if it is alone. Its last buffer may be larger than what it needs."""
        return (self.total_bytes - self.fixed_bytes) // self.token_bytes - (round_up(1) - 1)

    def reply_tokens(self, prompt_tokens: int, wanted: int, *, may_be_less: bool = False) -> int:
        """How much of the wanted reply memory allows if the sequence is alone."""
        # The last token of a reply is never fed, so it needs no room.
        most = self.most_tokens() - prompt_tokens + 1 if self.token_bytes else wanted
        if most >= wanted:
            return wanted
        if most >= 1 and may_be_less:
            return most
        needed = prompt_tokens + wanted - 1
        raise NeverFits(
            f"{prompt_tokens} tokens of prompt and {wanted} of reply need {self.bytes_for(needed) // MIB} MiB of KV "
            f"cache, and the budget is {self.total_bytes // MIB} MiB, {self.most_tokens()} tokens. Raise "
            "--memory-limit, shorten the prompt, or lower max_tokens."
        )


def no_room_beside_pins(need_bytes: int, free_bytes: int, total_bytes: int) -> str:
    return (
        f"This request needs {need_bytes / MIB:.1f} MiB of KV cache. Of {total_bytes / MIB:.1f} MiB there are "
        f"{free_bytes / MIB:.1f} for it, the rest is pinned. Unpin some (POST /cache/unpin), raise --memory-limit, or "
        "shorten the request."
    )


@dataclass(frozen=True)
class Scratch:
    """What a forward pass takes beside KV, at most."""

    base_bytes: int = 0
    context_token_bytes: int = 0  # for each token that a chunk attends to

    def memory_for(self, kv_bytes: int, layout: Layout, context_tokens: int) -> int:
        """Beside the weights, so that there are so many bytes for KV. The reverse of `kv_bytes`."""
        longest = min(context_tokens, kv_bytes // max(1, layout.token_bytes))
        return int((kv_bytes + self.base_bytes + self.context_token_bytes * longest) / (1 - SPARE_SHARE)) + 1

    def kv_bytes(self, free_bytes: int, layout: Layout, context_tokens: int) -> int:
        """What is left for KV: one sequence may have all of it, or be as long as the model allows."""
        free_bytes = int(free_bytes * (1 - SPARE_SHARE)) - self.base_bytes
        by_token = self.context_token_bytes / max(1, layout.token_bytes)
        return max(int(free_bytes / (1 + by_token)), free_bytes - self.context_token_bytes * context_tokens)


def make_budget(
    layout: Layout,
    *,
    memory_bytes: int,
    weight_bytes: int,
    scratch: Scratch | None = None,
    context_tokens: int = 0,
) -> Budget:
    scratch = scratch or Scratch()
    total = scratch.kv_bytes(memory_bytes - weight_bytes, layout, context_tokens)
    budget = Budget(total, layout.fixed_bytes, layout.token_bytes)
    if total < budget.bytes_for(1):
        raise ConfigError(
            f"A memory limit of {memory_bytes // MIB} MiB leaves no room for a KV cache beside the model's own "
            f"{weight_bytes // MIB} MiB and the {scratch.base_bytes // MIB} MiB that a step takes. Raise "
            "--memory-limit, or serve a smaller model."
        )
    return budget
