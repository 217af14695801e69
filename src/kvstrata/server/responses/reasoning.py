"""Reasoning that clients carry for us: what is in a reasoning item when it comes back.

OpenAI's API hides reasoning in `encrypted_content`, which clients return even where they drop its text. Here it is the
text itself: it is the client's own, and whoever drops it changes the prompt and loses what is cached.
"""

from __future__ import annotations

import base64
import binascii

from kvstrata.server.responses.schema import Part, ReasoningItem, TextPart

OURS = "kvstrata1."


def packed(thinking: str) -> str:
    return OURS + base64.b64encode(thinking.encode("utf-8", "replace")).decode()


def thinking_of(item: ReasoningItem) -> str:
    """Of others' encrypted content nothing is known: then the summary is the best that there is."""
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
