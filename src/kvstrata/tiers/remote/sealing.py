"""The secret, and the names and seals derived from it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from kvstrata.errors import ConfigError
from kvstrata.platform.files import OpenToAll, read_private
from kvstrata.tiers.block import BLOCK_TOKENS, BlockId, Chain
from kvstrata.tiers.block_file import Damage, DamagedBlock
from kvstrata.tiers.interface import ChainLink, TokenIds
from kvstrata.tiers.remote.url import RemoteUrl

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

FLAG = "--remote-secret-file"

MIN_BYTES = 32

NAMES = "kvstrata remote 1: names of blocks"

SEALS = "kvstrata remote 1: seals of blocks"

MAKE_ONE = "Make one with: (umask 077; openssl rand -hex 32 > secret), and give every server the same file"


@dataclass(frozen=True)
class Keys:
    """The keys derived from a secret. `seal` is None without one: blocks then have checksums and are not encrypted."""

    names: bytes = field(repr=False)
    seal: bytes | None = field(repr=False)


def keys_for(url: RemoteUrl, secret_file: Path | None) -> Keys:
    """Return the keys of a store. Raises ConfigError if the secret is missing or unusable."""
    if secret_file is not None:
        return keys_of(read_secret(secret_file))
    if url.needs_secret:
        raise ConfigError(
            f"--remote-cache {url.shown} can be written by others: blocks there must be sealed with a secret "
            f"({FLAG}). Only a folder of mode 0700 that is this user's needs none. {MAKE_ONE}."
        )
    return Keys(names=_derived(b"", NAMES), seal=None)


def keys_of(secret: bytes) -> Keys:
    """Derive the keys of a secret."""
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


ROOT_DOMAIN = b"kvstrata remote root 1\0"

NUM_DIGITS = 64


class BlockNames:
    """Names of blocks in a store: keyed hashes of a block's key, part and precision."""

    def __init__(self, keys: Keys, precision: str, backend: str) -> None:
        self._key = keys.names
        self._precision = precision.encode()
        self._backend = backend.encode()

    def root_of(self, root: bytes) -> bytes:
        """Return the root of a chain on this tier, from the chain's root in the prefix cache."""
        return blake3(ROOT_DOMAIN + root + self._backend).digest()

    def name_of(self, block: BlockId) -> str:
        """Return a block's name. Each field has a fixed length or comes with its length, so no two blocks share one."""
        fields = (block.key, len(self._precision).to_bytes(2, "little"), self._precision, block.part.encode())
        return blake3(b"".join(fields), key=self._key).hexdigest()


def links_of(chain: Chain, root: bytes, ids: TokenIds) -> list[ChainLink]:
    """Return the blocks of all whole runs of 256 tokens, whether the store has them or not."""
    links: list[ChainLink] = []
    parent = root
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        end = start + BLOCK_TOKENS
        key = chain(parent, ids[start:end])
        links.append(ChainLink(key, parent, start, end))
        parent = key
    return links


def is_name(text: str) -> bool:
    return len(text) == NUM_DIGITS and all(digit in "0123456789abcdef" for digit in text)


# The last digit is the version of the values.
SEALED, PLAIN = b"kvsrem2s", b"kvsrem2p"

SALT_BYTES = 16

PIECE_BYTES = 1 << 20

TAG_BYTES = 16

DIGEST_BYTES = 32

# Rest between two pieces, in which the computing thread gets the GIL.
REST_S = 0.0001

EXTRA = "pip install 'kvstrata[remote]'"


def seal(keys: Keys, name: str, body: bytes | bytearray) -> bytes | bytearray:
    """Encrypt a body under a name; without a secret, prepend a checksum of both."""
    if keys.seal is None:
        return b"".join((PLAIN, _digest(name, body), body))
    salt = os.urandom(SALT_BYTES)
    cipher = _cipher(keys.seal, name, salt)
    num_pieces = max(1, -(-len(body) // PIECE_BYTES))
    out = bytearray(len(SEALED) + SALT_BYTES + len(body) + num_pieces * TAG_BYTES)
    at = len(SEALED) + SALT_BYTES
    out[:at] = SEALED + salt
    view = memoryview(body)
    for number in range(num_pieces):
        piece = view[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
        sealed = cipher.encrypt(_nonce(number, is_last=number == num_pieces - 1), piece, SEALED + name.encode())
        out[at : at + len(sealed)] = sealed
        at += len(sealed)
        _rest(num_pieces)
    return out


def unseal(keys: Keys, name: str, sealed: bytes | memoryview) -> memoryview:
    """Return the body. Raises DamagedBlock for any value that `seal` did not make under this name."""
    view = memoryview(sealed)
    magic = bytes(view[: len(SEALED)])
    if keys.seal is None:
        body = view[len(PLAIN) + DIGEST_BYTES :]
        if magic != PLAIN or bytes(view[len(PLAIN) : len(PLAIN) + DIGEST_BYTES]) != _digest(name, body):
            raise DamagedBlock(Damage.SEAL, "the checksum is another")
        return body
    if magic != SEALED or len(view) < len(SEALED) + SALT_BYTES + TAG_BYTES:
        raise DamagedBlock(Damage.SEAL, "not sealed")
    return memoryview(_decrypt(keys.seal, name, view[len(SEALED) :]))


def _decrypt(key: bytes, name: str, view: memoryview) -> bytearray:
    from cryptography.exceptions import InvalidTag

    cipher, pieces = _cipher(key, name, bytes(view[:SALT_BYTES])), view[SALT_BYTES:]
    step = PIECE_BYTES + TAG_BYTES
    num_pieces = max(1, -(-len(pieces) // step))
    body = bytearray(max(0, len(pieces) - num_pieces * TAG_BYTES))
    for number in range(num_pieces):
        piece = pieces[number * step : (number + 1) * step]
        try:
            opened = cipher.decrypt(_nonce(number, is_last=number == num_pieces - 1), piece, SEALED + name.encode())
        except InvalidTag:
            raise DamagedBlock(Damage.SEAL, "the seal is broken, or of another secret") from None
        body[number * PIECE_BYTES : number * PIECE_BYTES + len(opened)] = opened
        _rest(num_pieces)
    return body


def _cipher(key: bytes, name: str, salt: bytes) -> AESGCM:
    return aes_gcm()(blake3(salt + name.encode(), key=key).digest())


def aes_gcm() -> type[AESGCM]:
    """Import the cipher class; ConfigError if the package is missing."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ConfigError(f"Sealed blocks need the package cryptography. Install it with: {EXTRA}") from None
    return AESGCM


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11, "little") + bytes([is_last])


def _digest(name: str, body: bytes | bytearray | memoryview) -> bytes:
    return blake3(PLAIN + name.encode()).update(body).digest()


def _rest(num_pieces: int) -> None:
    if num_pieces > 1:
        time.sleep(REST_S)
