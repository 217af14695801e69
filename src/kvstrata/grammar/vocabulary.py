"""Vocabulary: a model's tokens as llguidance sees them. Built on first use, which takes seconds; thread-safe.

No text of a grammar matches an added token that is special or written <like this>; only its id does. Other added
tokens are text to llguidance.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from llguidance import LLTokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kvstrata.errors import InvalidRequest
from kvstrata.text.tokenizer import hf_tokenizer

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_NOT_AVAILABLE = "This model's replies cannot be held to a schema or grammar: {}. Leave the constraint out."
_BLANKS = re.compile("[\\s\u2581]*")  # sentencepiece writes a space like this


class Vocabulary:
    def __init__(self, tokenizer: TokenizerWrapper, vocab_size: int, eos_ids: Iterable[int]) -> None:
        """`vocab_size`: number of logits, padding included."""
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()  # guards the next one
        self._native: LLTokenizer | None = None

    def native(self) -> LLTokenizer:
        """Return llguidance's tokenizer. Raises InvalidRequest when llguidance does not support this tokenizer."""
        with self._lock:
            if self._native is None:
                self._native = self._make()
            return self._native

    def pieces(self, text: str) -> list[str | int]:
        """Split a text into plain text and the ids of added tokens, as the tokenizer does."""
        found: list[str | int] = []
        at = 0
        for match in self._added.finditer(text):
            found += [text[at : match.start()], self._added_ids[match[0]]]
            at = match.end()
        return [piece for piece in (*found, text[at:]) if piece != ""]

    @cached_property
    def _added_ids(self) -> dict[str, int]:
        fast = self._fast()
        added = {token.content: id_ for id_, token in fast.get_added_tokens_decoder().items()} if fast else {}
        # Runs of blanks may be added tokens too. They are text: a model may write them in other ways.
        return {text: id_ for text, id_ in added.items() if not _BLANKS.fullmatch(text) and id_ < self.vocab_size}

    @cached_property
    def _added(self) -> re.Pattern[str]:
        longest_first = sorted(self._added_ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def _fast(self) -> Tokenizer | None:
        hf = hf_tokenizer(self._tokenizer)
        return hf.backend_tokenizer if isinstance(hf, PreTrainedTokenizerFast) else None

    def _make(self) -> LLTokenizer:
        fast = self._fast()
        if fast is None:
            raise _not_available("its tokenizer is not a fast one (it has no tokenizer.json)")
        eos_ids = [id_ for id_ in self._eos_ids if id_ < self.vocab_size]
        if not eos_ids:
            raise _not_available("it has no end-of-sequence token")
        # A tokenizer may have more tokens than the model has logits.
        num_tokens = max(self.vocab_size, fast.get_vocab_size(with_added_tokens=True))
        try:
            return LLTokenizer(_spec(fast), n_vocab=num_tokens, eos_token=eos_ids)
        except ValueError as error:
            raise _not_available(f"llguidance does not take its tokenizer ({str(error)[:200]})") from error


def _not_available(why: str) -> InvalidRequest:
    return InvalidRequest(_NOT_AVAILABLE.format(why))


def _spec(fast: Tokenizer) -> str:
    """Return tokenizer.json without padding and truncation."""
    if fast.padding is None and fast.truncation is None:
        return fast.to_str()
    return json.dumps({**json.loads(fast.to_str()), "padding": None, "truncation": None})
