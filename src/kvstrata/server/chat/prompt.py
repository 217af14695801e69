"""Rendering of a chat to token ids, with its limits and a record of the changes made.

Pure except for the memory of earlier replies. Runs on a worker thread: a long chat takes a while to render.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvstrata.engine.request import PinRequest
from kvstrata.errors import BodyTooLarge, ContextTooLong, InvalidRequest
from kvstrata.server.chat.reply_memory import SampledReplies
from kvstrata.server.chat.request import ChatRequest
from kvstrata.server.http.body_limit import max_values, num_values
from kvstrata.sizes import Size
from kvstrata.text.messages import Message
from kvstrata.text.template import ChatTemplate, TemplatePrompt
from kvstrata.text.thinking import ThinkingSwitch

# Claude Code's billing line: it changes each turn and means nothing to a model.
NONCES = ("x-anthropic-billing-header:",)
SYSTEM = ("system", "developer")
# Items of a list in a body that are allowed with any context size.
MIN_ITEMS = 1 << 14


@dataclass(frozen=True)
class PromptLimits:
    """Limits of prompts and replies. Refuses a prompt that cannot fit before it is tokenized."""

    context_tokens: int
    longest_token_chars: int

    @property
    def max_items(self) -> int:
        """Most items of a list in a body. Each message or id takes at least one token of context; the factor 2 lets a
        prompt that is slightly too long get an error with its length."""
        return max(MIN_ITEMS, 2 * self.context_tokens)

    def check_chars(self, num_chars: int, *, param: str) -> None:
        """Raise ContextTooLong if a text exceeds the context even with the longest tokens of the vocabulary."""
        least_tokens = num_chars // self.longest_token_chars
        if least_tokens >= self.context_tokens:
            raise ContextTooLong(
                f"The prompt has at least {least_tokens} tokens and the context holds {self.context_tokens}, the reply "
                "included. Send a shorter prompt.",
                param=param,
                num_tokens=least_tokens,
                max_tokens=self.context_tokens - 1,
            )

    def check_messages(self, messages: Sequence[Message]) -> None:
        # Some templates leave the thinking out of assistant messages; all other messages are in the prompt.
        num_chars = sum(_num_chars(message.get("content")) for message in messages if message["role"] != "assistant")
        self.check_chars(num_chars, param="messages")
        self._check_arguments(messages)

    def reply_tokens(self, num_prompt: int, asked: int | None, *, param: str) -> int:
        """Return the maximum length of the reply: the requested one, limited to the rest of the context."""
        context = self.context_tokens
        if num_prompt >= context:
            raise ContextTooLong(
                f"The prompt has {num_prompt} tokens and the context holds {context}, the reply included. "
                "Send a shorter prompt.",
                param=param,
                num_tokens=num_prompt,
                max_tokens=context - 1,
            )
        left = context - num_prompt
        return left if asked is None else min(asked, left)

    def _check_arguments(self, messages: Sequence[Message]) -> None:
        """Raise BodyTooLarge if the arguments of calls have too many JSON values: they are JSON strings that are parsed
        when the template renders them."""
        found, most = sum(map(num_values, _arguments(messages))), max_values(self.max_items)
        if found > most:
            raise BodyTooLarge(
                f"The arguments of the tool calls have more than the {most} JSON values that this server reads at a "
                "time. Leave out older calls.",
                param="messages",
            )


@dataclass(frozen=True)
class RenderedPrompt:
    """A chat as token ids."""

    ids: tuple[int, ...]
    resume_at: tuple[int, ...] = ()  # token positions at which later requests are likely to diverge
    hygiene: Mapping[str, int] = field(default_factory=dict)  # number of uses of each rule (`stabilize`)
    replayed_turns: int = 0  # replies whose sampled tokens were reused
    replayed_tokens: int = 0
    pin: PinRequest | None = None  # the part to pin, and for how long

    @property
    def notes(self) -> dict[str, str]:
        """Return the notes for the miss header."""
        replayed = {"replayed": str(self.replayed_turns)} if self.replayed_turns else {}
        return {**replayed, "hygiene": "+".join(self.hygiene)} if self.hygiene else replayed


@dataclass(frozen=True)
class TemplateInput:
    """A chat as input of a template."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any] | None
    hygiene: Mapping[str, int]


