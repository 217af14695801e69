"""Rendering of a conversation to the model's token ids, with a record of the changes made.

Pure except for the memory of earlier replies. Runs on a worker thread: a long chat takes a while to render.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.types import Scope

from kvstrata.engine.request import PinRequest
from kvstrata.errors import InvalidRequest
from kvstrata.server.auth import salt_of
from kvstrata.server.conversation.chat import Chat, PinWanted
from kvstrata.server.conversation.hygiene import Hygiene, tidied
from kvstrata.server.conversation.lengths import require_possible_chars, require_possible_chat
from kvstrata.server.service import Service
from kvstrata.text.messages import Message
from kvstrata.text.sampled_reply import SampledReply, content_of_message
from kvstrata.text.template import ChatTemplate, TemplatePrompt
from kvstrata.text.thinking import ThinkingSwitch


@dataclass(frozen=True)
class ChatPrompt:
    ids: tuple[int, ...]
    resume_at: tuple[int, ...] = ()  # token positions at which later requests are likely to diverge
    hygiene: Mapping[str, int] = field(default_factory=dict)  # number of uses of each rule
    replayed_turns: int = 0  # replies whose sampled tokens were reused
    replayed_tokens: int = 0
    pin: PinRequest | None = None  # the part to pin, and for how long

    @property
    def notes(self) -> dict[str, str]:
        """Return the notes for the miss header."""
        replayed = {"replayed": str(self.replayed_turns)} if self.replayed_turns else {}
        return {**replayed, "hygiene": "+".join(self.hygiene)} if self.hygiene else replayed


@dataclass(frozen=True)
class Renderer:
    """Renders chats: a template, its thinking settings and the hygiene rules."""

    template: ChatTemplate
    thinking: ThinkingSwitch
    hygiene: Hygiene

    def shown(self, chat: Chat) -> Shown:
        if not self.template.exists:
            raise InvalidRequest(
                "This model has no chat template. Use POST /v1/completions with a prompt, or serve an instruct model.",
                code="no_chat_template",
            )
        tidy = tidied(chat.messages, self.hygiene)
        switched = self.thinking.switch(chat.thinking.effort, chat.thinking.enabled)
        variables = {**switched, **chat.template_kwargs} or None
        return Shown(tidy.messages, list(tools_told(chat)) or None, variables, tidy.used)

    def render(self, shown: Shown, salt: str) -> tuple[int, ...]:
        """Render a chat with every reply in the template's own form."""
        template = self.template.for_salt(salt)
        return template.render(shown.messages, tools=shown.tools, template_kwargs=shown.variables)


@dataclass(frozen=True)
class Shown:
    """A chat as input of a template."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any] | None
    hygiene: Mapping[str, int]  # number of uses of each rule


def chat_prompt(service: Service, chat: Chat, scope: Scope) -> ChatPrompt:
    salt = salt_of(scope, chat.wanted.cache_salt)
    template = service.template.for_salt(salt)
    shown = Renderer(template, service.thinking, service.hygiene).shown(chat)
    require_possible_chat(service, shown.messages)
    prompt = _rendered(service, template, shown, salt)
    resume_at: tuple[int, ...] = ()
    if service.engine.resumes_at_checkpoints:
        resume_at = template.resume_points(
            shown.messages, shown.tools, template_kwargs=shown.variables, prompt=prompt.ids
        )
    pin = None
    if chat.pin is not None:
        end = len(prompt.ids)
        if chat.pin.up_to == "system":
            end = template.system_end(shown.messages, shown.tools, template_kwargs=shown.variables, prompt=prompt.ids)
        pin = _pinned(service, chat.pin, end)
    return ChatPrompt(prompt.ids, resume_at, shown.hygiene, prompt.replayed_turns, prompt.replayed_tokens, pin)


def _pinned(service: Service, wanted: PinWanted, end: int) -> PinRequest | None:
    """Return the pin request. The quota applies to every caller, even without keys: client libraries set a ttl without
    their users' knowledge, and on a local server such pins would fill the memory. POST /cache/pin is a user's own
    decision."""
    return PinRequest(wanted.ttl_s, end, service.pin_quota) if end else None


def tools_told(chat: Chat) -> tuple[dict[str, object], ...]:
    """Return the tools for the prompt; none if the model must not call any."""
    return () if chat.choice.mode == "none" else chat.tools


def _rendered(service: Service, template: ChatTemplate, shown: Shown, salt: str) -> TemplatePrompt:
    replies = [_reply_of(service, salt, message, shown.tools) for message in shown.messages]
    check_chars = partial(require_possible_chars, service, param="messages")
    if not any(replies):
        ids = template.render(
            shown.messages, tools=shown.tools, template_kwargs=shown.variables, check_chars=check_chars
        )
        return TemplatePrompt(ids)
    return template.render_with_replies(
        shown.messages,
        replies,
        ending_ids=service.ending_ids,
        tools=shown.tools,
        template_kwargs=shown.variables,
        check_chars=check_chars,
    )


def _reply_of(service: Service, salt: str, message: Message, tools: list[dict[str, Any]] | None) -> SampledReply | None:
    """Return the remembered reply that a message repeats. A reply from an imported conversation is parsed first to
    verify that its ids have this text: anyone may have written the file."""
    memory = service.replies
    if memory is None or message.get("role") != "assistant":
        return None
    found = memory.find(salt, message)
    if found is None or found.is_proven:
        return found
    visible = content_of_message(message)
    proven = service.form.proven(found, visible, tools or ())
    if proven is not None:
        memory.add(salt, visible, proven)
    return proven
