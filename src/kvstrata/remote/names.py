"""What blocks are called in a store. A name follows from the tokens; without the secret no one can tell which.

The chain of a conversation is made of runs of exactly 256 tokens from its first one on, under a root that includes the
back-end: CPU, CUDA and Metal round differently, so what one computed is not another's.
"""

from __future__ import annotations

from blake3 import blake3

from kvstrata.remote.secret import Keys
from kvstrata.tier.block import BLOCK_TOKENS, Chain
from kvstrata.tier.chains import Link, TokenIds

ROOT_DOMAIN = b"kvstrata remote root 1\0"
NUM_DIGITS = 64


class Names:
    def __init__(self, keys: Keys, precision: str, backend: str) -> None:
        self._key = keys.names
        self._precision = precision.encode()
        self._backend = backend.encode()

    def root(self, root: bytes) -> bytes:
        """Of a chain here, from what the chain's root is elsewhere."""
        return blake3(ROOT_DOMAIN + root + self._backend).digest()

    def of(self, key: bytes, part: str) -> str:
        """Every field is of fixed length or comes with its length, so that no two blocks have one name."""
        fields = (key, len(self._precision).to_bytes(2, "little"), self._precision, part.encode())
        return blake3(b"".join(fields), key=self._key).hexdigest()


def links_of(chain: Chain, root: bytes, ids: TokenIds) -> list[Link]:
    """The blocks of all whole runs of 256 tokens. None of them is known to be there."""
    links: list[Link] = []
    parent = root
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        end = start + BLOCK_TOKENS
        key = chain(parent, ids[start:end])
        links.append(Link(key, parent, start, end))
        parent = key
    return links


def is_name(text: str) -> bool:
    return len(text) == NUM_DIGITS and all(digit in "0123456789abcdef" for digit in text)