@dataclass(frozen=True)
class PromptRenderer:
    """Renders chats with one template. A fleet's router renders without replies and limits (`render_plain`)."""

    template: ChatTemplate
    thinking: ThinkingSwitch
    stable_prompts: bool = True  # see `stabilize`
    limits: PromptLimits | None = None
    replies: SampledReplies | None = None  # None: replies are rendered by the template
    resumes_at_checkpoints: bool = False
    pin_quota: Size | None = None

    def render(self, chat: ChatRequest, salt: str) -> RenderedPrompt:
        """Return the prompt of a chat. Replies that the server remembers keep the ids that were sampled."""
        template = self.template.for_salt(salt)
        given = self._template_input(chat)
        if self.limits is not None:
            self.limits.check_messages(given.messages)
        prompt = self._render_with_replies(template, given, salt)
        resume_at: tuple[int, ...] = ()
        if self.resumes_at_checkpoints:
            resume_at = template.resume_points(
                given.messages, given.tools, template_kwargs=given.template_kwargs, prompt=prompt.ids
            )
        pin = self._pin(chat, template, given, prompt.ids)
        return RenderedPrompt(prompt.ids, resume_at, given.hygiene, prompt.replayed_turns, prompt.replayed_tokens, pin)

    def render_plain(self, chat: ChatRequest, salt: str) -> tuple[int, ...]:
        """Return the ids of a chat with every reply in the template's own form."""
        given = self._template_input(chat)
        template = self.template.for_salt(salt)
        return template.render(given.messages, tools=given.tools, template_kwargs=given.template_kwargs)

    def _template_input(self, chat: ChatRequest) -> TemplateInput:
        if not self.template.exists:
            raise InvalidRequest(
                "This model has no chat template. Use POST /v1/completions with a prompt, or serve an instruct model.",
                code="no_chat_template",
            )
        messages, hygiene = stabilize(chat.messages) if self.stable_prompts else (chat.messages, Counter[str]())
        switched = self.thinking.switch(chat.thinking.effort, chat.thinking.enabled)
        return TemplateInput(
            messages, list(chat.tools_in_prompt) or None, {**switched, **chat.template_kwargs} or None, hygiene
        )

    def _render_with_replies(self, template: ChatTemplate, given: TemplateInput, salt: str) -> TemplatePrompt:
        source = self.replies
        replies = [source.find_reply(salt, message, given.tools) for message in given.messages] if source else []
        check_chars = partial(self.limits.check_chars, param="messages") if self.limits is not None else None
        if source is None or not any(replies):
            ids = template.render(
                given.messages, tools=given.tools, template_kwargs=given.template_kwargs, check_chars=check_chars
            )
            return TemplatePrompt(ids)
        return template.render_with_replies(
            given.messages,
            replies,
            ending_ids=source.ending_ids,
            tools=given.tools,
            template_kwargs=given.template_kwargs,
            check_chars=check_chars,
        )

    def _pin(
        self, chat: ChatRequest, template: ChatTemplate, given: TemplateInput, ids: tuple[int, ...]
    ) -> PinRequest | None:
        """Return the pin request. The quota applies to every caller, even without keys: client libraries set a ttl
        without their users' knowledge, and on a local server such pins would fill the memory. POST /cache/pin is a
        user's own decision."""
        if chat.pin is None or self.pin_quota is None:
            return None
        end = len(ids)
        if chat.pin.up_to == "system":
            end = template.system_end(given.messages, given.tools, template_kwargs=given.template_kwargs, prompt=ids)
        return PinRequest(chat.pin.ttl_s, end, self.pin_quota) if end else None


def stabilize(messages: Sequence[Message]) -> tuple[list[Message], Counter[str]]:
    """Return the messages without what changes from turn to turn, and how often each rule was used.

    `nonce`: lines of a client that change each turn and mean nothing to a model are dropped. `system_in_place`: a
    system message after the first turn stays where it is (text/tools_in_prompt.py), even if the template would move it
    to the front."""
    used: Counter[str] = Counter()
    cleaned = [(message, _without_nonces(message, used)) for message in messages]
    kept = [after for before, after in cleaned if after is before or after["content"]]
    used["system_in_place"] += _num_later_systems(kept)
    return kept, +used


def _without_nonces(message: Message, used: Counter[str]) -> Message:
    content = message.get("content")
    if message.get("role") not in SYSTEM or not content:
        return message
    if isinstance(content, str):
        kept = _drop_nonces(content, used)
    else:
        texts = [(part, part.get("text")) for part in content]
        cleaned = [part | {"text": _drop_nonces(text, used)} if isinstance(text, str) else part for part, text in texts]
        kept = [part for part in cleaned if part.get("text") != ""]
    return message if kept == content else message | {"content": kept}


def _drop_nonces(text: str, used: Counter[str]) -> str:
    if not any(nonce in text for nonce in NONCES):
        return text
    lines = text.split("\n")
    kept = [line for line in lines if not line.startswith(NONCES)]
    used["nonce"] += len(lines) - len(kept)
    return "\n".join(kept)


def _num_later_systems(messages: Sequence[Message]) -> int:
    roles = [message.get("role") for message in messages]
    first = next((place for place, role in enumerate(roles) if role not in SYSTEM), len(roles))
    return sum(role in SYSTEM for role in roles[first:])


def _arguments(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                yield arguments


def _num_chars(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else []
    return sum(len(part.get("text") or "") for part in parts if isinstance(part, dict))
