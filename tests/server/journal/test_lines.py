"""A line for each request: three APIs, streamed or not, errors and clients that leave; ids; never a prompt's text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.agents.forced import Forced, Prompt, call_text, serving
from tests.server.anthropic.conftest import client_of
from tests.server.journal.conftest import Lines
from tests.support.raw_http import completion, connected
from tests.support.servers import Served

SECRET = "the quince is yellow"


def script(prompt: Prompt) -> str:
    last = prompt.turns[-1].text
    return call_text("look", {"at": "x"}) if last == "call" else "Yes, it is so."


@pytest.fixture(scope="module")
def forced() -> Iterator[Forced]:
    with serving(script) as one:
        yield one


@pytest.fixture
def served(forced: Forced, lines: Lines) -> Served:
    del lines  # they begin here
    return forced.served


def check_reply(lines: Lines, path: str, *, stream: bool) -> dict[str, Any]:
    level, line, fields = lines.next()
    assert level == "INFO"
    assert (fields["method"], fields["path"], fields["status"], fields["stream"]) == ("POST", path, 200, stream)
    assert fields["prompt_tokens"] > fields["cached_tokens"] >= 0
    assert fields["miss"] in ("new", "complete", "diverged", "empty")
    assert fields["completion_tokens"] > 1
    assert 0 < fields["first_token_s"] <= fields["seconds"]
    assert fields["tokens_per_s"] > 0
    assert "error" not in fields
    assert line.startswith(f"POST {path} 200 in ")
    for word in (f"prompt {fields['prompt_tokens']:,}", "cached", "first token", "/s", f"[{fields['request_id']}]"):
        assert word in line
    assert "quince" not in line + str(fields)
    assert lines.is_empty()
    return fields


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions(served: Served, lines: Lines, stream: bool) -> None:
    with served.openai() as client:
        made = client.chat.completions.with_raw_response.create(
            model=served.name, messages=[{"role": "user", "content": SECRET}], stream=stream
        )
        if stream:
            list(made.parse())
        fields = check_reply(lines, "/v1/chat/completions", stream=stream)
    assert made.headers["x-request-id"] == fields["request_id"]


@pytest.mark.parametrize("stream", [False, True])
def test_messages(served: Served, lines: Lines, stream: bool) -> None:
    with client_of(served) as client:
        made = client.messages.with_raw_response.create(
            model="claude-x", max_tokens=50, messages=[{"role": "user", "content": SECRET}], stream=stream
        )
        if stream:
            list(made.parse())
        fields = check_reply(lines, "/v1/messages", stream=stream)
    # Anthropic's clients show the id of `request-id`, OpenAI's that of `x-request-id`.
    assert made.headers["x-request-id"] == made.headers["request-id"] == fields["request_id"]


@pytest.mark.parametrize("stream", [False, True])
def test_responses(served: Served, lines: Lines, stream: bool) -> None:
    with served.openai() as client:
        made = client.responses.with_raw_response.create(model=served.name, input=SECRET, stream=stream)
        if stream:
            list(made.parse())
        check_reply(lines, "/v1/responses", stream=stream)


def test_where_a_prompt_parted_is_a_number_in_the_log(served: Served, lines: Lines) -> None:
    def ask(day: str) -> None:
        messages = [{"role": "system", "content": f"Today is {day}."}, {"role": "user", "content": SECRET}]
        served.ask("/v1/chat/completions", messages=messages).raise_for_status()

    ask("Monday")
    lines.next()
    ask("Tuesday")
    _, line, fields = lines.next()
    assert fields["diverged_in"] == "prompt"
    assert f"(diverged at {fields['diverged_at']})" in line
    assert "Tuesday" not in line + str(fields)


def test_several_prompts_and_choices_add_up(served: Served, lines: Lines) -> None:
    body = {"prompt": [[5] * 40, [6] * 50], "max_tokens": 3, "n": 2}
    usage = served.ask("/v1/completions", **body).json()["usage"]
    _, _, fields = lines.next()
    assert fields["prompt_tokens"] == usage["prompt_tokens"] == 90
    assert fields["completion_tokens"] == usage["completion_tokens"]
    assert fields["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("my-id.1:x/y=+_", True),
        ("my-id;1", False),
        ("a" * 128, True),
        ("a" * 129, False),
        ("two words", False),
        ("", False),
        ("-starts-badly", False),
    ],
)
def test_a_sane_id_is_kept(served: Served, lines: Lines, given: str, is_kept: bool) -> None:
    with served.http() as http:
        answered = http.get("/v1/models", headers={"x-request-id": given}).headers.get_list("x-request-id")
    assert len(answered) == 1
    assert (answered[0] == given) is is_kept
    assert lines.next()[2]["request_id"] == answered[0]


def test_ids_are_never_the_same(served: Served, lines: Lines) -> None:
    with served.http() as http:
        ids = {http.get("/health").headers["x-request-id"] for _ in range(20)}
    assert len(ids) == 20
    assert all(lines.next()[0] == "DEBUG" for _ in range(20))


@pytest.mark.parametrize("path", ["/health", "/", "/dashboard/main.js", "/metrics", "/cache/usage", "/props"])
def test_what_watches_is_quiet(served: Served, lines: Lines, path: str) -> None:
    with served.http() as http:
        assert http.get(path).status_code == 200
    level, line, _ = lines.next()
    assert (level, line.partition(" in ")[0]) == ("DEBUG", f"GET {path} 200")


def test_errors_have_their_code(served: Served, lines: Lines) -> None:
    served.ask("/v1/chat/completions", model="other", messages=[{"role": "user", "content": SECRET}])
    level, line, fields = lines.next()
    assert (level, fields["status"], fields["error"]) == ("INFO", 404, "model_not_found")
    assert "404" in line
    assert "model_not_found" in line
    served.ask("/v1/messages", messages=[])
    assert lines.next()[2]["status"] == 400
    served.ask("/v1/completions", prompt=[5] * 10, max_tokens=0)
    assert lines.next()[2]["status"] == 400
    with served.http() as http:
        http.get("/nothing")
    level, _, fields = lines.next()
    assert (level, fields["error"]) == ("INFO", "not_found")


def test_a_path_begins_no_line_of_its_own(served: Served, lines: Lines) -> None:
    with served.http() as http:
        http.get("/a%0AERROR:%20forged%1b[31m")
    _, line, fields = lines.next()
    assert fields["path"] == "/a?ERROR: forged?[31m"
    assert "\n" not in line


def test_a_prompt_that_is_too_long_for_a_stream_of_responses(served: Served, lines: Lines) -> None:
    context = served.server.state.limits.context_tokens
    with served.openai() as client:
        *_, last = client.responses.create(model=served.name, input="a b " * context, stream=True)
    assert last.type == "response.failed"
    level, _, fields = lines.next()
    assert (level, fields["status"], fields["error"]) == ("INFO", 200, "context_length_exceeded")


def test_a_client_that_leaves(served: Served, lines: Lines) -> None:
    endless = {"max_tokens": 400, "stream": True, "ignore_eos": True}
    with connected(served) as line:
        line.sendall(completion(served, **endless))
        assert line.recv(1)
    level, text, fields = lines.next()
    assert (level, fields["status"], fields["error"]) == ("INFO", 499, "client_gone")
    assert fields["prompt_tokens"] == 10
    assert " 499 in " in text


def test_a_defect_is_a_warning_with_its_id(served: Served, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(type(served.server.state), "answers_to", broken)
    response = served.ask("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    assert response.status_code == 500
    level, _, fields = lines.next()
    assert (level, fields["status"], fields["error"]) == ("WARNING", 500, "internal_error")
    assert response.headers["x-request-id"] == fields["request_id"]


def test_an_id_comes_with_every_kind_of_answer(served: Served, lines: Lines) -> None:
    del lines
    with served.http() as http:
        asked: list[httpx.Response] = [
            http.head("/"),
            http.request("OPTIONS", "/v1/models"),
            http.get("/v1/models", headers={"host": "evil.example"}),
            http.post("/v1/completions", content=b"x" * 10, headers={"content-encoding": "br"}),
        ]
    assert [response.status_code for response in asked] == [200, 405, 403, 415]
    assert all(response.headers["x-request-id"].startswith("req_") for response in asked)
