"""Rendered chats to token ids: pieces of earlier prompts are not tokenized again.

The next prompt of an agent is its last one and a turn more, and tokenizing 100,000 tokens takes as long as many decode
steps. Tokenizers cut a text at special tokens first, so text that begins with one has the same ids wherever it stands.
Each tokenizer is tried before this is relied on.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from kvstrata.text.special_escapes import SpecialTokenEscapes
from kvstrata.text.tokenizer import encode_rendered, encode_rendered_all, fast_tokenizer

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

MOST_BYTES = 16 << 20  # of all cached pieces

ENTRY_BYTES = 400  # of a cached piece beside its ids: its key, and the overhead of Python's objects

LEAST_CHARS = 32  # tokenizing a shorter piece takes no longer than looking it up

DIGEST_BYTES = 16


class IncrementalTokenizer:
    """Tokenizer of rendered texts that caches the ids of their pieces.

    `samples`: texts as the template writes them. Pieces begin at the special tokens of these texts and where `escapes`
    cut; the text between two cuts is tokenized as a text of its own.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, samples: Sequence[str], escapes: SpecialTokenEscapes | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._escapes = escapes or SpecialTokenEscapes(())
        self._known = _RememberedPieces()
        self._marks = _marks(tokenizer, samples)
        if any(self(sample) != encode_rendered(tokenizer, sample) for sample in samples):
            self._marks = None

    @property
    def cuts(self) -> bool:
        """Whether texts are cut at all."""
        return self._marks is not None

    def __call__(self, text: str, salt: str = "") -> tuple[int, ...]:
        """Tokenize a rendered text. Pieces remembered for one salt are never found for another."""
        whole = self._escapes.split(text)
        if self._marks is None:
            return tuple(chain.from_iterable(encode_rendered_all(self._tokenizer, whole)))
        pieces = [piece for each in whole for piece in _cut(each, self._marks)]
        keys = [_digest(salt, piece) if len(piece) >= LEAST_CHARS else None for piece in pieces]
        found: list[Sequence[int] | None] = [None if key is None else self._known.get(key) for key in keys]
        missing = {piece: key for piece, key, ids in zip(pieces, keys, found, strict=True) if ids is None}
        made = dict(zip(missing, encode_rendered_all(self._tokenizer, list(missing)), strict=True))
        for piece, key in missing.items():
            if key is not None:
                self._known.put(key, made[piece])
        return tuple(
            chain.from_iterable(made[piece] if ids is None else ids for piece, ids in zip(pieces, found, strict=True))
        )


def _cut(text: str, marks: re.Pattern[str]) -> list[str]:
    starts = [match.start() for match in marks.finditer(text)]
    return [text[a:b] for a, b in pairwise([0, *starts, len(text)]) if a < b]


class _RememberedPieces:
    """LRU cache of the ids of pieces."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: bytes) -> list[int] | None:
        with self._lock:
            ids = self._ids.get(key)
            if ids is None:
                return None
            self._ids.move_to_end(key)
        return ids.tolist()

    def put(self, key: bytes, ids: Sequence[int]) -> None:
        held = np.array(ids, np.uint32)
        with self._lock:
            if key in self._ids or ENTRY_BYTES + held.nbytes > MOST_BYTES:
                return
            self._ids[key] = held
            self.num_bytes += ENTRY_BYTES + held.nbytes
            while self.num_bytes > MOST_BYTES:
                _, oldest = self._ids.popitem(last=False)
                self.num_bytes -= ENTRY_BYTES + oldest.nbytes


def _digest(salt: str, text: str) -> bytes:
    return blake3(f"{len(salt)}:{salt}{text}".encode()).digest(length=DIGEST_BYTES)


def _marks(tokenizer: TokenizerWrapper, samples: Sequence[str]) -> re.Pattern[str] | None:
    """Return a pattern of the special tokens in these texts that the tokenizer finds at any place; None: none are."""
    fast = fast_tokenizer(tokenizer)
    if fast is None or fast.encode_special_tokens:
        return None
    # The tokenizer looks for other added tokens later, in the text between these.
    exact = [token for token in fast.get_added_tokens_decoder().values() if not token.normalized]
    if any(token.single_word for token in exact):
        return None
    names = [token.content for token in exact]
    marks = [
        token.content
        for token in exact
        # A token that strips the spaces before it would begin earlier than its match.
        if token.special and not token.lstrip and any(token.content in sample for sample in samples)
    ]
    alone = [mark for mark in marks if not any(_hides(name, mark) for name in names)]
    return re.compile("|".join(map(re.escape, alone))) if alone else None


def _hides(token: str, mark: str) -> bool:
    """Whether this token may be found in place of the mark: it contains the mark, or its end overlaps its beginning."""
    if token == mark:
        return False
    starts = (mark[:size] for size in range(1, len(mark)))
    return mark in token or any(token.endswith(start) and token != start for start in starts)
