"""`kvstrata cache`: show and change the cache of a running server, export and import its sessions.

Uses HTTP and files: every command is one call whose response is shown as a table or, with --json, as it is. Only the
server interprets an exported file; a prompt cache of mlx-lm is sent in a bundle together with its prompt. The commands
that need no server are those of `cache_folder.py`. To add a command, write a function and decorate it with
`@app.command`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from kvstrata.cli import cache_folder
from kvstrata.cli import cache_tables as tables
from kvstrata.cli.http_client import DEFAULT_URL, AdminKey, AsJson, Key, RemoteServer, Url, connect
from kvstrata.errors import KvstrataError
from kvstrata.printable import printable_values

PIECE_BYTES = 1 << 20
FILE_MODE = 0o600

app = typer.Typer(
    name="cache",
    help="Show and change the cache of a running server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Text = Annotated[str | None, typer.Argument(help="The prompt; - reads it from stdin.", show_default="none")]
AsChat = Annotated[bool, typer.Option("--chat", help="The text is a user's message, not a plain prompt.")]
RequestFile = Annotated[
    Path | None,
    typer.Option(
        "--request",
        help="A JSON file with the body of a request (messages, tools or prompt, cache_salt).",
        exists=True,
        dir_okay=False,
        metavar="file",
        show_default="none",
    ),
]
SessionId = Annotated[
    str | None,
    typer.Option("--session", help="A session's last prompt and reply instead.", metavar="id", show_default="none"),
]
Salt = Annotated[
    str | None, typer.Option("--salt", help="The cache_salt of the requests.", metavar="text", show_default="none")
]


@app.command()
def usage(url: Url = DEFAULT_URL, api_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Show the bytes and tokens in each tier, by precision."""
    with connect(url, api_key) as server:
        answer = server.ask("GET", "/cache/usage")
    _show(answer, as_json, tables.usage)


