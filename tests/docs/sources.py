"""What the code can say to people: every message of an error or a warning, read from the source and not from a run.

Knows Python's syntax and our names for errors and loggers. Does not know which page lists what.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kvstrata"
LEVELS = frozenset({"warning", "error", "exception", "critical"})
LOGGERS = frozenset({"log", "logger"})
GAP = "\0"  # stands for what is only known when it is said
SETTING = "PydanticCustomError"  # what is wrong with a setting
PUT_IN = re.compile(r"\{\w+\}")
LOGGED = re.compile(r"%[-+#0 ]*[\d.]*[a-z]")
SHORTEST = 12  # a shorter piece of a message tells nothing


@dataclass(frozen=True)
class Message:
    room: str  # the folder or module below src/kvstrata
    place: str  # file and line
    said_by: str  # the error's class, or the log's level
    text: str  # with GAP for what is put in

    @property
    def is_logged(self) -> bool:
        return self.said_by in LEVELS

    @property
    def longest_piece(self) -> str:
        """What can be looked for; empty where nothing of the message is known before it is said."""
        piece = max((" ".join(part.split()) for part in self.text.split(GAP)), key=len)
        return piece.strip(" .:'") if len(piece) >= SHORTEST else ""

    def shown(self) -> str:
        """For people."""
        return " ".join(self.text.replace(GAP, "…").split())


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


@cache
def error_classes() -> dict[str, str]:
    """Each error of ours with the class that it is a kind of."""
    parents = {"KvstrataError": "Exception"}
    classes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = True
    while found:
        new = {node.name: base for node in classes for base in map(_name, node.bases) if base in parents}
        found = not new.keys() <= parents.keys()
        parents |= new
    return parents


def is_a(name: str, kind: str) -> bool:
    parents = error_classes()
    while name in parents and name != kind:
        name = parents[name]
    return name == kind


@cache
def messages() -> tuple[Message, ...]:
    return tuple(each for path, tree in trees().items() for each in _in_file(path, tree))


def _in_file(path: Path, tree: ast.Module) -> Iterator[Message]:
    inside = path.relative_to(SOURCE)
    known = _Known(tree)
    calls = sorted((node for node in ast.walk(tree) if isinstance(node, ast.Call)), key=lambda node: node.lineno)
    for call in calls:
        name = _name(call.func)
        if name not in error_classes() and name != SETTING and not _is_logged(call):
            continue
        for text in known.texts(call.args[name == SETTING]) if call.args else [GAP]:
            said = LOGGED.sub(GAP, text) if _is_logged(call) else text
            said = PUT_IN.sub(GAP, text) if name == SETTING else said
            yield Message(inside.parts[0], f"{inside}:{call.lineno}", name, said)


class _Known:
    """What a file says of its own texts: constants, and functions that return one."""

    def __init__(self, tree: ast.Module) -> None:
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self._constants: dict[str, str] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                text = self.text(node.value)
                if text.strip(GAP):
                    self._constants[node.targets[0].id] = text

    def texts(self, node: ast.expr) -> list[str]:
        """One for each way that it can be said."""
        function = self._functions.get(_name(node.func)) if isinstance(node, ast.Call) else None
        if function is None:
            return [self.text(node)]
        returned = [each.value for each in ast.walk(function) if isinstance(each, ast.Return) and each.value]
        return [self.text(value) for value in returned]

    def text(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self.text, node.values))
        if isinstance(node, ast.FormattedValue):
            return self.text(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.text(node.left) + self.text(node.right)
        return self._constants.get(_name(node), GAP) if isinstance(node, ast.Name) else GAP


def _is_logged(call: ast.Call) -> bool:
    func = call.func
    return isinstance(func, ast.Attribute) and func.attr in LEVELS and _name(func.value) in LOGGERS


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
