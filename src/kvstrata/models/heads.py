"""The output layer runs for tokens that are drawn from, not for those of a prompt.

mlx-lm's models are an inner model that gives hidden states and an outer one that puts the output layer on top. The
inner one is made to hand on only the tokens that a `PassCaches` keeps. Where a model is built in another way, logits
are computed for all rows: slower by that, and as right.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from kvstrata.kv.mixed_pass import PassCaches


def trim_rows(model: Any) -> bool:
    """Call it once a model was loaded. False: this one has no inner model that is known."""
    while isinstance(getattr(model, "language_model", None), nn.Module):
        model = model.language_model
    inner = getattr(model, "model", None)
    if not isinstance(inner, nn.Module):
        return False
    inner.__class__ = _trimmed(type(inner))
    return True


@cache
def _trimmed(inner: type[Any]) -> type[Any]:
    if getattr(inner, "trims_rows", False):
        return inner

    def call(self: Any, *args: Any, **options: Any) -> Any:
        out = inner.__call__(self, *args, **options)
        passed = next((value for value in (*args, *options.values()) if isinstance(value, PassCaches)), None)
        return passed.keep(out) if passed is not None and isinstance(out, mx.array) else out

    # The name stays: messages, and models that look at it, see what they know.
    return type(inner.__name__, (inner,), {"__call__": call, "trims_rows": True})
