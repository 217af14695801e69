"""Who may share cached state: everything that decides what a prompt's KV is, and the salt that keeps callers apart.

Knows plain values only; `models` makes the fingerprint. Precision is not part of it: spans say for themselves how they
are encoded, so a change of bits strands nothing.

A salt is its owner's, or that with more after a colon where one caller keeps things apart. All roots of an owner begin
alike: so memory and disk can tell whose something is without a list of salts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from blake3 import blake3

DOMAIN = "kvstrata identity 1"
OWNER_BYTES = 16


@dataclass(frozen=True)
class Identity:
    fingerprint: str  # of weights, tokenizer, template, config and adapter: models/fingerprint.py
    dtype: str  # what the model computes in
    layout: tuple[str, ...]  # each layer's kind, with what decides its shape, such as 'window:4096:4'
    max_kv_size: int | None = None  # tokens that a sequence keeps at most; None: all


def owner_of(salt: str) -> str:
    """Whose a salt is."""
    return salt.partition(":")[0]


def root_key(identity: Identity, salt: str) -> bytes:
    """32 bytes, the root of the tree that callers with this salt share. The first half is its owner's."""
    owner = owner_of(salt)
    own = _digest(identity, owner)
    return own if salt == owner else own[:OWNER_BYTES] + _digest(identity, salt)[OWNER_BYTES:]


def owner_key(identity: Identity, owner: str) -> bytes:
    """What all roots of an owner begin with."""
    return _digest(identity, owner)[:OWNER_BYTES]


@lru_cache(maxsize=256)
def _digest(identity: Identity, salt: str) -> bytes:
    """Every field is written with its length, so that no two identities spell the same bytes."""
    fields = [
        DOMAIN,
        identity.fingerprint,
        identity.dtype,
        str(len(identity.layout)),
        *identity.layout,
        "" if identity.max_kv_size is None else str(identity.max_kv_size),
        salt,
    ]
    digest = blake3()
    for field in fields:
        # A salt comes from a client's JSON, which may hold half a surrogate pair.
        encoded = field.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()
