"""How many bytes of KV the engine may hold, and what a sequence takes of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.errors import ConfigError, NeverFits
from kvstrata.layers.kinds import Layout

DEFAULT_SHARE = 0.75
# Kept free for activations and attention's scratch.
SCRATCH_SHARE = 0.1
MIB = 1 << 20


@dataclass(frozen=True)
class Budget:
    total_bytes: int  # for KV
    fixed_bytes: int  # of each sequence: rings and recurrent state
    token_bytes: int

    def bytes_for(self, num_tokens: int) -> int:
        return self.fixed_bytes + num_tokens * self.token_bytes

    def most_tokens(self) -> int | None:
        """How long a sequence can get if it is alone. None: as long as it likes (it does not grow)."""
        return (self.total_bytes - self.fixed_bytes) // self.token_bytes if self.token_bytes else None

    def reply_tokens(self, prompt_tokens: int, wanted: int) -> int:
        """How much of the wanted reply memory allows if the sequence is alone."""
        most = self.most_tokens()
        if most is None:
            return wanted
        if prompt_tokens > most:
            raise NeverFits(
                f"The prompt's {prompt_tokens} tokens need {self.bytes_for(prompt_tokens) // MIB} MiB of KV cache, and "
                f"the whole budget is {self.total_bytes // MIB} MiB. Raise --memory-limit, or send a shorter prompt."
            )
        return min(wanted, most - prompt_tokens + 1)


def make_budget(layout: Layout, *, memory_bytes: int, weight_bytes: int) -> Budget:
    total = int((memory_bytes - weight_bytes) * (1 - SCRATCH_SHARE))
    budget = Budget(total, layout.fixed_bytes, layout.token_bytes)
    if total < budget.bytes_for(1):
        raise ConfigError(
            f"A memory limit of {memory_bytes // MIB} MiB leaves no room for a KV cache beside the model's own "
            f"{weight_bytes // MIB} MiB. Raise --memory-limit, or serve a smaller model."
        )
    return budget
