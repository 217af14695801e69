"""API keys, as bearer tokens or in `x-api-key`: open paths, key digests and the salt of each key. Stores digests, not
keys.

Requests with different keys never share cached state: each key has a salt that is derived from it, and a client's
`cache_salt` divides further within one key. A plain key reads and changes only its own state, an admin key all of it;
without any keys every caller may do everything.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from blake3 import blake3
from starlette.types import ASGIApp, Receive, Scope, Send

from kvstrata.errors import Unauthorized
from kvstrata.server import dashboard
from kvstrata.server.errors import error_response

OPEN_PATHS = frozenset({"/health"}) | dashboard.OPEN_PATHS
DIGEST_CONTEXT = "kvstrata 2026-11 api key digest v1"
SALT_CONTEXT = "kvstrata 2026-11 api key salt v1"
SCOPE_KEY = "kvstrata.key"


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


def owner_in(scope: Scope) -> str | None:
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
