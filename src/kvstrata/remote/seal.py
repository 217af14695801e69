"""Bytes that only servers with the secret can make or read, bound to the name that they lie under.

    8 bytes  magic: what it is, version, and whether it is sealed
   16 bytes  salt, random
  the rest   pieces of at most 1 MiB, each AES-256-GCM under a key of its own block

The key of a block is made from the secret, its name and the salt, so that a piece's number can be its nonce; the name
is associated data too. The last piece is marked in the nonce. So what is cut, reordered, moved to another name or made
without the secret does not open. Without a secret, which only a private store allows, the rest is a BLAKE3 digest of
name and body, and the body.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from blake3 import blake3

from kvstrata.errors import ConfigError
from kvstrata.remote.faults import Damage, DamagedBlock
from kvstrata.remote.secret import Keys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SEALED, PLAIN = b"kvsrem1s", b"kvsrem1p"
SALT_BYTES = 16
PIECE_BYTES = 1 << 20
TAG_BYTES = 16
DIGEST_BYTES = 32
# Between two pieces: the thread that computes gets the interpreter.
REST_S = 0.0001
EXTRA = "pip install 'kvstrata[remote]'"


def seal(keys: Keys, name: str, body: bytes | bytearray) -> bytes | bytearray:
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
    """Raises DamagedBlock for anything but what `seal` made under this name."""
    view = memoryview(sealed)
    magic = bytes(view[: len(SEALED)])
    if keys.seal is None:
        body = view[len(PLAIN) + DIGEST_BYTES :]
        if magic != PLAIN or bytes(view[len(PLAIN) : len(PLAIN) + DIGEST_BYTES]) != _digest(name, body):
            raise DamagedBlock(Damage.SEAL, "the checksum is another")
        return body
    if magic != SEALED or len(view) < len(SEALED) + SALT_BYTES + TAG_BYTES:
        raise DamagedBlock(Damage.SEAL, "not sealed")
    return memoryview(_opened(keys.seal, name, view[len(SEALED) :]))


def _opened(key: bytes, name: str, view: memoryview) -> bytearray:
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
    """The class, imported where it is needed."""
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
