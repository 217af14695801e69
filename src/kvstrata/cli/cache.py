"""`kvstrata cache`: show and change the cache of a running server, or inspect a folder of the disk cache.

Uses HTTP only: every command is one call whose response is shown as a table or, with --json, as it is. To add a
command, write a function and decorate it with `@app.command`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kvstrata.cli import cache_folder, cache_move
from kvstrata.cli import cache_tables as tables
from kvstrata.cli.remote import DEFAULT_URL, AdminKey, AsJson, Url, connect
from kvstrata.errors import KvstrataError
from kvstrata.printable import printable_values

app = typer.Typer(
    name="cache",
    help="See and change what a running server has cached.",
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
    """What is held, where and at which precision."""
    with connect(url, api_key) as remote:
        answer = remote.ask("GET", "/cache/usage")
    _show(answer, as_json, tables.usage)


@app.command()
def sessions(
    id: Annotated[str | None, typer.Argument(help="One session, by its id.", show_default="all")] = None,
    limit: Annotated[int, typer.Option(help="How many, the last used first.", min=1, max=10_000)] = 20,
    before: Annotated[
        float | None,
        typer.Option(help="Only those last used before this (next_before of --json).", show_default="none"),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Requests that belong together: what is held of each conversation, and where prompts parted."""
    with connect(url, api_key) as remote:
        if id is not None:
            answer = remote.ask("GET", f"/cache/sessions/{quote(id, safe='')}")
            return _show(answer, as_json, tables.session)
        after = "" if before is None else f"&before={before!r}"
        return _show(remote.ask("GET", f"/cache/sessions?limit={limit}{after}"), as_json, tables.sessions)


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
        with connect(url, api_key) as remote:
            answer = remote.ask("POST", f"/cache/{name}", body)
        _show(answer, as_json, table)


_add_about_prompt("explain", "How much of a prompt is cached, and why not more.", tables.explanation)


@app.command()
def clear(
    tier: Annotated[str, typer.Argument(help="hot (memory), disk or all.")],
    salt: Salt = None,
    url: Url = DEFAULT_URL,
    api_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Drop what is stored and not in use. With a plain key: what is under it."""
    with connect(url, api_key) as remote:
        answer = remote.ask("POST", "/cache/clear", _given(tier=tier, salt=salt))
    _show(answer, as_json, tables.cleared)


_add_about_prompt("pin", "Keep what is stored of a prompt, whatever else has to go.", tables.pinned)
_add_about_prompt("unpin", "Let it go again when room is needed.", tables.unpinned)


@app.command()
def requantize(
    k: Annotated[
        str | None, typer.Option("--k", help="Precision of keys, e.g. planes:4.", show_default="as it is")
    ] = None,
    v: Annotated[str | None, typer.Option("--v", help="Precision of values.", show_default="as it is")] = None,
    scope: Annotated[str, typer.Option(help="all, live, stored or disk.")] = "all",
    salt: Salt = None,
    sequence: Annotated[
        str | None, typer.Option(help="Only what this running request holds.", metavar="id", show_default="none")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would free.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Going up: decode what is lower.")] = False,
    progress: Annotated[bool, typer.Option("--progress", help="Say how far the last change has come.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stop the last change; what is done stays.")] = False,
    url: Url = DEFAULT_URL,
    api_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Change the precision of what is cached, while the server goes on."""
    with connect(url, api_key) as remote:
        if progress or cancel:
            answer = remote.ask("DELETE" if cancel else "GET", "/cache/requantize")
            return _show(answer, as_json, tables.progress)
        body = _given(k=k, v=v, scope=scope, salt=salt, sequence=sequence, dry_run=dry_run, force=force)
        return _show(remote.ask("POST", "/cache/requantize", body), as_json, tables.changed)


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


app.command()(cache_move.export)
app.command("import")(cache_move.import_)
for _command in (cache_folder.ls, cache_folder.verify, cache_folder.gc):
    app.command()(_command)
