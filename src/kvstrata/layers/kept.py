"""Lists of caches that a model is called with, and that say for which of its tokens the output layer runs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


class KeptCaches(list[Any]):
    """A cache for each layer."""

    def keep(self, hidden: mx.array) -> mx.array:
        """Of [rows, tokens, dim]."""
        raise NotImplementedError


class PromptCaches(KeptCaches):
    """Of a chunk of a prompt: no logits are read."""

    def keep(self, hidden: mx.array) -> mx.array:
        return hidden[:, :0]
