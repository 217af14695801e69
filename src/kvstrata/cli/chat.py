"""`kvstrata chat`: a chat in the terminal with a running server.

Uses HTTP only, as any other client does. Reads prompts line by line from a terminal or a pipe.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from kvstrata.cli.http_client import DEFAULT_URL, Key, Url
from kvstrata.errors import KvstrataError
from kvstrata.printable import printable

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class Turn:
    """An answer with its timing and usage."""

    text: str
    thinking: str
    first_token_s: float | None  # None: stopped before there was one
    usage: dict[str, Any] | None  # None: stopped before the end

    def message(self) -> dict[str, str]:
        """Return the message for the history. The chat template decides whether it shows the thinking."""
        thought = {"reasoning_content": self.thinking} if self.thinking else {}
        return {"role": "assistant", "content": self.text, **thought}

    def summary(self) -> str:
        if self.first_token_s is None:
            return "[stopped]"
        first = f"first token after {self.first_token_s:.2f} s"
        if self.usage is None:
            return f"[stopped; {first}]"
        cached = self.usage["prompt_tokens_details"]["cached_tokens"]
        return f"[{cached} of {self.usage['prompt_tokens']} prompt tokens cached, {first}]"


def chat(
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    system: Annotated[
        str | None,
        typer.Option(
            help="System prompt: how the model is to answer.",
            envvar="KVSTRATA_SYSTEM",
            metavar="text",
            show_default="none",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longest answer, in tokens; thinking counts.",
            envvar="KVSTRATA_MAX_TOKENS",
            metavar="tokens",
            show_default="up to the context's end",
            min=1,
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            help="Randomness of the answers: 0 always takes the likeliest token.",
            envvar="KVSTRATA_TEMPERATURE",
            metavar="number",
            min=0,
            max=2,
        ),
    ] = 0.7,
) -> None:
    """Chat with a running server (kvstrata serve, in another terminal). Ctrl-C stops an answer, Ctrl-D ends.

    Prompts may also come from a pipe, one on each line: echo "Name a tree." | kvstrata chat

    Answers go to stdout; thinking, cached tokens and times go to stderr.
    """
    import httpx

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    # No read timeout: a long prompt may take minutes, and SSE comments keep the connection alive.
    timeout = httpx.Timeout(10.0, read=None)
    with httpx.Client(base_url=url, headers=headers, timeout=timeout) as client:
        model = _model_name(client, url)
        options = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        _converse(client, url, options, [{"role": "system", "content": system}] if system else [])


def _converse(client: httpx.Client, url: str, options: dict[str, Any], messages: list[dict[str, str]]) -> None:
    if sys.stdin.isatty():
        typer.echo(f"{printable(str(options['model']))} at {url}. Ctrl-C stops an answer, Ctrl-D ends.", err=True)
    for prompt in _prompts():
        messages.append({"role": "user", "content": prompt})
        turn = _answer(client, url, {**options, "messages": messages})
        messages.append(turn.message())
        typer.echo()
        typer.secho(turn.summary(), err=True, dim=True)


def _prompts() -> Iterator[str]:
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else _piped_line()
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line


def _piped_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _answer(client: httpx.Client, url: str, body: dict[str, Any]) -> Turn:
    import httpx

    began = time.perf_counter()
    text: list[str] = []
    thinking: list[str] = []
    first_token_s = None
    usage = None
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with client.stream("POST", "/v1/chat/completions", json=asked) as response:
            _require_success(response, url)
            for event in _events(response):
                usage = event.get("usage") or usage
                thought, said = _piece(event, "reasoning_content"), _piece(event, "content")
                if thought or said:
                    first_token_s = first_token_s or time.perf_counter() - began
                thinking.append(thought)
                typer.secho(_shown(thought, sys.stderr), err=True, dim=True, nl=False)
                if said and not text and any(thinking):
                    typer.echo("\n", err=True)
                text += [said] if said else []
                typer.echo(_shown(said, sys.stdout), nl=False)
    except KeyboardInterrupt:
        usage = None  # leaving the block closed the connection, which cancels on the server
    except httpx.HTTPError as error:
        raise _unreachable(url, error) from None
    return Turn("".join(text), "".join(thinking), first_token_s, usage)


def _shown(text: str, stream: TextIO) -> str:
    """Make control characters harmless on a terminal; a pipe gets the text unchanged."""
    return printable(text) if stream.isatty() else text


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in _lines(response):
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise KvstrataError(event["error"]["message"])
        yield event


def _lines(response: httpx.Response) -> Iterator[str]:
    """Yield lines that end with \\n or \\r\\n only: httpx's own splits at Unicode line separators inside JSON strings
    too."""
    rest = ""
    for text in response.iter_text():
        *whole, rest = (rest + text).split("\n")
        yield from (line.removesuffix("\r") for line in whole)
    yield rest


def _piece(event: dict[str, Any], field: str) -> str:
    return "".join(choice["delta"].get(field) or "" for choice in event["choices"])


def _model_name(client: httpx.Client, url: str) -> str:
    import httpx

    try:
        response = client.get("/v1/models")
        _require_success(response, url)
        return response.json()["data"][0]["id"]
    except httpx.InvalidURL:
        raise KvstrataError(f"'{url}' is not an address. Write it like --url http://127.0.0.1:8000") from None
    except httpx.HTTPError as error:
        raise _unreachable(url, error) from None
    except (ValueError, LookupError, TypeError):
        raise KvstrataError(f"{url} answers, but not like an OpenAI server. Check --url.") from None


def _require_success(response: httpx.Response, url: str) -> None:
    if response.is_success:
        return
    response.read()
    if response.status_code == 401:
        raise KvstrataError(f"{url} wants a key: --api-key KEY (KVSTRATA_API_KEY)")
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"{url} answered {response.status_code}. Is this an OpenAI server? Check --url."
    raise KvstrataError(message)


def _unreachable(url: str, error: Exception) -> KvstrataError:
    return KvstrataError(
        f"No server answers at {url} ({error}). Start one in another terminal: kvstrata serve    "
        "or say where it is: --url http://HOST:PORT"
    )