@app.command()
def sessions(
    id: Annotated[str | None, typer.Argument(help="One session, by its id.", show_default="all")] = None,
    limit: Annotated[int, typer.Option(help="Number of sessions, the last used first.", min=1, max=10_000)] = 20,
    before: Annotated[
        float | None,
        typer.Option(help="Only sessions last used before this time (next_before of --json).", show_default="none"),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Show sessions: the tokens of each conversation that are cached, and where prompts diverged."""
    with connect(url, api_key) as server:
        if id is not None:
            answer = server.ask("GET", f"/cache/sessions/{quote(id, safe='')}")
            return _show(answer, as_json, tables.session)
        after = "" if before is None else f"&before={before!r}"
        return _show(server.ask("GET", f"/cache/sessions?limit={limit}{after}"), as_json, tables.sessions)


def _add_about_prompt(name: str, does: str, table: tables.Table) -> None:
    """Add a command that calls the endpoint of the same name with a prompt."""

    @app.command(name, help=does)
    def about_prompt(
        text: Text = None,
        as_chat: AsChat = False,
        request: RequestFile = None,
        session: SessionId = None,
        salt: Salt = None,
        url: Url = DEFAULT_URL,
        api_key: AdminKey = None,
        as_json: AsJson = False,
    ) -> None:
        body = {"session": session} if session else _prompt(text, request, salt, as_chat=as_chat)
        with connect(url, api_key) as server:
            answer = server.ask("POST", f"/cache/{name}", body)
        _show(answer, as_json, table)


_add_about_prompt("explain", "Show how much of a prompt is cached, and why not more.", tables.explanation)


@app.command()
def clear(
    tier: Annotated[str, typer.Argument(help="hot (memory), disk or all.")],
    salt: Salt = None,
    url: Url = DEFAULT_URL,
    api_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Drop all cached KV that is not in use. With a plain key: only that of this key."""
    with connect(url, api_key) as server:
        answer = server.ask("POST", "/cache/clear", _given(tier=tier, salt=salt))
    _show(answer, as_json, tables.cleared)


_add_about_prompt("pin", "Pin a prompt: its cached KV is not evicted.", tables.pinned)
_add_about_prompt("unpin", "Unpin a prompt: its cached KV may be evicted again.", tables.unpinned)


@app.command()
def requantize(
    k: Annotated[
        str | None, typer.Option("--k", help="Precision of keys, e.g. planes:4.", show_default="as it is")
    ] = None,
    v: Annotated[str | None, typer.Option("--v", help="Precision of values.", show_default="as it is")] = None,
    scope: Annotated[str, typer.Option(help="all, live, stored or disk.")] = "all",
    salt: Salt = None,
    sequence: Annotated[
        str | None, typer.Option(help="Only the KV of this running request.", metavar="id", show_default="none")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the bytes that it would free.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also raise the precision of KV that is stored at a lower one.")
    ] = False,
    progress: Annotated[bool, typer.Option("--progress", help="Show the progress of the last change.")] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Stop the last change; KV that is changed already stays so.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Change the precision of cached KV while the server runs."""
    with connect(url, api_key) as server:
        if progress or cancel:
            answer = server.ask("DELETE" if cancel else "GET", "/cache/requantize")
            return _show(answer, as_json, tables.progress)
        body = _given(k=k, v=v, scope=scope, salt=salt, sequence=sequence, dry_run=dry_run, force=force)
        return _show(server.ask("POST", "/cache/requantize", body), as_json, tables.changed)


def _prompt(text: str | None, request: Path | None, salt: str | None, *, as_chat: bool) -> dict[str, Any]:
    if (text is None) == (request is None):
        raise KvstrataError(
            "Give the prompt as text (- reads stdin), a request's body with --request FILE, or a session."
        )
    if request is not None:
        return {**_body(request), **_given(cache_salt=salt)}
    if text == "-":
        text = sys.stdin.read()
    prompt = {"messages": [{"role": "user", "content": text}]} if as_chat else {"prompt": text}
    return {**prompt, **_given(cache_salt=salt)}


def _body(file: Path) -> dict[str, Any]:
    try:
        body = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise KvstrataError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(body, dict):
        raise KvstrataError(f"{file} must hold a JSON object with messages, prompt or tokens.")
    return body


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _show(answer: Mapping[str, Any], as_json: bool, table: tables.Table) -> None:
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    from rich.console import Console

    # No markup: prompts may contain it.
    # Lines must not be folded here; the terminal wraps them.
    Console(markup=False, highlight=False).print(table(printable_values(answer)), crop=False)


ReadFile = Annotated[Path, typer.Argument(help="The file.", exists=True, dir_okay=False)]
Existing = {"exists": True, "dir_okay": False, "metavar": "file", "show_default": "none"}


@app.command()
def export(
    session: Annotated[str, typer.Argument(help="Its id, as GET /cache/sessions lists it.")],
    file: Annotated[Path, typer.Argument(help="Where to write it.", dir_okay=False)],
    mlx: Annotated[bool, typer.Option("--mlx", help="Write a prompt cache that mlx-lm loads.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    url: Url = DEFAULT_URL,
    api_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Write a session to a file, for another server with the same model."""
    if file.exists() and not force:
        raise KvstrataError(f"{file} is there already. Give another name, or --force.")
    path = f"/cache/sessions/{quote(session, safe='')}/export{'?format=mlx' if mlx else ''}"
    with connect(url, api_key) as server:
        # Write and rename, so that a broken connection leaves no partial file under the name.
        unfinished = file.with_name(f"{file.name}.part")
        try:
            headers, size_bytes = _download(server, path, unfinished)
            os.replace(unfinished, file)
        finally:
            unfinished.unlink(missing_ok=True)
    tokens = int(headers.get("x-kvstrata-tokens", 0))
    _show_transfer({"session": session, "file": str(file), "tokens": tokens, "bytes": size_bytes}, as_json)


@app.command("import")
def import_(
    file: ReadFile,
    salt: Annotated[
        str | None,
        typer.Option("--salt", help="The cache_salt of later requests.", metavar="text", show_default="none"),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="For an mlx-lm cache: the text of its only user message.", **Existing)
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="The text of --prompt-file is a plain prompt, no message.")
    ] = False,
    messages: Annotated[
        Path | None, typer.Option(help="For an mlx-lm cache: its messages, as JSON.", **Existing)
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="For an mlx-lm cache: its token ids, as JSON.", **Existing)
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Import an exported file, or a prompt cache of mlx-lm together with its prompt."""
    prompt = _prompt_of_cache(prompt_file, messages, tokens, raw=raw)
    path = f"/cache/import{'?' + urlencode({'cache_salt': salt}) if salt else ''}"
    with connect(url, api_key) as server:
        _show_transfer({"file": str(file), **server.send(path, _upload(file, prompt))}, as_json)


def _prompt_of_cache(text: Path | None, messages: Path | None, tokens: Path | None, *, raw: bool) -> dict[str, Any]:
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


def _upload(file: Path, prompt: dict[str, Any]) -> Iterator[bytes]:
    """Yield the file as it is, or, if there is a prompt, a bundle of both."""
    if not prompt:
        yield from _read_pieces(file)
        return
    from kvstrata.tiers.bundle import BundleHeader, BundleWriter

    writer = BundleWriter(BundleHeader("prompt_cache", prompt=prompt))
    pieces = (memoryview(piece) for piece in _read_pieces(file))
    for each in (writer.begin(), writer.record(pieces, file.stat().st_size), writer.end()):
        yield from map(bytes, each)


def _read_pieces(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while piece := opened.read(PIECE_BYTES):
            yield piece


def _download(server: RemoteServer, path: str, file: Path) -> tuple[dict[str, str], int]:
    size_bytes = 0
    with server.receive(path) as (headers, pieces), _create_private(file) as opened:
        for piece in pieces:
            opened.write(piece)
            size_bytes += len(piece)
    return headers, size_bytes


def _create_private(file: Path) -> Any:
    """Create a file that only its owner can read, because it holds a conversation."""
    try:
        return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE), "wb")
    except OSError as error:
        raise KvstrataError(f"{file} cannot be written: {error.strerror}") from None


def _show_transfer(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(answer))
        return
    from kvstrata.sizes import format_bytes

    words = (
        f"{answer['file']}: {answer['tokens']} tokens, {format_bytes(answer['bytes'])}",
        f"session {answer['session']}",
        *([_new_tokens_text(answer["new_tokens"])] if "new_tokens" in answer else []),
    )
    typer.echo("; ".join(words))


def _new_tokens_text(num_tokens: int) -> str:
    return f"{num_tokens} tokens are new here" if num_tokens else "all of it was here already"


for _command in (cache_folder.ls, cache_folder.verify, cache_folder.gc):
    app.command()(_command)
