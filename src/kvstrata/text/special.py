"""Special tokens: those that a reply shows as text, and those that only a template may write.

Special tokens are control signs and hidden, with two exceptions: those that tool calls and thinking are marked with,
and everything inside a tool call, because mlx-lm's parsers look for special tokens there (Mistral's [ARGS], Gemma's
quotes, Kimi's argument marks).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata.text.fast import hf_tokenizer
from kvstrata.text.thinking import thinking_tags
from kvstrata.text.tokens import token_text

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# Without these marks the channels of a gpt-oss reply would run into one another.
_HARMONY = frozenset(("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"))


@dataclass(frozen=True)
class SpecialTokens:
    hidden: frozenset[int]  # not shown outside of a tool call
    ending: frozenset[int]  # never shown: the end-of-sequence ids
    call_start: frozenset[int]  # tokens that begin a tool call by themselves
    call_end: frozenset[int]


def special_tokens(tokenizer: TokenizerWrapper) -> SpecialTokens:
    """Takes a while (some 1 us for each added token, and renders the template): once for a model, not for a reply."""
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
    """All of them, by id."""
    hf = hf_tokenizer(tokenizer)
    names = {id: token.content for id, token in hf.added_tokens_decoder.items() if token.special}
    return names | dict(zip(hf.all_special_ids, hf.all_special_tokens, strict=True))


def control_names(tokenizer: TokenizerWrapper, samples: Iterable[str]) -> frozenset[str]:
    """Tokens that only a template may write: special ones, and those around the turns of `samples`, rendered chats,
    which some tokenizers add without calling them special."""
    added = {token.content for token in hf_tokenizer(tokenizer).added_tokens_decoder.values()}
    chats = "\n".join(samples)
    around_turns = {name for name in added if name in chats} - reply_marks(tokenizer)
    return frozenset(special_names(tokenizer).values()) | around_turns


def reply_marks(tokenizer: TokenizerWrapper) -> frozenset[str]:
    """The tokens around thinking and calls, which a reply shows as text and clients send back in it. Harmony's are not
    among them: turns are written with them too."""
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
