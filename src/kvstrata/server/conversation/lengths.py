"""Length limits of prompts and replies. Refuses a prompt that cannot fit before it is tokenized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstrata.errors import BodyTooLarge, ContextTooLong
from kvstrata.server.conversation.body import max_values, num_values
from kvstrata.server.service import Service
from kvstrata.text.messages import Message


def require_possible_text(service: Service, text: str) -> None:
    require_possible_chars(service, len(text), param="prompt")


def require_possible_chat(service: Service, messages: Sequence[Message]) -> None:
    # Some templates leave the thinking out of assistant messages; all other messages are in the prompt.
    num_chars = sum(_num_chars(message.get("content")) for message in messages if message["role"] != "assistant")
    require_possible_chars(service, num_chars, param="messages")
    _require_few_values(service, messages)


def reply_tokens(service: Service, num_prompt: int, asked: int | None, *, param: str) -> int:
    """Return the maximum length of the reply: the requested one, limited to the rest of the context."""
    context = service.context_tokens
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


def _require_few_values(service: Service, messages: Sequence[Message]) -> None:
    """Raise BodyTooLarge if the arguments of calls have too many JSON values: they are JSON strings that are parsed
    when the template renders them."""
    found, most = sum(map(num_values, _arguments(messages))), max_values(service.max_items)
    if found > most:
        raise BodyTooLarge(
            f"The arguments of the tool calls have more than the {most} JSON values that this server reads at a time. "
            "Leave out older calls.",
            param="messages",
        )


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


def require_possible_chars(service: Service, num_chars: int, *, param: str) -> None:
    """Raise ContextTooLong if the text exceeds the context even with the longest tokens of the vocabulary."""
    least_tokens = num_chars // service.longest_token_chars
    if least_tokens >= service.context_tokens:
        raise ContextTooLong(
            f"The prompt has at least {least_tokens} tokens and the context holds {service.context_tokens}, the reply "
            "included. Send a shorter prompt.",
            param=param,
            num_tokens=least_tokens,
            max_tokens=service.context_tokens - 1,
        )
