"""How C++ programs hash strings, as GNU's standard library does it on 64 bits: MurmurHash64A. It is no secret, and it
runs backwards: any text can be given an end with which it has the hash of another one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

_SEED = 0xC70F6907
_FACTOR = 0xC6A4A7935BD1E995
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_MASK = (1 << 64) - 1
_WORD = 8  # bytes


def string_hash(text: bytes) -> int:
    """std::hash<std::string>"""
    whole = len(text) - len(text) % _WORD
    state = _after(_words(text[:whole]), len(text))
    if whole < len(text):
        state = (state ^ int.from_bytes(text[whole:], "little")) * _FACTOR & _MASK
    return _folded(_folded(state) * _FACTOR & _MASK)


def hashed_alike(text: bytes, other: bytes) -> bytes:
    """`text`, zeros up to a whole word, and a word with which it has the hash of `other`."""
    padded = text + bytes(-len(text) % _WORD)
    # Backwards from the end: what the state has to be after the last word, then which word makes it so.
    wanted = _folded(_folded(string_hash(other)) * _INVERSE & _MASK)
    mixed = (wanted * _INVERSE & _MASK) ^ _after(_words(padded), len(padded) + _WORD)
    word = _folded(mixed * _INVERSE & _MASK) * _INVERSE & _MASK
    return padded + struct.pack("<Q", word)


def _after(words: Iterable[int], length: int) -> int:
    """The state, from the beginning of a text of `length` bytes."""
    state = _SEED ^ length * _FACTOR & _MASK
    for word in words:
        state = (state ^ _folded(word * _FACTOR & _MASK) * _FACTOR & _MASK) * _FACTOR & _MASK
    return state


def _words(text: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(text) // _WORD}Q", text)


def _folded(word: int) -> int:
    """Done twice, it changes nothing."""
    return word ^ word >> 47
