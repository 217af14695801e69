"""Where a remote tier is: URLs of stores, read and checked. What is shown or raised here never has a password in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstrata.backend.addresses import is_loopback
from kvstrata.errors import ConfigError

FLAG = "--remote-cache"
EXAMPLES = (
    "redis://host:6379/0, rediss://host:6380/0, s3://bucket/prefix, gs://bucket, az://container or file:///folder"
)
# By scheme: what may follow a question mark.
OPTIONS: Mapping[str, frozenset[str]] = {
    "redis": frozenset(),
    "rediss": frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}),
    "s3": frozenset({"endpoint", "region"}),
    "gs": frozenset(),
    "az": frozenset(),
    "file": frozenset(),
}
PRIVATE_MODE = 0o700


@dataclass(frozen=True)
class RemoteUrl:
    scheme: str
    host: str  # of an object store: the bucket or the container
    path: str  # of Redis: the number of the database; of an object store: the prefix
    port: int | None = None
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    text: str = field(default="", repr=False)  # all of it, with a password if it has one

    @property
    def shown(self) -> str:
        """For people and logs."""
        port = f":{self.port}" if self.port is not None else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}{port}/{self.path.lstrip('/')}".rstrip("/")

    def __str__(self) -> str:
        return self.shown

    @property
    def is_redis(self) -> bool:
        return self.scheme in ("redis", "rediss")

    @property
    def endpoint(self) -> str:
        """Of S3: another address than that of its provider; empty: there is none."""
        if self.scheme != "s3":
            return ""
        return self.options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT", "")

    @property
    def needs_secret(self) -> bool:
        """Unless no one else can write there: a loopback address, or a folder that is this user's alone."""
        if self.scheme == "file":
            return not _is_private(Path(self.path))
        address = self.host if self.is_redis else urlsplit(self.endpoint).hostname or ""
        return not is_loopback(address)


def parse(text: str) -> RemoteUrl:
    """Raises ConfigError, which never shows the text: it may have a password in it."""
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{FLAG} is not a URL ({_reason(error)}). Write it like {EXAMPLES}.") from None
    if parts.scheme not in OPTIONS:
        known = ", ".join(OPTIONS)
        raise ConfigError(f"{FLAG}: unknown scheme {parts.scheme[:20]!r}. Known: {known}. Write it like {EXAMPLES}.")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - OPTIONS[parts.scheme]):
        known = ", ".join(sorted(OPTIONS[parts.scheme])) or "none"
        raise ConfigError(f"{FLAG}: {parts.scheme} has no option {unknown[0][:40]!r}. Options: {known}.")
    url = RemoteUrl(parts.scheme, parts.hostname or "", unquote(parts.path), port, options, text.strip())
    _check(url, has_login="@" in parts.netloc)
    return url


def _check(url: RemoteUrl, *, has_login: bool) -> None:
    if url.scheme == "file":
        if url.host not in ("", "localhost") or not url.path.startswith("/") or url.path == "/":
            raise ConfigError(f"{FLAG}: a shared folder is written with three slashes, like file:///shared/folder.")
    elif not url.host:
        raise ConfigError(f"{FLAG}: {url.scheme} needs {'a host' if url.is_redis else 'a bucket'}, as in {EXAMPLES}.")
    database = url.path.strip("/")
    if url.is_redis and database and not database.isdecimal():
        raise ConfigError(f"{FLAG}: after the host of Redis comes the number of a database, as in redis://host:6379/0.")
    if has_login and not url.is_redis:
        raise ConfigError(
            f"{FLAG}: {url.scheme} takes no user and password in the URL. Object stores read theirs from the "
            "environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY)."
        )


def _reason(error: ValueError) -> str:
    """urllib quotes what it could not read."""
    return "the port is not a number" if "port" in str(error).lower() else "it cannot be read"


def _is_private(folder: Path) -> bool:
    try:
        found = folder.stat()
    except OSError:
        return False
    return stat.S_IMODE(found.st_mode) == PRIVATE_MODE and found.st_uid == os.getuid()
