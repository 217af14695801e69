"""The parser for a model's replies: a `ReplyFormat` for each model makes a parser for each reply.

Knows the tokenizer, the template and Harmony's tokens. Does not know APIs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstrata.text.harmony import FINAL, HarmonyParser, HarmonyTokens
from kvstrata.text.reply_events import ReplyEvent, ReplyParser, ReplyText, join_events
from kvstrata.text.sampled_reply import ReplyAnalyzer, ReplyContent, SampledReply, content_of_reply
from kvstrata.text.stop import StopMatcher
from kvstrata.text.template_probe import CallText, find_call_text
from kvstrata.text.thinking import ThinkingParser, ThinkingTags, end_ids, opens_thinking, thinking_tags
from kvstrata.text.tokenizer import decode_ids, encode_rendered
from kvstrata.text.tool_calls.answer_text import OfferedTools
from kvstrata.text.tool_calls.native_calls import NativeCallFormat, _parser_name, native_call_format
from kvstrata.text.tool_calls.scanner import ToolCallScanner
from kvstrata.text.tools_in_prompt import described_call_text

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from kvstrata.text.template import ChatTemplate


class ReplyFormat:
    """`calls`: how calls are written, in a word or some. `shows_tools`: the template itself shows tools; otherwise they
    are described in the system text. `thinks`: the model may think before it answers. `think_end_ids`: the tokens that
    end thinking; empty: there is no thinking, or no tokens that always end it. `has_channels`: replies are messages in
    channels (Harmony). `ending_ids` end a reply of this form, `break_ids` part its text.
    """

    def __init__(self, tokenizer: TokenizerWrapper, template: ChatTemplate, harmony: HarmonyTokens | None) -> None:
        self._tokenizer = tokenizer
        self._harmony = harmony
        self._tags: ThinkingTags | None = None if harmony else thinking_tags(tokenizer)
        self.thinks: bool = harmony is not None or self._tags is not None
        self._anatomy = ReplyAnalyzer(tokenizer, self._tags, harmony)
        self._markers = tuple(getattr(tokenizer, "structural_markers", ()) or ())
        self.shows_tools: bool = template.has_tools
        self._call_text = self._written_calls(template)
        self._native = native_call_format(tokenizer, self._call_text)
        self.calls: str = self._word(template)
        self.think_end_ids: tuple[int, ...] = end_ids(tokenizer, self._tags) if self._tags else ()
        self.has_channels = harmony is not None
        self.ending_ids: frozenset[int] = harmony.ending if harmony else frozenset()
        self.break_ids: frozenset[int] = harmony.ids if harmony else frozenset()
        self._final_ids = encode_rendered(tokenizer, FINAL) if harmony else ()

    def parser(
        self, prompt: Sequence[int], tools: Sequence[dict[str, Any]], *, answers_at_once: bool = False
    ) -> ReplyParser:
        """Return a parser for one reply.

        `tools`: in OpenAI's form; without tools only thinking is parsed. `answers_at_once`: a grammar leaves no room
        for the thinking that the prompt opens.
        """
        offered = OfferedTools(tools)
        if self._harmony is not None:
            return HarmonyParser(self._tokenizer, self._harmony, prompt, offered)
        is_open = not answers_at_once and self.opens_thinking(prompt)
        thinking = ThinkingParser(self._tags, is_open=is_open) if self._tags else None
        return PlainParser(offered, self._native, thinking, self._markers)

    def opens_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends inside thinking, so that the reply begins there."""
        return self._tags is not None and opens_thinking(self._tokenizer, self._tags, prompt)

    def thinks_unseen(self, prompt: Sequence[int]) -> bool:
        """Whether the reply begins inside thinking that no token always ends."""
        return self.opens_thinking(prompt) and not self.think_end_ids

    def sampled(self, ids: Sequence[int], visible: ReplyContent, prompt: Sequence[int]) -> SampledReply:
        """`ids`: what the client was shown of a reply to this prompt, and `visible` what it saw."""
        return self._anatomy.sampled(ids, visible, opened=self.opens_thinking(prompt))

    def trimmed(self, sampled: SampledReply, visible: ReplyContent) -> SampledReply | None:
        """Return the reply without the white space around its text, as some clients keep it.

        None: the text has none, or no token boundary separates it.
        """
        return self._anatomy.trimmed(sampled, visible.content)

    def proven(
        self, claimed: SampledReply, visible: ReplyContent, tools: Sequence[dict[str, Any]]
    ) -> SampledReply | None:
        """Return a reply with the places of its parts; None: its ids do not say `visible`, which others claim."""
        said = content_of_reply(self._read_anew(claimed, tools))
        whole = self._anatomy.sampled(claimed.ids, said, opened=claimed.opened)
        if said.digest == visible.digest:
            return whole
        is_trimmed = replace(said, content=said.content.strip()).digest == visible.digest
        return self._anatomy.trimmed(whole, said.content) if is_trimmed else None

    def _read_anew(self, sampled: SampledReply, tools: Sequence[dict[str, Any]]) -> list[ReplyEvent]:
        if self._harmony is None:
            thinking = ThinkingParser(self._tags, is_open=sampled.opened) if self._tags else None
            reader = PlainParser(OfferedTools(tools), self._native, thinking, self._markers)
            return [*reader.add(decode_ids(self._tokenizer, list(sampled.ids))), *reader.finish()]
        header = encode_rendered(self._tokenizer, "<|start|>assistant")
        channels = HarmonyParser(self._tokenizer, self._harmony, header, OfferedTools(tools))
        events: list[ReplyEvent] = []
        begin = 0
        for place, id in enumerate(sampled.ids):
            if id in self._harmony.names:
                events += channels.add(decode_ids(self._tokenizer, list(sampled.ids[begin:place])), (id,))
                begin = place + 1
        events += channels.add(decode_ids(self._tokenizer, list(sampled.ids[begin:])))
        return [*events, *channels.finish()]

    def before_answer(self, prompt: Sequence[int], *, is_call: bool) -> tuple[int, ...]:
        """Return the tokens that a reply must contain before its answer can begin. `is_call`: the answer is a call."""
        if self.has_channels:
            return () if is_call else self._final_ids
        return self.think_end_ids if self.opens_thinking(prompt) else ()

    def call_text(self, name: str) -> tuple[str, str] | None:
        """The text before and after the JSON arguments of a call to `name`, as the template writes calls. None where
        the template's form is no JSON.
        """
        return self._call_text.around(name) if self._call_text else None

    def _written_calls(self, template: ChatTemplate) -> CallText | None:
        if not template.has_tools:
            return described_call_text()
        return find_call_text(template, self._tokenizer.tool_call_start or "", self._tokenizer.tool_call_end or "")

    def _word(self, template: ChatTemplate) -> str:
        if not template.has_tools:
            return "described in the system text"
        if self._harmony is not None:
            return "harmony"
        native = self._native
        if _parser_name(self._tokenizer) == "qwen3_coder":
            return f"xml in {native.start}"
        if native.kind == "headers":
            return f"json behind {native.start}"
        if native.kind in ("tagged", "whole"):
            return f"{_parser_name(self._tokenizer)} in {native.start}"
        return f"json in {native.start}" if native.start else "bare json"


