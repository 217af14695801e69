"""Middleware against DNS rebinding: allowed host names and origins of a server without keys. CORS is in cors.py.

A web page whose own host name is made to resolve to this machine is, to the browser, a page of this server and may read
every response. But the browser sends that name in `Host`. A server with keys does not need the check: such a page does
not know the key.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from kvstrata.errors import Forbidden
from kvstrata.server.errors import error_response

# Names that cannot exist in the public DNS: those of this machine, the local network, containers and their host.
PRIVATE_PATTERN = re.compile(r"[a-z0-9_-]+|[a-z0-9_.-]+\.(?:localhost|local|internal)")
WEB_SCHEMES = ("http", "https")
HOST_PATTERN = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::[0-9]*)?")  # [address] or name, and a port
SHOWN_CHARS = 200
ANY = "*"


class RequireHost:
    """Middleware that checks Host and Origin. Programs that send neither a host (HTTP/1.0) nor an origin are allowed:
    they are not web pages."""

    def __init__(self, app: ASGIApp, names: Iterable[str], origins: Iterable[str] = ()) -> None:
        """`origins`: origins of other pages that may use the server (cors.py); * allows all."""
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
