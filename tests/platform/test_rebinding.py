"""Names that models of mlx-lm have imported, bound to functions of ours."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvstrata.platform.rebinding import rebind

PATHS = {
    "home": "mlx_lm.models.home",
    "caller": "mlx_lm.models.caller",
    "other": "mlx_lm.models.other",
    "elsewhere": "mlx_lm.elsewhere",
}


def acted() -> str:
    return "stock"


def ours() -> str:
    return "ours"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """One defines a function, one has imported it, one has another of the same name, and one is no model's."""
    monkeypatch.setattr(acted, "__module__", PATHS["home"])
    made = {name: ModuleType(path) for name, path in PATHS.items()}
    for name, module in made.items():
        vars(module)["acted"] = (lambda: "other") if name == "other" else acted
        monkeypatch.setitem(sys.modules, PATHS[name], module)
    return made


def test_only_those_that_have_imported_it_call_ours(modules: dict[str, ModuleType]) -> None:
    for _ in range(2):
        assert rebind(acted, ours) == 1
        said = {name: vars(module)["acted"]() for name, module in modules.items()}
        assert said == {"home": "stock", "caller": "ours", "other": "other", "elsewhere": "stock"}
