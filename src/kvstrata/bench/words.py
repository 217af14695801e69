"""Text of a given number of tokens, the same for the same key. Knows no tokenizer.

Each word is one token in the vocabularies that were tried (SmolLM2, Qwen2.5, Gemma 3), so a text of so many words has
as many tokens. What a server really counted is in its answer's usage.
"""

from __future__ import annotations

import random

_LINES = (
    "the of and to in is that for it was on are as with his they at be this have from or had by but what some we can "
    "out other were all there when up use your how said an each she which do their time if will way about many then "
    "them write would like so these her long make thing see him two has look more day could go come did my no most "
    "people over know water than call first who may down side been now find any new work part take get place made "
    "live where after back little only round man year came show every good me give our under name very through just "
    "form great think say help low line before turn cause much mean right old too same tell set three want air well "
    "also play small end put home read hand port large even land here must big high such follow act why ask men "
    "change went light kind off need house picture try again animal point mother world near build self earth father "
    "head stand own page should country found answer school grow study still learn plant cover food sun four between"
)
WORDS = tuple(_LINES.split())


def text(key: str, num_tokens: int) -> str:
    """Other keys give texts that part within the first few words."""
    rng = random.Random(key)
    return " ".join(rng.choice(WORDS) for _ in range(num_tokens))


def count(words: str) -> int:
    """About as many tokens, for servers that do not tell."""
    return len(words.split())
