"""The tools that a request offers, as readers of calls ask for them. Knows OpenAI's form of tools."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any


class Words:
    """Some words. Says at once what none of them begins with, however many there are."""

    def __init__(self, words: Iterable[str]) -> None:
        self._sorted = sorted(set(words))
        self._all = frozenset(self._sorted)

    def __contains__(self, word: str) -> bool:
        return word in self._all

    def may_begin(self, start: str) -> bool:
        place = bisect_left(self._sorted, start)
        return place < len(self._sorted) and self._sorted[place].startswith(start)


class Offered:
    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self.tools = list(tools)
        self._functions = {
            function["name"]: function
            for tool in tools
            if isinstance(function := tool.get("function"), dict) and isinstance(function.get("name"), str)
        }
        self.names = Words(self._functions)

    def parameter(self, name: str, key: str) -> dict[str, Any] | None:
        """The schema of one parameter; None: the tool does not name it."""
        parameters = self._functions[name].get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        schema = properties.get(key) if isinstance(properties, dict) else None
        return schema if isinstance(schema, dict) else None
