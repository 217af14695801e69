"""Refuses a prompt that cannot fit, before the work of rendering and tokenizing it."""

from __future__ import annotations

from collections.abc import Iterable

from kvstrata.errors import ContextTooLong
from kvstrata.server.openai.schema import Message, TextPart
from kvstrata.server.service import Service


def require_possible_text(service: Service, text: str) -> None:
    _require_possible(service, len(text), param="prompt")


def require_possible_chat(service: Service, messages: Iterable[Message]) -> None:
    # Of what the model said before some templates leave its thoughts out; all the rest is in the prompt.
    num_chars = sum(_num_chars(message) for message in messages if message.role != "assistant")
    _require_possible(service, num_chars, param="messages")


def _num_chars(message: Message) -> int:
    if isinstance(message.content, list):
        return sum(len(part.text) for part in message.content if isinstance(part, TextPart))
    return len(message.content or "")


def _require_possible(service: Service, num_chars: int, *, param: str) -> None:
    least_tokens = num_chars // service.longest_token_chars
    if least_tokens >= service.context_tokens:
        raise ContextTooLong(
            f"The prompt has at least {least_tokens} tokens and the context holds {service.context_tokens}, the reply "
            "included. Send a shorter prompt.",
            param=param,
        )
