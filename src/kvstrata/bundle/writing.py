"""Makes a bundle piece by piece, so that it can be sent while it is made. Knows no files: pieces of bytes come out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from blake3 import blake3

from kvstrata.bundle.format import LENGTH, Header, encode_header
from kvstrata.disk.checksum import Checksum
from kvstrata.disk.format import encode
from kvstrata.tier.block import Block

# Of what is handed on at once.
PIECE_BYTES = 1 << 20


class BundleWriter:
    def __init__(self, header: Header) -> None:
        self._beginning = encode_header(header)
        self._digest = blake3()

    def begin(self) -> Iterator[memoryview]:
        yield from self._hashed([memoryview(self._beginning)])

    def block(self, block: Block) -> Iterator[memoryview]:
        encoded = encode(block, Checksum.BLAKE3)
        yield from self.record(encoded.pieces, encoded.nbytes)

    def record(self, pieces: Iterable[memoryview], nbytes: int) -> Iterator[memoryview]:
        yield from self._hashed([memoryview(LENGTH.pack(nbytes)), *pieces])

    def end(self) -> Iterator[memoryview]:
        yield from self._hashed([memoryview(LENGTH.pack(0))])
        yield memoryview(self._digest.digest())

    def _hashed(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            for start in range(0, piece.nbytes, PIECE_BYTES):
                stride = piece[start : start + PIECE_BYTES]
                self._digest.update(stride)
                yield stride
