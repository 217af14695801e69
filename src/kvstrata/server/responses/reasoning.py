"""Reasoning text in items that clients send back.

OpenAI's API hides reasoning in `encrypted_content`, which clients return even if they drop its text. Here it contains
the plain text, encoded as base64: the text is the client's own, and dropping it changes the prompt and loses cache
hits.
"""

from __future__ import annotations

import base64
import binascii

from kvstrata.server.responses.schema import Part, ReasoningItem, TextPart

OURS = "kvstrata1."


def packed(thinking: str) -> str:
    return OURS + base64.b64encode(thinking.encode("utf-8", "replace")).decode()


def thinking_of(item: ReasoningItem) -> str:
    """Return the reasoning text of an item. Encrypted content of other servers cannot be read; the summary is used
    instead."""
    told = _texts(item.content) or _unpacked(item.encrypted_content or "")
    return told or _texts(item.summary)


def _texts(parts: list[Part] | None) -> str:
    return "\n\n".join(part.text for part in parts or () if isinstance(part, TextPart))


def _unpacked(content: str) -> str:
    if not content.startswith(OURS):
        return ""
    try:
        return base64.b64decode(content.removeprefix(OURS), validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return ""
