"""Every `kvstrata` command and every benchmark that a page shows exists, with flags that it has."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kvstrata.cli import COMMANDS, load_command
from tests.docs.sources import ROOT
from tests.docs.test_links import pages

SHOWN = re.compile(r"\A\s*(?:\.venv/bin/)?(?:kvstrata |python -m (?=benchmarks\.[a-z]))([a-z].*)")
BENCHMARK = "benchmarks."
COMMENT = re.compile(r"\s+#.*")
FLAG = re.compile(r"--?[a-z][\w-]*")
PLACEHOLDER = re.compile(r"[A-Z.\[<…]")
NOT_A_COMMAND = "bundle"  # `kvstrata bundle` is how an exported file begins


def shown(path: Path) -> Iterator[str]:
    """What follows `kvstrata` where a piece of code begins with it: a line of a block, or words in backticks."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    in_fence = False
    for line in text.splitlines():
        in_fence ^= line.startswith("```")
        pieces = [line] if in_fence or line.startswith("    ") else re.findall(r"`([^`]+)`", line)
        for piece in pieces:
            found = SHOWN.match(piece)
            if found and found[1] != NOT_A_COMMAND:
                yield COMMENT.sub("", found[1]).strip()


@cache
def command(name: str) -> Any:
    return get_command(import_module(name).app) if name.startswith(BENCHMARK) else load_command(name)


def problem(text: str) -> str:
    """Empty: there is such a command."""
    try:
        words = shlex.split(text.split(" | ")[0].split(" && ")[0].split(" > ")[0])
    except ValueError:
        return ""  # a quotation that goes on in the next line
    name, rest = words[0].rstrip(",.;:"), words[1:]
    if name.startswith(BENCHMARK):
        if find_spec(name) is None:
            return f"there is no benchmark {name}"
    elif name not in COMMANDS:
        return f"there is no command {name}"
    found = command(name)
    while hasattr(found, "commands") and rest and not rest[0].startswith("-") and not PLACEHOLDER.match(rest[0]):
        if any(part not in found.commands for part in rest[0].rstrip(",").split("|")):
            return f"{name} has no command {rest[0]}"
        found, rest = found.commands[rest[0].rstrip(",").split("|")[0]], rest[1:]
    if hasattr(found, "commands"):
        return ""
    known = {flag for param in found.params for flag in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}
    own = rest[: rest.index("--")] if "--" in rest else rest
    flags = [word.partition("=")[0] for word in own if FLAG.match(word)]
    unknown = [flag for flag in flags if flag.rstrip(",.;:") not in known]
    return f"{name} has no {', '.join(unknown)}" if unknown else ""


@pytest.mark.parametrize("name", [name for name in pages() if name != "CHANGELOG.md"])
def test_commands_in_pages_exist(name: str) -> None:
    found = list(shown(ROOT / name))
    assert not {text: why for text in found if (why := problem(text))}


def test_wrong_commands_are_seen() -> None:
    assert problem("serve --no-such-flag") == "serve has no --no-such-flag"
    assert problem("fly --high") == "there is no command fly"
    assert problem("cache nothing") == "cache has no command nothing"
    assert problem("serve MODEL --port 9000 --kv-cache-bits 4") == ""
    assert problem("benchmarks.engine --no-such-flag") == "benchmarks.engine has no --no-such-flag"
    assert problem("benchmarks.nothing") == "there is no benchmark benchmarks.nothing"
    assert problem("launch codex -- exec --json") == ""
    assert sum(len(list(shown(ROOT / name))) for name in pages()) > 100
