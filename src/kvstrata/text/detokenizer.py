"""Incremental detokenizer: token ids to text, never half a character.

The pieces join to the text of all ids decoded at once. Special tokens are hidden, with two exceptions: tokens that mark
tool calls and thinking, and every special token between a call's start and end tokens, because mlx-lm's parsers look
for special tokens there (Mistral's [ARGS], Gemma's quotes, Kimi's argument marks).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvstrata.text.thinking import thinking_tags
from kvstrata.text.tokenizer import decode_slowly, fast_tokenizer, hf_tokenizer, token_bytes, token_text

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# Without these marks the channels of a gpt-oss reply would run into one another.
_HARMONY = frozenset(("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"))

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
# Each waiting token is decoded again with the next one. A character has at most 4 bytes, so only a run of invalid bytes
# or of real U+FFFD reaches this bound.
_MAX_WAITING = 64


@dataclass(frozen=True)
class SpecialTokens:
    hidden: frozenset[int]  # not shown outside of a tool call
    ending: frozenset[int]  # never shown: the end-of-sequence ids
    call_start: frozenset[int]  # tokens that begin a tool call by themselves
    call_end: frozenset[int]


def special_tokens(tokenizer: TokenizerWrapper) -> SpecialTokens:
    """Classify the special tokens of a model.

    Call it once for a model, not for a reply: it takes about 1 us for each added token, and renders the template.
    """
    names = special_names(tokenizer)
    marks = _marks(tokenizer)
    shown = {id for id, name in names.items() if any(name in mark for mark in marks)}
    if {"<|channel|>", "<|message|>"} <= set(names.values()):
        shown |= {id for id, name in names.items() if name in _HARMONY}
    ending = frozenset(getattr(tokenizer, "eos_token_ids", ()) or ())
    return SpecialTokens(
        hidden=frozenset(names) - shown | (ending & names.keys()),
        ending=ending & names.keys(),
        call_start=_alone(getattr(tokenizer, "tool_call_start_tokens", None)),
        call_end=_alone(getattr(tokenizer, "tool_call_end_tokens", None)),
    )


def special_names(tokenizer: TokenizerWrapper) -> dict[int, str]:
    """Return the text of every special token, by id."""
    hf = hf_tokenizer(tokenizer)
    names = {id: token.content for id, token in hf.added_tokens_decoder.items() if token.special}
    return names | dict(zip(hf.all_special_ids, hf.all_special_tokens, strict=True))


def control_names(tokenizer: TokenizerWrapper, samples: Iterable[str]) -> frozenset[str]:
    """Return the tokens that only a template may write.

    These are the special tokens, and the added tokens around the turns of `samples` (rendered chats), which some
    tokenizers do not declare as special.
    """
    added = {token.content for token in hf_tokenizer(tokenizer).added_tokens_decoder.values()}
    chats = "\n".join(samples)
    around_turns = {name for name in added if name in chats} - reply_marks(tokenizer)
    return frozenset(special_names(tokenizer).values()) | around_turns


def reply_marks(tokenizer: TokenizerWrapper) -> frozenset[str]:
    """Return the tokens around thinking and calls, which a reply shows as text and clients send back in it.

    Harmony's tokens are not among them, because they also frame turns.
    """
    ending = {token_text(tokenizer, id) for id in getattr(tokenizer, "eos_token_ids", ()) or ()}
    return frozenset(mark.strip() for mark in _call_and_thinking_marks(tokenizer) if mark) - _HARMONY - ending


def _call_and_thinking_marks(tokenizer: TokenizerWrapper) -> list[str | None]:
    names = ("tool_call_start", "tool_call_end", "think_start", "think_end")
    marks = [getattr(tokenizer, name, None) for name in names]
    if tags := thinking_tags(tokenizer):
        marks += (tags.start, tags.end)
    return marks


def _marks(tokenizer: TokenizerWrapper) -> list[str]:
    marks = _call_and_thinking_marks(tokenizer)
    marks += getattr(tokenizer, "structural_markers", ())
    transitions = getattr(tokenizer, "response_transitions", {})
    marks += [mark for rules in transitions.values() for mark, _ in rules]
    return [mark for mark in marks if mark]


def _alone(ids: tuple[int, ...] | None) -> frozenset[int]:
    # A mark of several tokens needs no state: all its special tokens are shown anyway.
    return frozenset(ids) if ids is not None and len(ids) == 1 else frozenset()


Decode = Callable[[list[int]], str]

Step = Callable[[int], str | None]


class Detokenizer:
    """Turn the token ids of one reply into text.

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
        self._clean = self._context(prompt_tail)  # ids whose text is complete: later ids are decoded after them
        self._waiting: list[int] = []  # ids whose text is incomplete
        self._step = self._open(self._clean)

    def add(self, token_id: int) -> str:
        """Return the text that this token completes; it may be empty."""
        return self._feed(token_id) if self._shows(token_id) else ""

    def finish(self) -> str:
        """Return the remaining text. An incomplete character becomes U+FFFD, so that the cut is visible."""
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
        """Return the number of waiting ids up to the last complete character; all of them if there is none."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        num_complete = 0
        for num_ids, id in enumerate(self._waiting, start=1):
            decoder.decode(token_bytes(self._tokenizer, id))
            incomplete, _ = decoder.getstate()
            num_complete = num_complete if incomplete else num_ids
        return num_complete or len(self._waiting)

    def _restart(self, num_shown: int) -> str:
        """Return the text of the first `num_shown` waiting ids, and decode the other ones in a new stream."""
        shown, kept = self._waiting[:num_shown], self._waiting[num_shown:]
        text = self._after_clean(shown)
        if not text.endswith(_REPLACEMENT):
            self._clean = shown
        self._step = self._open(self._clean)
        self._waiting = []
        return text + "".join(self._feed(id) for id in kept)


def _ways_to_decode(tokenizer: TokenizerWrapper) -> tuple[Decode, Callable[[list[int]], Step]]:
    """Return a function that decodes many ids at once, and one that opens a stream after given ids."""
    fast = fast_tokenizer(tokenizer)
    if fast is None:
        decode = partial(decode_slowly, tokenizer)
        return decode, lambda ids: _WindowStream(decode, ids).step
    return partial(fast.decode, skip_special_tokens=False), partial(_rust_stream, fast)


def _rust_stream(fast: Tokenizer, ids: list[int]) -> Step:
    return partial(DecodeStream(ids=ids, skip_special_tokens=False).step, fast)


class _WindowStream:
    """A decode stream like tokenizers' DecodeStream, for tokenizers without a Rust implementation."""

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