class PlainParser:
    """Parser of replies that are plain text: thinking first, then the answer, with calls where tools were offered."""

    def __init__(
        self,
        offered: OfferedTools,
        native: NativeCallFormat | None = None,
        thinking: ThinkingParser | None = None,
        markers: tuple[str, ...] = (),
    ) -> None:
        self._thinking = thinking
        self._answer = ToolCallScanner(offered, native) if offered.tools else None
        self._markers = markers
        self._matcher = StopMatcher(markers)

    def add(self, text: str, _ids: Sequence[int] = (), /) -> list[ReplyEvent]:
        parts = self._thinking.add(text) if self._thinking else [ReplyText(text)]
        return join_events(event for part in parts for event in self._part(part))

    def finish(self, *, cut_off: bool = False) -> list[ReplyEvent]:
        parts = self._thinking.finish() if self._thinking else []
        events = [event for part in parts for event in self._part(part)]
        events += self._said(self._matcher.finish())
        return join_events([*events, *(self._answer.finish(cut_off=cut_off) if self._answer else ())])

    def _part(self, part: ReplyEvent) -> list[ReplyEvent]:
        return self._without_markers(part.text) if isinstance(part, ReplyText) else [part]

    def _without_markers(self, text: str) -> list[ReplyEvent]:
        """Remove marks that frame the whole answer (Kimi K3's)."""
        if not self._markers:
            return self._said(text)
        events: list[ReplyEvent] = []
        while text:
            found = self._matcher.add(text)
            events += self._said(found.text)
            text = found.rest
            if found.stopped:
                self._matcher = StopMatcher(self._markers)
        return events

    def _said(self, text: str) -> list[ReplyEvent]:
        return self._answer.add(text) if self._answer else [ReplyText(text)]
