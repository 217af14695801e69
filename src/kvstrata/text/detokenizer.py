"""Token ids to text, one at a time, never half a character.

Knows one reply. Does not know stop strings, tool calls (except that special tokens inside one are text) or HTTP.
The pieces join to exactly what the tokenizer makes of all the ids at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvstrata.text.fast import decode_slowly, fast_tokenizer
from kvstrata.text.special import SpecialTokens, special_tokens
from kvstrata.text.tokens import token_bytes

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Decode = Callable[[list[int]], str]
Step = Callable[[int], str | None]

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
# Each waiting token is decoded again with the next one. A character has at most 4 bytes, so only a run of broken bytes
# or of real U+FFFD gets here.
_MAX_WAITING = 64


class Detokenizer:
    """One for each running reply.

    `prompt_tail`: the last ids of the prompt, where the reply continues its text (plain completions): a first word
    keeps its space. Leave it empty for chat. `special`: `special_tokens(tokenizer)`, made once for a model.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, prompt_tail: Sequence[int] = (), *, special: SpecialTokens | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special or special_tokens(tokenizer)
        self._in_call = False
        self._decode, self._open = _ways_to_decode(tokenizer)
        self._clean = self._context(prompt_tail)  # ids whose text is complete: what follows is decoded after them
        self._waiting: list[int] = []  # ids whose text is not
        self._step = self._open(self._clean)

    def add(self, token_id: int) -> str:
        """What has become showable, maybe nothing."""
        return self._feed(token_id) if self._shows(token_id) else ""

    def finish(self) -> str:
        """The rest. A character that was cut off shows as U+FFFD: the cut is seen, nothing is silently lost."""
        text = self._after_clean(self._waiting)
        self._waiting = []
        return text

    def _feed(self, token_id: int) -> str:
        self._waiting.append(token_id)
        try:
            text = self._step(token_id)
        except Exception:  # noqa: BLE001 the Rust stream raises plain Exception when new bytes change older text
            return self._restart(len(self._waiting))
        if text is None:
            return self._restart(self._num_complete()) if len(self._waiting) >= _MAX_WAITING else ""
        self._clean, self._waiting = self._waiting, []
        return text

    def _shows(self, token_id: int) -> bool:
        special = self._special
        if token_id in special.call_start:
            self._in_call = True
        elif token_id in special.call_end:
            self._in_call = False
        return token_id not in (special.ending if self._in_call else special.hidden)

    def _context(self, prompt_tail: Sequence[int]) -> list[int]:
        context = [id for id in prompt_tail[-_CONTEXT_TOKENS:] if id not in self._special.hidden]
        return [] if self._decode(context).endswith(_REPLACEMENT) else context

    def _after_clean(self, ids: list[int]) -> str:
        before = self._decode(self._clean)
        whole = self._decode(self._clean + ids)
        return whole[len(before) :] if whole.startswith(before) else self._decode(ids)

    def _num_complete(self) -> int:
        """How many of the waiting ids end with a whole character; all of them where no such place exists."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        num_complete = 0
        for num_ids, id in enumerate(self._waiting, start=1):
            decoder.decode(token_bytes(self._tokenizer, id))
            incomplete, _ = decoder.getstate()
            num_complete = num_complete if incomplete else num_ids
        return num_complete or len(self._waiting)

    def _restart(self, num_shown: int) -> str:
        """Show some of what waits, and let the rest wait in a new stream."""
        shown, kept = self._waiting[:num_shown], self._waiting[num_shown:]
        text = self._after_clean(shown)
        if not text.endswith(_REPLACEMENT):
            self._clean = shown
        self._step = self._open(self._clean)
        self._waiting = []
        return text + "".join(self._feed(id) for id in kept)


def _ways_to_decode(tokenizer: TokenizerWrapper) -> tuple[Decode, Callable[[list[int]], Step]]:
    """Decode many ids at once; and open a stream, given the ids before it."""
    fast = fast_tokenizer(tokenizer)
    if fast is None:
        decode = partial(decode_slowly, tokenizer)
        return decode, lambda ids: _WindowStream(decode, ids).step
    return partial(fast.decode, skip_special_tokens=False), partial(_rust_stream, fast)


def _rust_stream(fast: Tokenizer, ids: list[int]) -> Step:
    return partial(DecodeStream(ids=ids, skip_special_tokens=False).step, fast)


class _WindowStream:
    """What DecodeStream does, for tokenizers without a Rust one: decode the last complete ids and those after them."""

    def __init__(self, decode: Decode, ids: list[int]) -> None:
        self._decode = decode
        self._clean = ids
        self._waiting: list[int] = []

    def step(self, token_id: int) -> str | None:
        self._waiting.append(token_id)
        before = self._decode(self._clean)
        whole = self._decode(self._clean + self._waiting)
        if len(whole) <= len(before) or whole.endswith(_REPLACEMENT):
            return None
        if not whole.startswith(before):
            raise ValueError("new ids changed older text")
        self._clean, self._waiting = self._waiting, []
        return whole[len(before) :]
