"""/tokenize and /detokenize: the ids that /v1 computes, and back."""

from __future__ import annotations

from tests.support.servers import Served

HELLO = [{"role": "user", "content": "Hello, wörld 🙂"}]


def test_a_prompt_there_and_back(served: Served) -> None:
    told = served.ask("/tokenize", prompt="Hello, wörld 🙂", return_token_strs=True).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == served.server.state.limits.context_tokens
    assert served.ask("/detokenize", tokens=told["tokens"]).json() == {"prompt": "Hello, wörld 🙂"}


def test_messages_are_the_prompt_that_is_computed(served: Served) -> None:
    told = served.ask("/tokenize", messages=HELLO).json()
    usage = served.ask("/v1/chat/completions", messages=HELLO, max_tokens=1).json()["usage"]
    assert told["count"] == usage["prompt_tokens"]
    assert told["token_strs"] is None
    assert "Hello, wörld 🙂" in served.ask("/detokenize", tokens=told["tokens"]).json()["prompt"]


def test_what_makes_no_sense_is_refused(served: Served) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
    ):
        answer = served.ask(path, **body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
