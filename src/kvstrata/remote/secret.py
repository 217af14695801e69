"""The secret of a cluster, and the keys that are made from it. Servers with the same secret share; no others can."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from kvstrata.backend.private_file import OpenToAll, read_private
from kvstrata.errors import ConfigError
from kvstrata.remote.url import RemoteUrl

FLAG = "--remote-secret-file"
MIN_BYTES = 32
NAMES = "kvstrata remote 1: names of blocks"
SEALS = "kvstrata remote 1: seals of blocks"
MAKE_ONE = "Make one with: (umask 077; openssl rand -hex 32 > secret), and give every server the same file"


@dataclass(frozen=True)
class Keys:
    """`seal` is None where there is no secret: then blocks have checksums, and are not encrypted."""

    names: bytes = field(repr=False)
    seal: bytes | None = field(repr=False)


def keys_for(url: RemoteUrl, secret_file: Path | None) -> Keys:
    """Raises ConfigError where a secret is missing or of no use."""
    if secret_file is not None:
        return keys_of(read_secret(secret_file))
    if url.needs_secret:
        raise ConfigError(
            f"--remote-cache {url.shown} can be written by others: blocks there must be sealed with a secret "
            f"({FLAG}). Only a folder of mode 0700 that is this user's needs none. {MAKE_ONE}."
        )
    return Keys(names=_derived(b"", NAMES), seal=None)


def keys_of(secret: bytes) -> Keys:
    return Keys(names=_derived(secret, NAMES), seal=_derived(secret, SEALS))


def read_secret(file: Path) -> bytes:
    try:
        secret = read_private(file).strip()
    except OSError as error:
        raise ConfigError(f"{FLAG} {file} cannot be read: {error.strerror}. {MAKE_ONE}.") from None
    except OpenToAll:
        raise ConfigError(f"{FLAG} {file} can be read or written by every user. Run: chmod 600 {file}") from None
    if len(secret) < MIN_BYTES:
        raise ConfigError(f"{FLAG} {file} has {len(secret)} bytes: a secret has at least {MIN_BYTES}. {MAKE_ONE}.")
    return secret


def _derived(secret: bytes, context: str) -> bytes:
    return blake3(secret, derive_key_context=context).digest()
