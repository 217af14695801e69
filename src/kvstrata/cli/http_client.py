"""HTTP client for commands that use a running server, and their options: --url, --api-key, --json.

JSON both ways; every problem is a one-line error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.errors import ConfigError, KvstrataError

if TYPE_CHECKING:
    import httpx


def _to_send(context: typer.Context, option: typer.CallbackParam, key: str | None) -> str | None:
    """Return the key to send. The server's own variables may hold several keys, any of which is accepted."""
    source = context.get_parameter_source(option.name or "")
    if key and source and source.name == "ENVIRONMENT":
        key = key.partition(",")[0].strip()
    if not key:
        return None
    from kvstrata.config import NOT_A_KEY, is_key

    if not is_key(key):
        raise ConfigError(f"--api-key (KVSTRATA_API_KEY): {NOT_A_KEY}.")
    return key


def _key_option(*variables: str, also: str = "") -> Any:
    return typer.Option(
        "--api-key",
        help=f"The server's key, if it was started with one. A variable may hold several between commas: the first is "
        f"sent.{also}",
        envvar=list(variables),
        metavar="key",
        show_default="none",
        callback=_to_send,
    )


DEFAULT_URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option("--url", help="Address of the running server.", envvar="KVSTRATA_URL", metavar="url")]
# An admin may have both variables set: chat prefers the API key, cache commands the admin key.
Key = Annotated[str | None, _key_option("KVSTRATA_API_KEY", "KVSTRATA_ADMIN_KEY")]
AdminKey = Annotated[
    str | None,
    _key_option(
        "KVSTRATA_ADMIN_KEY", "KVSTRATA_API_KEY", also=" An admin key shows and changes what is under every key."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="The server's answer on stdout, and nothing else.")]


class RemoteServer:
    """JSON requests to one server, and files to and from it."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client = client
        self.url = url

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request with a JSON body and return the JSON response."""
        with self._raise_advice():
            return self._answer(self._client.request(method, path, json=body))

    def send(self, path: str, content: Iterator[bytes]) -> Any:
        """Upload a file in pieces. The response comes after the file was checked and cached, so there is no read
        timeout."""
        import httpx

        headers = {"content-type": "application/octet-stream"}
        timeout = httpx.Timeout(60.0, connect=10.0, read=None)
        with self._raise_advice():
            return self._answer(self._client.post(path, content=content, headers=headers, timeout=timeout))

    @contextmanager
    def receive(self, path: str) -> Iterator[tuple[dict[str, str], Iterator[bytes]]]:
        """Download a file in pieces; yield the response's headers and the pieces."""
        with self._raise_advice(), self._client.stream("GET", path) as response:
            if not response.is_success:
                response.read()
                self._answer(response)
            yield dict(response.headers), response.iter_bytes()

    @contextmanager
    def _raise_advice(self) -> Iterator[None]:
        """Raise a KvstrataError with advice where the server cannot be reached."""
        import httpx

        try:
            yield
        except httpx.HTTPError as error:
            raise KvstrataError(
                f"No server answers at {self.url} ({error}). Start one in another terminal: kvstrata serve    "
                "or say where it is: --url http://HOST:PORT"
            ) from None

    def _answer(self, response: httpx.Response) -> Any:
        if response.status_code == 401:
            raise KvstrataError(f"{self.url} wants a key: --api-key KEY (KVSTRATA_API_KEY)")
        try:
            answer = response.json()
            if response.is_success:
                return answer
            message = answer["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = f"{self.url} answered {response.status_code}, but not like kvstrata. Check --url."
        raise KvstrataError(message)


@contextmanager
def connect(url: str, api_key: str | None) -> Iterator[RemoteServer]:
    """Open a client for the server at `url`. Sends nothing yet."""
    import httpx

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        # The engine responds between two steps, and a prefill step may take seconds.
        client = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(60.0, connect=10.0))
    except httpx.InvalidURL:
        raise KvstrataError(f"'{url}' is not an address. Write it like --url {DEFAULT_URL}") from None
    with client:
        yield RemoteServer(client, url)
