"""What the disk does not have when the server ends, and why: one line for the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstrata.store.losses import Reason

WORDS: Mapping[Reason, str] = {
    "disk_slow": "the time was up",
    "disk_failed": "the disk could not be written",
    "disk_full": "the disk has no room for it",
    "write_budget": "no more is written today",
}
MIB = 1 << 20


@dataclass(frozen=True)
class Unwritten:
    conversations: int = 0
    tokens: int = 0
    nbytes: int = 0
    by_reason: Mapping[Reason, int] = field(default_factory=dict)  # tokens
    bytes_per_s: float = 0.0  # as the rest was written; 0: nothing was
    seconds: float = 0.0  # that it had

    def __str__(self) -> str:
        why = ", ".join(f"{WORDS.get(reason, reason)} ({tokens} tokens)" for reason, tokens in self.by_reason.items())
        if self.bytes_per_s:
            more_s = self.nbytes / self.bytes_per_s
            took = f"At the {self.bytes_per_s / MIB:.1f} MiB/s of the rest it would have taken {more_s:.1f} s more."
        else:
            took = "Nothing was written in that time, so how long it would have taken is not known."
        return (
            f"{self.tokens} tokens of {self.conversations} conversations ({self.nbytes / MIB:.1f} MiB) were not "
            f"written to the disk cache within {self.seconds:.1f} s: {why}. {took} --drain-timeout-s sets the time."
        )
