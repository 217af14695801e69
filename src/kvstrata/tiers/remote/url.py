"""URLs of stores, parsed and checked. No displayed text and no error contains a password."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from kvstrata.errors import ConfigError

FLAG = "--remote-cache"

EXAMPLES = (
    "redis://host:6379/0, rediss://host:6380/0, s3://bucket/prefix, gs://bucket, az://container or file:///folder"
)

# Files and a folder that TLS reads, under the names of redis-py.
TLS_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")

CHECK_HOSTNAME = "ssl_check_hostname"

# By scheme: options that may follow a question mark.
OPTIONS: Mapping[str, frozenset[str]] = {
    "redis": frozenset(),
    "rediss": frozenset({*TLS_FILES, CHECK_HOSTNAME}),
    "s3": frozenset({"endpoint", "region"}),
    "gs": frozenset({"endpoint"}),
    "az": frozenset({"endpoint"}),
    "file": frozenset(),
}

# Environment variables with another address of an object store, as obstore reads them; the first that is set counts.
ENDPOINTS: Mapping[str, tuple[str, ...]] = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}

# In place of a user or a password: the name of a variable of the environment.
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

PRIVATE_MODE = 0o700


@dataclass(frozen=True)
class RemoteUrl:
    scheme: str
    host: str  # of an object store: the bucket or the container
    path: str  # of Redis: the number of the database; of an object store: the prefix
    port: int | None = None
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    text: str = field(default="", repr=False)  # the whole URL, with the password or the name of its variable

    @property
    def shown(self) -> str:
        """The URL without a login, for people and logs."""
        port = f":{self.port}" if self.port is not None else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}{port}/{self.path.lstrip('/')}".rstrip("/")

    def __str__(self) -> str:
        return self.shown

    @property
    def has_plain_password(self) -> bool:
        """Whether the password itself stands in the text, not the name of a variable."""
        password = urlsplit(self.text).password
        return bool(password) and VARIABLE.fullmatch(password) is None

    @property
    def with_login(self) -> str:
        """The URL with the values of variables in its user and password. Raises ConfigError."""
        login, mark, rest = self.text.rpartition("@")
        return f"{VARIABLE.sub(_value, login)}{mark}{rest}"

    @property
    def is_redis(self) -> bool:
        return self.scheme in ("redis", "rediss")

    @property
    def endpoint(self) -> str:
        """Address of an object store, if it is not the provider's; empty: it is."""
        named = (os.environ.get(name) for name in ENDPOINTS.get(self.scheme, ()))
        return self.options.get("endpoint") or next((address for address in named if address), "")

    @property
    def needs_secret(self) -> bool:
        """Whether others can write to the store: all but a folder that is this user's alone. A loopback address is open
        to all users and containers of a machine."""
        return self.scheme != "file" or not _is_private(Path(self.path))


def parse_url(text: str) -> RemoteUrl:
    """Parse a URL. Raises ConfigError, which never shows the text, because it may contain a password."""
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
    _check_options(url)
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


def _value(found: re.Match[str]) -> str:
    value = os.environ.get(found[1])
    if not value:
        raise ConfigError(f"{FLAG} names the variable {found[1]}, which is not set here. Set it to what it stands for.")
    return quote(value, safe="")


def _check_options(url: RemoteUrl) -> None:
    if url.endpoint and not _is_address(url.endpoint):
        variables = " or ".join(ENDPOINTS[url.scheme])
        raise ConfigError(
            f"{FLAG}: the endpoint of {url.scheme} ({variables}) is written like https://host:9000, without a user and "
            "a password."
        )
    if url.options.get(CHECK_HOSTNAME, "true") not in ("true", "false"):
        raise ConfigError(f"{FLAG}: {CHECK_HOSTNAME} is true or false.")


def _is_address(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
    except ValueError:
        return False


def _reason(error: ValueError) -> str:
    """Return the reason without the text that urllib quotes."""
    return "the port is not a number" if "port" in str(error).lower() else "it cannot be read"


def _is_private(folder: Path) -> bool:
    try:
        found = folder.stat()
    except OSError:
        return False
    return stat.S_IMODE(found.st_mode) == PRIVATE_MODE and found.st_uid == os.getuid()
