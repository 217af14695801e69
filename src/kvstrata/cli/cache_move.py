"""`kvstrata cache export` and `import`: a session of a running server as one file, and back.

Uses HTTP and files; only the server interprets an exported file. A prompt cache of mlx-lm is sent in a bundle together
with its prompt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from kvstrata.cli.remote import DEFAULT_URL, AdminKey, AsJson, Key, Remote, Url, connect
from kvstrata.errors import KvstrataError

PIECE_BYTES = 1 << 20
FILE_MODE = 0o600

ReadFile = Annotated[Path, typer.Argument(help="The file.", exists=True, dir_okay=False)]
Existing = {"exists": True, "dir_okay": False, "metavar": "file", "show_default": "none"}


def export(
    session: Annotated[str, typer.Argument(help="Its id, as GET /cache/sessions lists it.")],
    file: Annotated[Path, typer.Argument(help="Where to write it.", dir_okay=False)],
    mlx: Annotated[bool, typer.Option("--mlx", help="As a prompt cache that mlx-lm loads.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    url: Url = DEFAULT_URL,
    api_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Write a session to one file, which another server with the same model takes."""
    if file.exists() and not force:
        raise KvstrataError(f"{file} is there already. Give another name, or --force.")
    path = f"/cache/sessions/{quote(session, safe='')}/export{'?format=mlx' if mlx else ''}"
    with connect(url, api_key) as remote:
        # Write and rename, so that a broken connection leaves no partial file under the name.
        unfinished = file.with_name(f"{file.name}.part")
        try:
            headers, size_bytes = _download(remote, path, unfinished)
            os.replace(unfinished, file)
        finally:
            unfinished.unlink(missing_ok=True)
    tokens = int(headers.get("x-kvstrata-tokens", 0))
    _show({"session": session, "file": str(file), "tokens": tokens, "bytes": size_bytes}, as_json)


def import_(
    file: ReadFile,
    salt: Annotated[
        str | None, typer.Option("--salt", help="The cache_salt to file it under.", metavar="text", show_default="none")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Of an mlx-lm cache: the text of its one user message.", **Existing)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="That text is a plain prompt, no message.")] = False,
    messages: Annotated[
        Path | None, typer.Option(help="Of an mlx-lm cache: its messages, as JSON.", **Existing)
    ] = None,
    tokens: Annotated[Path | None, typer.Option(help="Of an mlx-lm cache: its token ids, as JSON.", **Existing)] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Take in a file that was exported, or a prompt cache of mlx-lm together with its prompt."""
    prompt = _prompt(prompt_file, messages, tokens, raw=raw)
    path = f"/cache/import{'?' + urlencode({'cache_salt': salt}) if salt else ''}"
    with connect(url, api_key) as remote:
        _show({"file": str(file), **remote.send(path, _content(file, prompt))}, as_json)


def _prompt(text: Path | None, messages: Path | None, tokens: Path | None, *, raw: bool) -> dict[str, Any]:
    if sum(each is not None for each in (text, messages, tokens)) > 1:
        raise KvstrataError("Give one of --prompt-file, --messages and --tokens.")
    try:
        if text is not None:
            return {"text": text.read_text(), "raw": raw}
        if messages is not None:
            return {"messages": json.loads(messages.read_bytes())}
        if tokens is not None:
            return {"tokens": json.loads(tokens.read_bytes())}
    except (OSError, ValueError) as error:
        raise KvstrataError(f"The prompt cannot be read: {error}") from None
    return {}


def _content(file: Path, prompt: dict[str, Any]) -> Iterator[bytes]:
    """Yield the file as it is, or, if there is a prompt, a bundle of both."""
    if not prompt:
        yield from _read(file)
        return
    from kvstrata.tiers.bundle import BundleHeader, BundleWriter

    writer = BundleWriter(BundleHeader("prompt_cache", prompt=prompt))
    pieces = (memoryview(piece) for piece in _read(file))
    for each in (writer.begin(), writer.record(pieces, file.stat().st_size), writer.end()):
        yield from map(bytes, each)


def _read(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while piece := opened.read(PIECE_BYTES):
            yield piece


def _download(remote: Remote, path: str, file: Path) -> tuple[dict[str, str], int]:
    size_bytes = 0
    with remote.receive(path) as (headers, pieces), _create(file) as opened:
        for piece in pieces:
            opened.write(piece)
            size_bytes += len(piece)
    return headers, size_bytes


def _create(file: Path) -> Any:
    """Create a file that only its owner can read, because it holds a conversation."""
    try:
        return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE), "wb")
    except OSError as error:
        raise KvstrataError(f"{file} cannot be written: {error.strerror}") from None


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(answer))
        return
    from kvstrata.sizes import format_bytes

    words: Iterable[str] = (
        f"{answer['file']}: {answer['tokens']} tokens, {format_bytes(answer['bytes'])}",
        f"session {answer['session']}",
        *([_news(answer["new_tokens"])] if "new_tokens" in answer else []),
    )
    typer.echo("; ".join(words))


def _news(num_tokens: int) -> str:
    return f"{num_tokens} tokens are new here" if num_tokens else "all of it was here already"
