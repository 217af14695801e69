"""Thinking: its tags, the parser of a reply, and the template variable that switches thinking.

The parser reads text: a model that mentions `<think>` writes the same token as a model that thinks. The position
decides: thinking begins at the beginning of the reply, or in the prompt. A variable without effect is never set,
because it would give equal prompts different keys.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstrata.text.reply_events import ReplyText, ReplyThinking
from kvstrata.text.tokenizer import encode_rendered, hf_tokenizer, token_bytes
from kvstrata.text.tool_calls.answer_text import AnswerText, OfferedTools, Steps, mark, space, until

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from kvstrata.text.template import ChatTemplate

_OPENING_TOKENS = 32  # at the end of a prompt, where a template may open the thinking of the reply

_LINE_BREAKS = "\r\n"

_THOUGHT = "kvstrata_probe_thought"

_TAG_BEFORE = re.compile(r"([<\[][^<>\[\]\s]+[>\]])\s*$")

_TAG_AFTER = re.compile(r"\s*([<\[][^<>\[\]\s]+[>\]])")

_TAGS_IN_SOURCE = re.compile(r"<[\w:]*(?:think|thought|reason)[\w:]*>|\[[A-Z_]*THINK[A-Z_]*\]")

_OTHER_WORDS = (("START", "END"), ("start", "end"), ("BEGIN", "END"), ("begin", "end"))

_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_EFFORTS = ("none", "minimal", "low", "medium", "high")
_HIGHER = ("xhigh", "max")  # levels of some clients above high
_UNKNOWN = "kvstrata-probe"
_USUAL = ("low", "medium", "high")  # assumed where a template takes any word


@dataclass(frozen=True)
class ThinkingTags:
    start: str
    end: str


def thinking_tags(tokenizer: TokenizerWrapper) -> ThinkingTags | None:
    """Return the thinking tags; None: the model has none. Call it once for a model: it renders the template.

    What the template writes around reasoning in the history comes first, then pairs of tags in its source, then what
    mlx-lm knows by the vocabulary alone.
    """
    if shown := _shown_tags(tokenizer):
        return shown
    start, end = getattr(tokenizer, "think_start", None), getattr(tokenizer, "think_end", None)
    of_vocabulary = ThinkingTags(start, end) if start and end else None
    source = _source(tokenizer)
    if of_vocabulary and of_vocabulary.start in source:
        return of_vocabulary
    for tag in _TAGS_IN_SOURCE.findall(source):
        if (end := f"{tag[0]}/{tag[1:]}") in source:
            return ThinkingTags(tag, end)
    return of_vocabulary


def opens_thinking(tokenizer: TokenizerWrapper, tags: ThinkingTags, prompt: Sequence[int]) -> bool:
    """Whether the prompt ends inside thinking. Text behind the tag means that a message mentions the tag."""
    tail = b"".join(token_bytes(tokenizer, id) for id in prompt[-_OPENING_TOKENS:]).decode("utf-8", "replace")
    return tail.rstrip().endswith(tags.start)


def end_ids(tokenizer: TokenizerWrapper, tags: ThinkingTags) -> tuple[int, ...]:
    """Return the tokens of the closing tag; none, where they depend on the text around it."""
    ids = encode_rendered(tokenizer, tags.end)
    added = hf_tokenizer(tokenizer).added_tokens_decoder
    return ids if ids and ids[0] in added and ids[-1] in added else ()


class ThinkingParser:
    """Parser that divides one reply into thinking and answer. `is_open`: the prompt ends inside thinking.

    Line breaks behind the opening tag and around the closing one belong to neither side.
    """

    def __init__(self, tags: ThinkingTags, *, is_open: bool) -> None:
        self._tags = tags
        self._reading = AnswerText(OfferedTools(()))
        self._is_answer = False
        self._steps = self._reply(is_open=is_open)
        next(self._steps)

    def add(self, text: str) -> list[ReplyText | ReplyThinking]:
        if not text or self._is_answer:
            return [ReplyText(text)] if text else []
        self._reading.more(text)
        next(self._steps)
        return self._events()

    def finish(self) -> list[ReplyText | ReplyThinking]:
        self._reading.ended = True
        next(self._steps, None)
        return self._events()

    def _events(self) -> list[ReplyText | ReplyThinking]:
        events, self._reading.events = self._reading.events, []
        return [event for event in events if isinstance(event, ReplyText | ReplyThinking)]

    def _reply(self, *, is_open: bool) -> Steps[None]:
        reading = self._reading
        while True:
            reading.hold()
            begin = reading.place
            yield from space(reading)
            if (yield from mark(reading, (self._tags.start,))):
                reading.drop()
            elif is_open:
                reading.back(begin)
                reading.drop()
            else:
                break
            is_open = False
            yield from space(reading, _LINE_BREAKS)
            thought = _Thought(reading)
            found = yield from until(reading, (self._tags.end,), thought.add)
            if not found:
                return thought.finish()
            yield from space(reading, _LINE_BREAKS)
            if thought.has_begun:
                break
        reading.release()
        self._is_answer = True
        while (yield from reading.look()):
            reading.say(reading.text[reading.pos :])
            reading.pos = len(reading.text)


class _Thought:
    """Writer of thinking events, which leaves out the line breaks at the end."""

    def __init__(self, reading: AnswerText) -> None:
        self._reading = reading
        self._line_breaks: list[str] = []
        self.has_begun = False

    def add(self, text: str) -> None:
        if body := text.rstrip(_LINE_BREAKS):
            self._give("".join(self._line_breaks) + body)
            self._line_breaks = []
        self._line_breaks.append(text[len(body) :])

    def finish(self) -> None:
        self._give("".join(self._line_breaks))

    def _give(self, text: str) -> None:
        if text:
            self.has_begun = True
            self._reading.events.append(ReplyThinking(text))


def _shown_tags(tokenizer: TokenizerWrapper) -> ThinkingTags | None:
    # Templates name it differently, and most show it only in the last turn.
    thought: dict[str, Any] = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)
    chat = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "C", **thought}]
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False))
    except Exception:  # noqa: BLE001 a template is the model's own code and may raise anything
        return None
    before, found, after = text.partition(_THOUGHT)
    start, end = _TAG_BEFORE.search(before), _TAG_AFTER.match(after)
    if not found or not start or not end or not _is_pair(start[1], end[1]):
        return None
    return ThinkingTags(start[1], end[1])


def _is_pair(start: str, end: str) -> bool:
    if end == f"{start[0]}/{start[1:]}":
        return True
    return any(one in start and start.replace(one, other) == end for one, other in _OTHER_WORDS)


def _source(tokenizer: TokenizerWrapper) -> str:
    template = getattr(hf_tokenizer(tokenizer), "chat_template", None)
    if isinstance(template, dict):
        return "\n".join(str(one) for one in template.values())
    return template if isinstance(template, str) else ""


class ThinkingSwitch:
    """Template variables that switch thinking. Make it once for a model."""

    def __init__(self, template: ChatTemplate) -> None:
        self._switches = tuple(name for name in _SWITCHES if _differs(template, name, (True, False)))
        self._efforts = _known_efforts(template)

    def switch(self, effort: str | None, enabled: bool | None) -> dict[str, Any]:
        """Return the template variables that have an effect. `effort`: none, minimal, low, medium or high."""
        effort = "high" if effort in _HIGHER else effort
        if enabled is False or (enabled is None and effort == "none"):
            variables: dict[str, Any] = dict.fromkeys(self._switches, False)
            effort = "none"
        elif enabled or effort in _EFFORTS:
            variables = dict.fromkeys(self._switches, True)
            effort = "minimal" if effort == "none" else effort
        else:
            return {}
        if effort in _EFFORTS and self._efforts and not (effort == "none" and self._switches):
            variables[_EFFORT] = _nearest(effort, self._efforts)
        return variables


def _differs(template: ChatTemplate, name: str, values: tuple[Any, Any]) -> bool:
    texts = [template.shown_with({name: value}) for value in values]
    return all(texts) and texts[0] != texts[1]


def _known_efforts(template: ChatTemplate) -> tuple[str, ...]:
    """Return the effort words that the template knows; none, if it does not use any."""
    texts = {effort: template.shown_with({_EFFORT: effort}) for effort in (*_EFFORTS, _UNKNOWN)}
    takes_any = _UNKNOWN in texts.pop(_UNKNOWN)
    known = tuple(effort for effort in (_USUAL if takes_any else _EFFORTS) if texts[effort])
    return known if len({texts[effort] for effort in known}) > 1 else ()


def _nearest(effort: str, known: Sequence[str]) -> str:
    """Return the nearest known effort; of two equally near the higher one."""
    place = _EFFORTS.index(effort)
    return min(known, key=lambda one: (abs(_EFFORTS.index(one) - place), -_EFFORTS.index(one)))
