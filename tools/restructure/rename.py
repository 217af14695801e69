"""Rename classes, functions, methods and attributes by a table, everywhere in src/ and tests/.

    python tools/restructure/rename.py TABLE.toml [--dry]

The table maps `"package.module:Class.member" = "new_name"` (`kvstrata.` is left out, `tests.` is not). References come
from the type checker's language server, so a method is renamed where its class is meant, and nowhere else; all are
looked up before the first is changed. Unresolved rows are listed at the end and change nothing.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from urllib.parse import unquote, urlparse

ROOT = Path.cwd()


class Server:
    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self._next = 0
        self.call(
            "initialize",
            {
                "processId": None,
                "rootUri": ROOT.as_uri(),
                "workspaceFolders": [{"uri": ROOT.as_uri(), "name": "root"}],
                "capabilities": {"workspace": {"configuration": True, "workspaceFolders": True}},
            },
        )
        self.notify("initialized", {})

    def _send(self, message: dict) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._process.stdin.flush()

    def notify(self, method: str, params: dict) -> None:
        self._send({"method": method, "params": params})

    def _receive(self) -> dict:
        assert self._process.stdout is not None
        length = 0
        while line := self._process.stdout.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return json.loads(self._process.stdout.read(length))

    def call(self, method: str, params: dict):
        self._next += 1
        mine = self._next
        self._send({"id": mine, "method": method, "params": params})
        while True:
            message = self._receive()
            if message.get("id") == mine and "method" not in message:
                if "error" in message:
                    raise RuntimeError(message["error"])
                return message.get("result")
            self._answer(message)

    def wait_for(self, text: str) -> None:
        """Until the server logs this text."""
        while True:
            message = self._receive()
            if message.get("method") == "window/logMessage" and text in message["params"]["message"]:
                return
            self._answer(message)

    def _answer(self, message: dict) -> None:
        """Answer a request of the server's own."""
        if "method" in message and "id" in message:
            items = message.get("params", {}).get("items", [])
            settings = {"basedpyright.analysis": {"diagnosticMode": "workspace"}}
            result: object = None
            if message["method"] == "workspace/configuration":
                result = [settings.get(item.get("section", ""), {}) for item in items]
            self._send({"id": message["id"], "result": result})

    def close(self) -> None:
        self._process.kill()


def position_of(module: str, dotted: str) -> tuple[Path, int, int]:
    """Return where a definition's name stands: file, line and column, from 0."""
    parts = module.split(".")
    base = ROOT / "tests" if parts[0] == "tests" else ROOT / "src" / "kvstrata"
    rest = parts[1:] if parts[0] == "tests" else parts
    path = base.joinpath(*rest).with_suffix(".py")
    if not path.exists():
        path = base.joinpath(*rest) / "__init__.py"
    text = path.read_text()
    scope: list[ast.stmt] = ast.parse(text).body
    lines = text.splitlines()
    *owners, name = dotted.split(".")
    for owner in owners:
        found = next(n for n in scope if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == owner)
        scope = found.body
    for node in scope:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return path, node.lineno - 1, lines[node.lineno - 1].index(name, node.col_offset)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and target.id == name:
                return path, target.lineno - 1, target.col_offset
    for node in scope:  # an attribute that a method sets
        for child in ast.walk(node):
            is_own = isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == "self"
            if is_own and child.attr == name and isinstance(child.ctx, ast.Store):
                return path, child.end_lineno - 1, child.end_col_offset - len(name)
    raise LookupError(dotted)


def main() -> None:
    table = tomllib.loads(Path(sys.argv[1]).read_text())
    rows = {key: new for group in table.values() for key, new in group.items()}
    server = Server([".venv/bin/basedpyright-langserver", "--stdio"])
    server.wait_for("source files")
    edits: dict[Path, dict[tuple[int, int], tuple[int, str]]] = defaultdict(dict)
    unresolved: list[str] = []
    opened: set[Path] = set()
    for key, new in rows.items():
        module, dotted = key.split(":")
        old = dotted.rsplit(".", 1)[-1]
        try:
            path, line, column = position_of(module, dotted)
        except (LookupError, StopIteration, OSError) as error:
            unresolved.append(f"{key}: {error!r}")
            continue
        if path not in opened:
            opened.add(path)
            document = {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": path.read_text()}
            server.notify("textDocument/didOpen", {"textDocument": document})
        where = {
            "textDocument": {"uri": path.as_uri()},
            "position": {"line": line, "character": column},
            "context": {"includeDeclaration": True},
        }
        found = server.call("textDocument/references", where) or []
        num = 0
        for each in found:
            file = Path(unquote(urlparse(each["uri"]).path))
            start, end = each["range"]["start"], each["range"]["end"]
            if ROOT not in file.parents or start["line"] != end["line"]:
                continue
            text = file.read_text().splitlines()[start["line"]][start["character"] : end["character"]]
            if text != old:
                continue
            edits[file][start["line"], start["character"]] = (end["character"], new)
            num += 1
        print(f"{key} -> {new}: {num}", flush=True)
        if not num:
            unresolved.append(f"{key}: no reference")
    server.close()
    if "--dry" not in sys.argv:
        for file, changes in edits.items():
            lines = file.read_text().splitlines(keepends=True)
            for (line, start), (end, new) in sorted(changes.items(), reverse=True):
                lines[line] = lines[line][:start] + new + lines[line][end:]
            file.write_text("".join(lines))
    print("\n".join(["unresolved:", *unresolved]) if unresolved else "all resolved")


main()
