"""Access control: API keys, or checks of host and origin where there are no keys; salts of callers.

Requests with different keys never share cached state: each key has a salt that is derived from it, and a client's
`cache_salt` divides further within one key. A plain key reads and changes only its own state, an admin key all of it;
without any keys every caller may do everything.

Without keys, host names are checked against DNS rebinding: a web page whose own host name is made to resolve to this
machine is, to the browser, a page of this server and may read every response. But the browser sends that name in
`Host`. A server with keys does not need the check: such a page does not know the key.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from blake3 import blake3
from starlette.types import ASGIApp, Receive, Scope, Send

from kvstrata.errors import Forbidden, Unauthorized
from kvstrata.server import dashboard
from kvstrata.server.http.errors import error_response

OPEN_PATHS = frozenset({"/health"}) | dashboard.OPEN_PATHS
DIGEST_CONTEXT = "kvstrata 2026-11 api key digest v1"
SALT_CONTEXT = "kvstrata 2026-11 api key salt v1"
SCOPE_KEY = "kvstrata.key"
# Names that cannot exist in the public DNS: those of this machine, the local network, containers and their host.
PRIVATE_PATTERN = re.compile(r"[a-z0-9_-]+|[a-z0-9_.-]+\.(?:localhost|local|internal)")
WEB_SCHEMES = ("http", "https")
HOST_PATTERN = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::[0-9]*)?")  # [address] or name, and a port
SHOWN_CHARS = 200
ANY = "*"


@dataclass(frozen=True)
class ApiKey:
    digest: bytes
    salt: str
    is_admin: bool = False

    @classmethod
    def of(cls, key: str, *, is_admin: bool = False) -> ApiKey:
        digest = blake3(key.encode(), derive_key_context=DIGEST_CONTEXT).digest()
        return cls(digest, blake3(key.encode(), derive_key_context=SALT_CONTEXT).hexdigest(), is_admin)


def salt_of(scope: Scope, cache_salt: str | None) -> str:
    """Return the salt of a request, which separates its cached state from that of others. Empty without a key or
    cache_salt."""
    key: ApiKey | None = scope.get(SCOPE_KEY)
    key_salt = "" if key is None else key.salt
    if not cache_salt:
        return key_salt
    return f"{key_salt}:{blake3(cache_salt.encode(), derive_key_context=SALT_CONTEXT).hexdigest()}"


def owner_of_scope(scope: Scope) -> str | None:
    """Return the salt of the key that a caller is restricted to, or None if the caller may access everything."""
    key: ApiKey | None = scope.get(SCOPE_KEY)
    return None if key is None or key.is_admin else key.salt


def owner_salt(scope: Scope) -> str | None:
    """Return the salt of a request's key, an admin key included, or None without a key."""
    key: ApiKey | None = scope.get(SCOPE_KEY)
    return None if key is None else key.salt


class RequireKey:
    """Middleware that requires an API key, for a server with keys."""

    def __init__(self, app: ASGIApp, keys: Iterable[ApiKey]) -> None:
        self.app = app
        self.keys = tuple(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self.app(scope, receive, send)
        found = self._match(_presented(scope))
        if found is None:
            error = Unauthorized(
                "This server wants a key. Send it as: Authorization: Bearer KEY, or as: x-api-key: KEY"
            )
            return await error_response(error)(scope, receive, send)
        scope[SCOPE_KEY] = found
        return await self.app(scope, receive, send)

    def _match(self, presented: bytes) -> ApiKey | None:
        digest = blake3(presented, derive_key_context=DIGEST_CONTEXT).digest()
        found = None
        # No early exit: the timing must not reveal which key matched.
        for key in self.keys:
            if hmac.compare_digest(digest, key.digest) and (found is None or key.is_admin):
                found = key
        return found


def _presented(scope: Scope) -> bytes:
    headers = dict(reversed(scope["headers"]))  # the first of each name
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()
    return headers.get(b"x-api-key", b"").strip()


class RequireKnownHost:
    """Middleware that checks Host and Origin. Programs that send neither a host (HTTP/1.0) nor an origin are allowed:
    they are not web pages."""

    def __init__(self, app: ASGIApp, names: Iterable[str], origins: Iterable[str] = ()) -> None:
        """`origins`: origins of other pages that may use the server (`app.allow_origins`); * allows all."""
        self.app = app
        self.origins = frozenset(origins)
        self.names = frozenset(name for name in map(_plain, names) if name and not _is_address(name))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refuse(scope) if scope["type"] == "http" else None
        if error is not None:
            return await error_response(error)(scope, receive, send)
        return await self.app(scope, receive, send)

    def _refuse(self, scope: Scope) -> Forbidden | None:
        hosts, origins = header_values(scope, b"host"), header_values(scope, b"origin")
        for host in hosts:
            if not self._is_ours(host):
                return _wrong_host(host)
        for origin in origins:
            if allows(self.origins, origin):
                continue
            scheme, mark, rest = origin.lower().partition("://")
            # Programs with pages of their own (app://, file://) are allowed; no web site has such an origin.
            is_site = scheme in WEB_SCHEMES or not mark
            # The scheme is not compared: a proxy in front may terminate TLS.
            if is_site and rest not in {host.lower() for host in hosts} and not self._is_named(rest):
                return wrong_origin(origin)
        return None

    def _is_named(self, host: str) -> bool:
        """Return whether a host is one of the configured names. A proxy may forward a request by address for a page
        that the browser requested by name."""
        return _plain(_without_port(host)) in self.names

    def _is_ours(self, host: str) -> bool:
        name = _plain(_without_port(host))
        return self._is_named(host) or PRIVATE_PATTERN.fullmatch(name) is not None or _is_address(name)


def _without_port(host: str) -> str:
    match = HOST_PATTERN.fullmatch(host)
    return match[1] or match[2] if match else host


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    """Return whether a host is an IP address. Every address is allowed: only a name can be made to resolve to another
    machine first and to this one later, and a page at this server's address came from this server."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def allows(origins: frozenset[str], origin: str) -> bool:
    """Return whether an origin is allowed. `origins`: the configured ones; * allows all."""
    return ANY in origins or origin.lower() in origins


def header_values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for name, value in scope["headers"] if name == header]


def _wrong_host(host: str) -> Forbidden:
    name = _without_port(host)[:SHOWN_CHARS]
    return Forbidden(
        f"This server has no key and does not know itself by the name '{name}'. If that is its name, start it with "
        f"--allowed-hosts NAME (KVSTRATA_ALLOWED_HOSTS); or with a key: --api-key KEY; or call it by its address.",
        code="host_not_allowed",
    )


def wrong_origin(origin: str) -> Forbidden:
    shown = origin[:SHOWN_CHARS]
    return Forbidden(
        f"A page of '{shown}' may not use this server from a browser. {_way_in(shown)}", code="origin_not_allowed"
    )


def _way_in(origin: str) -> str:
    scheme, mark, host = origin.lower().partition("://")
    if not mark or scheme not in WEB_SCHEMES or not host:
        return (
            "It has no origin that could be named, like a page that was opened from a file: serve it from an address, "
            "or start this server with --allowed-origins '*' (KVSTRATA_ALLOWED_ORIGINS), which lets in every page."
        )
    return (
        f"To let it in, start the server with --allowed-origins {origin} (KVSTRATA_ALLOWED_ORIGINS). If that is a "
        f"proxy's name for this server itself: --allowed-hosts {_without_port(host)}."
    )
