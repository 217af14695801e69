"""Structure of the packages: names, docstrings, and the writers of `Entry`."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

from kvstrata.prefix_cache.entries import Entry

SOURCES = Path(__file__).parent.parent / "src" / "kvstrata"
PACKAGES = ("engine", "prefix_cache")
# Packages whose class names are unique in kvstrata, and whose docstrings follow the rules.
CORE = (
    *PACKAGES, "attention", "bench", "cli", "codecs", "config", "events", "fleet", "grammar", "kv", "models", "packed",
    "platform", "server", "text", "tiers",
)  # fmt: skip
OPENINGS = {"What", "Who", "Whose", "Which", "Where", "Of", "One", "Those", "That", "Its", "So"}

# Instances of other classes that have attributes of the same name: loads, prefix states, the policy.
OTHER_OWNERS = {"self", "load", "state", "self._precision"}


# Modules that ask for the back-end of the process; `codecs/backends.py` itself is not counted. Add none: an operation
# with several paths is a function of a dispatch module.
BACKEND_CALLERS = {
    "attention.cpu.step",
    "attention.cuda.step",
    "attention.cuda.trials",
    "attention.dispatch",
    "cli.selftest",
    "codecs.dispatch",
    "engine.engine",
    "engine.executor",
    "engine.profiling",
    "kv.decode_step",
    "kv.work_sizes",
    "packed.operations",
}


@cache
def _trees(packages: tuple[str, ...] = PACKAGES) -> dict[str, ast.Module]:
    """Return the syntax trees of all modules of packages, by dotted name."""
    return {
        ".".join(path.relative_to(SOURCES).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
        for package in packages
        for path in sorted((SOURCES / package).rglob("*.py"))
    }


def _assigned(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Yield all attributes that a module assigns or deletes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node


def _class_names(packages: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of all classes of packages, in any scope."""
    for tree in _trees(packages).values():
        yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _has_forbidden_opening(node: ast.AST) -> bool:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    words = (ast.get_docstring(node) or "").split()
    return bool(words) and words[0].strip(".,:;'`") in OPENINGS


def test_class_names_of_the_core_are_unique_in_kvstrata() -> None:
    names = Counter(_class_names(("",)))
    assert {name for name in _class_names(CORE) if names[name] > 1} == set()


def test_only_the_entry_table_assigns_attributes_of_entries() -> None:
    attributes = {field.name for field in fields(Entry)}
    assigned = [
        f"{module}: {ast.unparse(node)}"
        for module, tree in _trees().items()
        for node in _assigned(tree)
        if module != "prefix_cache.entry_table"
        and node.attr in attributes
        and ast.unparse(node.value) not in OTHER_OWNERS
    ]
    assert assigned == []


def test_docstrings_begin_with_a_noun_or_an_imperative() -> None:
    modules = {module for module, tree in _trees(CORE).items() if any(map(_has_forbidden_opening, ast.walk(tree)))}
    assert modules == set()


def _asks_for_backend(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node).endswith("runtime().backend")


def test_backend_is_asked_for_by_few_modules() -> None:
    packages = tuple(path.name for path in SOURCES.iterdir() if path.is_dir())
    callers = {module for module, tree in _trees(packages).items() if any(map(_asks_for_backend, ast.walk(tree)))}
    assert callers - {"codecs.backends"} == BACKEND_CALLERS
