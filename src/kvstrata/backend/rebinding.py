"""Functions of mlx-lm that its models have imported by name, bound to ours in their place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def rebind(stock: Callable[..., Any], ours: Callable[..., Any]) -> int:
    """In every loaded module of a model but the one that defines it; call it after a model was loaded. Tells how many
    call ours now. Functions of other models that only have the same name stay."""
    callers = [
        module
        for path, module in sys.modules.items()
        if path.startswith("mlx_lm.models.")
        and path != stock.__module__
        and getattr(module, stock.__name__, None) in (stock, ours)
    ]
    for module in callers:
        setattr(module, stock.__name__, ours)
    return len(callers)
