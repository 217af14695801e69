"""Token ids of an mlx-lm prompt cache, computed from the prompt that its owner remembers.

`mlx_lm.cache_prompt` renders one user message without the generation prompt and leaves the message open. Runs on a
worker thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstrata.engine.cache_api import TokenIds, as_ids
from kvstrata.errors import InvalidRequest
from kvstrata.server.conversation.lengths import require_possible_text
from kvstrata.server.service import Service
from kvstrata.text.tokenizer import encode_prompt, require_unicode


def ids_of_prompt(service: Service, prompt: Mapping[str, Any]) -> TokenIds:
    """Return the ids of a prompt given as `tokens`, `messages`, or `text`: a user message, or plain text with `raw`."""
    given = [name for name in ("tokens", "messages", "text") if prompt.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest("Give the prompt as one of tokens, messages and text.", param="prompt")
    tokens, messages, text = (prompt.get(name) for name in ("tokens", "messages", "text"))
    if tokens is not None:
        return _ids(tokens)
    if messages is None:
        if not isinstance(text, str):
            raise InvalidRequest("The prompt's text is no text.", param="prompt")
        require_possible_text(service, text)
        require_unicode(text, param="prompt")
        if prompt.get("raw") or not service.template.exists:
            return _ids(list(encode_prompt(service.loaded.tokenizer, text)))
        messages = [{"role": "user", "content": text}]
    return _ids(_rendered(service, messages))


def _rendered(service: Service, messages: Any) -> list[int]:
    if not service.template.exists:
        raise InvalidRequest("This model has no chat template. Give the prompt as plain text, or as tokens.")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise InvalidRequest("messages must be a list of objects with role and content.", param="messages")
    try:
        rendered: Any = service.loaded.tokenizer.apply_chat_template(
            messages, add_generation_prompt=False, continue_final_message=True
        )
    except Exception as error:
        # A template is the model maker's code: it may raise any exception for messages that it does not expect.
        raise InvalidRequest(f"The chat template cannot show these messages: {error}", param="messages") from error
    return list(rendered)


def _ids(tokens: Any) -> TokenIds:
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise InvalidRequest("tokens must be a list of whole numbers.", param="tokens")
    try:
        return as_ids(tokens)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"tokens: {error}.", param="tokens") from error
