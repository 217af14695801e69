"""What agents' prompts share is measured by their text, however it is tokenized and spaced."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstrata.text.tokenizer import encode_rendered
from tests.agents.forced import Prompt, Said, forced_model
from tests.agents.long_errand import Turn, odd, odd_call, shared_tokens, thinks_long, turns_of

PROMPT = "x-anthropic-billing-header: cch=1;\nRun the errand, please."
REPLY = thinks_long("I make the file") + "First  the file:\n\n" + odd_call("bash", {"command": "echo naïve"})
NONE = Prompt((), ())


def ids_of(*pieces: str) -> tuple[int, ...]:
    return tuple(id for piece in pieces for id in encode_rendered(forced_model().tokenizer, piece))


def said(prompt: str, reply: Sequence[str], cached_tokens: int = 0) -> Said:
    return Said(ids_of(prompt), NONE, "".join(reply), ids_of(*reply), cached_tokens)


def test_a_model_has_tokens_of_its_own() -> None:
    assert "".join(odd(REPLY)) == REPLY
    assert ids_of(*odd(REPLY)) != ids_of(REPLY)


SAME = {
    "as it was": PROMPT + REPLY,
    "spaced otherwise": PROMPT + REPLY.replace('",  "arguments"', '", "arguments"').replace("  ", " "),
    "another nonce": PROMPT.replace("cch=1", "cch=23456") + REPLY,
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_text_is_shared_whatever_its_tokens_are(name: str) -> None:
    last, now = said(PROMPT, odd(REPLY)), said(SAME[name] + "<|im_end|>\nWell.", [])
    assert shared_tokens(forced_model().tokenizer, last, now) == len(ids_of(SAME[name]))


def test_another_word_ends_what_is_shared() -> None:
    changed = PROMPT + REPLY.replace("First", "Second")
    shared = shared_tokens(forced_model().tokenizer, said(PROMPT, odd(REPLY)), said(changed, []))
    before = ids_of(PROMPT + thinks_long("I make the file"))
    assert shared == len(before)


def test_what_was_cached_counts_as_far_as_it_is_shared() -> None:
    tokenizer = forced_model().tokenizer
    whole = len(ids_of(PROMPT + REPLY))
    chat = [said(PROMPT, odd(REPLY)), said(PROMPT + REPLY + "<|im_end|>", [], len(ids_of(PROMPT)))]
    assert turns_of(tokenizer, chat) == [Turn(whole + 1, whole, len(ids_of(PROMPT)))]
    assert turns_of(tokenizer, chat)[0].again == len(ids_of(REPLY))
    assert Turn(100, 50, 80).rate == 1
    assert Turn(100, 50, 40).rate == 0.8
