"""Functions of mlx-lm that its models have imported by name, bound to ours in their place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def rebind(stock: Callable[..., Any], ours: Callable[..., Any]) -> int:
    """Bind `ours` in every loaded model module that has imported `stock`, and return the number of these modules.

    Call it after a model was loaded. Functions of other models that only share the name stay.
    """
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
