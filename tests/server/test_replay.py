"""Replies that come back unchanged: nothing of them is computed again, whatever the template would have written."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anthropic
import pytest

from kvstrata.engine.cache_api import TokenIds
from kvstrata.server.chat.reply_memory import ReplyMemory, SampledReplies
from kvstrata.text.harmony import harmony_tokens
from kvstrata.text.reply_parser import ReplyFormat
from kvstrata.text.sampled_reply import SampledReply, content_of_reply
from kvstrata.text.template import ChatTemplate
from kvstrata.text.tokenizer import decode_ids, encode_rendered
from tests.agents.forced import END, Forced, Form, Prompt, forced_tokenizer, serving
from tests.text.chat_templates import GPT_OSS, HARMONY, LLAMA, QWEN3

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {}}}},
}
TASK: dict[str, Any] = {"role": "user", "content": "Do it, please."}


@dataclass(frozen=True)
class Case:
    form: Form
    calls: Sequence[str]  # how the model writes a call: never as its template or tokenizer would
    answers: Sequence[str]
    keeps_thinking: bool = True  # while a tool's results come in


CASES = {
    "qwen3": Case(
        Form(QWEN3),
        ("<think>", "\nHm, ", "we", "ll.\n", "</think>", "\n\n", "I c", "all", ":\n", "<tool_call>", '\n{"na',
         'me":"f",', ' "arguments"', ':{"x":  "a  ', 'b"}}\n', "</tool_call>"),
        ("<think>", "\nDo", "ne.\n", "</think>", "\n\n", "All", " is", " d", "one."),
    ),
    "llama3": Case(Form(LLAMA), ('{"na', 'me": "f",', '  "parameters": {"x":', '1.0}', "}"), ("All", " is d", "one.")),
    "harmony": Case(
        Form(GPT_OSS, "<|return|>", tuple(HARMONY)),
        ("<|channel|>", "ana", "lysis", "<|message|>", "Hm, ", "we", "ll.", "<|end|>", "<|start|>", "assistant",
         "<|channel|>", "comm", "entary to=functions.f ", "<|constrain|>", "json", "<|message|>", '{"x":', '  "b"}',
         "<|call|>"),
        ("<|channel|>", "analysis", "<|message|>", "Do", "ne.", "<|end|>", "<|start|>", "assistant", "<|channel|>",
         "final", "<|message|>", "All", " is", " d", "one."),
    ),
}  # fmt: skip


def script(case: Case) -> Callable[[Prompt], Sequence[str]]:
    turns = iter([case.calls, case.answers, case.answers, case.answers])
    return lambda _prompt: next(turns)


def ask(forced: Forced, messages: list[Any], **more: Any) -> tuple[Any, int, str]:
    """The reply as a message to send back, what was cached, and what the header said."""
    with forced.served.openai() as client:
        create = client.chat.completions.with_raw_response.create
        raw = create(model="forced", messages=messages, tools=[TOOL], **more)  # pyright: ignore
    answer = raw.parse()
    message = answer.choices[0].message.model_dump(exclude_none=True)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return message, answer.usage.prompt_tokens_details.cached_tokens or 0, raw.headers["x-kvstrata-miss"]


def result_of(message: Any) -> Any:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "It went well."}


def shown_ids(forced: Forced, place: int) -> tuple[int, ...]:
    """A prompt and the reply to it, but for what ended that."""
    said = forced.said[place]
    ending = forced.served.server.state.ending_ids
    return (*said.ids, *(id for id in said.reply_ids if place != 0 or id not in ending))


@pytest.mark.parametrize("name", CASES)
def test_a_call_and_its_thinking_are_not_computed_again(name: str) -> None:
    case = CASES[name]
    with serving(script(case), case.form) as forced:
        called, _, first_miss = ask(forced, [TASK])
        assert called["tool_calls"][0]["function"]["name"] == "f"
        answered, cached, miss = ask(forced, [TASK, called, result_of(called)])
        before = shown_ids(forced, 0)
        assert forced.said[1].ids[: len(before)] == before
        assert cached >= len(before)
        assert "replayed=1" in miss
        assert "replayed" not in first_miss
        # The template strips thinking from here on, and no replay brings it back.
        chat = [TASK, called, result_of(called), answered, {"role": "user", "content": "And now?"}]
        ask(forced, chat)
        shown = forced.served.server.state.loaded.tokenizer.decode(list(forced.said[2].ids))
        assert "All is done." in shown
        assert "Done.\n" not in shown.replace("All is done.", "")


@pytest.mark.parametrize("name", CASES)
def test_without_replay_the_template_writes_it_anew(name: str) -> None:
    case = CASES[name]
    with serving(script(case), case.form, stable_prompts=False) as forced:
        called, _, _ = ask(forced, [TASK])
        _, cached, miss = ask(forced, [TASK, called, result_of(called)])
        before = shown_ids(forced, 0)
        assert len(forced.said[0].ids) - 1 <= cached < len(before)
        assert "replayed" not in miss


def test_visible_parts_come_back_where_thinking_is_stripped() -> None:
    """On the second time, they are found: the same ids stand behind the same prompt."""
    case = CASES["qwen3"]
    with serving(script(case), case.form) as forced:
        called, _, _ = ask(forced, [TASK])
        answered, _, _ = ask(forced, [TASK, called, result_of(called)])
        chat = [TASK, called, result_of(called), answered, {"role": "user", "content": "And now?"}]
        again, _, _ = ask(forced, chat)
        ids = list(forced.said[2].ids)
        for reply, start in ((case.calls, "I c"), (case.answers, "All")):
            said = next(said for said in forced.said if said.reply == "".join(reply))
            visible = said.reply_ids[-sum(len(encode(forced, piece)) for piece in reply[reply.index(start) :]) :]
            assert any(tuple(ids[at : at + len(visible)]) == visible for at in range(len(ids)))
        _, cached, _ = ask(forced, [*chat, again, {"role": "user", "content": "And then?"}])
        # All but the reply before, whose thinking went.
        assert cached >= len(ids) - 1


def encode(forced: Forced, text: str) -> tuple[int, ...]:
    return tuple(forced.served.server.state.loaded.tokenizer.encode(text, add_special_tokens=False))


EDITS: dict[str, Callable[[Any], None]] = {
    "text": lambda message: message.update(content=message["content"] + " "),
    "argument": lambda message: message["tool_calls"][0]["function"].update(arguments='{"x": "a b"}'),
    "more arguments": lambda message: message["tool_calls"][0]["function"].update(arguments='{"x": "a  b", "y": 1}'),
    "thinking": lambda message: message.update(reasoning_content="Hm."),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_was_changed_is_computed(edit: str) -> None:
    case = CASES["qwen3"]
    with serving(script(case), case.form) as forced:
        called, _, _ = ask(forced, [TASK])
        EDITS[edit](called)
        _, cached, miss = ask(forced, [TASK, called, result_of(called)])
        assert "replayed" not in miss
        assert cached < len(shown_ids(forced, 0))


def test_a_reply_that_a_client_trimmed_comes_back_without_its_space() -> None:
    """As aider sends replies."""
    case = CASES["qwen3"]
    with serving(lambda _prompt: ("\n", "One", " tw", "o th", "ree.", " \n", "\n"), case.form) as forced:
        message, _, _ = ask(forced, [TASK])
        assert message["content"] == "\nOne two three. \n\n"
        trimmed = {**message, "content": "One two three."}
        _, _, miss = ask(forced, [TASK, trimmed, {"role": "user", "content": "Go on."}])
        assert "replayed=1" in miss
        said = tuple(id for piece in ("One", " tw", "o th", "ree.") for id in encode(forced, piece))
        ids = forced.said[1].ids
        at = len(forced.said[0].ids)
        assert (ids[at : at + len(said)], ids[at + len(said)]) == (said, encode(forced, END)[0])


def test_salts_keep_replies_apart() -> None:
    case = CASES["llama3"]
    with serving(script(case), case.form) as forced:
        called, _, _ = ask(forced, [TASK], extra_body={"cache_salt": "one"})
        _, _, miss = ask(forced, [TASK, called, result_of(called)], extra_body={"cache_salt": "two"})
        assert "replayed" not in miss
        _, _, miss = ask(forced, [TASK, called, result_of(called)], extra_body={"cache_salt": "one"})
        assert "replayed=1" in miss


def test_replies_outlive_the_server_beside_the_disk_cache(tmp_path: Path) -> None:
    case = CASES["qwen3"]
    flags: dict[str, Any] = {"disk_cache_dir": tmp_path / "cold"}
    with serving(script(case), case.form, **flags) as forced:
        called, _, _ = ask(forced, [TASK])
        before = shown_ids(forced, 0)
    with serving(lambda _prompt: case.answers, case.form, **flags) as forced:
        _, _, miss = ask(forced, [TASK, called, result_of(called)])
        assert "replayed=1" in miss
        assert forced.said[0].ids[: len(before)] == before
        forced.served.ask("/cache/clear", tier="all").raise_for_status()
        _, _, miss = ask(forced, [TASK, called, result_of(called)])
        assert "replayed" not in miss


def test_replies_go_along_with_an_exported_session() -> None:
    case = CASES["qwen3"]
    named = {"x-kvstrata-session": "mine"}
    with serving(script(case), case.form) as forced, forced.served.http() as client:
        called, _, _ = ask(forced, [TASK], extra_headers=named)
        before = shown_ids(forced, 0)
        file = client.get("/cache/sessions/mine/export").raise_for_status().content
    with serving(lambda _prompt: case.answers, case.form) as forced, forced.served.http() as client:
        octets = {"content-type": "application/octet-stream"}
        client.post("/cache/import", content=file, headers=octets).raise_for_status()
        _, cached, miss = ask(forced, [TASK, called, result_of(called)])
        assert "replayed=1" in miss
        assert cached >= len(before)


def test_an_imported_reply_that_says_something_else_is_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["qwen3"]
    export = ReplyMemory.export_session

    def forged(memory: ReplyMemory, salt: str, ids_of_session: TokenIds) -> list[Any]:
        (told,) = export(memory, salt, ids_of_session)
        ids = array("i", base64.b64decode(told["ids"]))
        ids[-2] += 1
        return [{**told, "ids": base64.b64encode(ids.tobytes()).decode()}]

    monkeypatch.setattr(ReplyMemory, "export_session", forged)
    with serving(lambda _prompt: case.answers, case.form) as forced, forced.served.http() as client:
        said, _, _ = ask(forced, [TASK], extra_headers={"x-kvstrata-session": "mine"})
        file = client.get("/cache/sessions/mine/export").raise_for_status().content
    with serving(lambda _prompt: case.answers, case.form) as forced, forced.served.http() as client:
        octets = {"content-type": "application/octet-stream"}
        client.post("/cache/import", content=file, headers=octets).raise_for_status()
        _, _, miss = ask(forced, [TASK, said, TASK])
        assert "replayed" not in miss
        tokenizer = forced.served.server.state.loaded.tokenizer
        assert said["content"] in decode_ids(tokenizer, list(forced.said[-1].ids))


@pytest.mark.parametrize("name", CASES)
def test_what_others_say_of_a_reply_is_found_out_by_reading_it(name: str) -> None:
    case = CASES[name]
    tokenizer = forced_tokenizer(case.form)
    form = ReplyFormat(tokenizer, ChatTemplate(tokenizer), harmony_tokens(tokenizer))
    for pieces in (case.calls, case.answers):
        ids = [id for piece in pieces for id in encode_rendered(tokenizer, piece)]
        ids = [id for id in ids if id not in form.ending_ids]
        visible = content_of_reply(form._read_anew(SampledReply(tuple(ids), None, None), [TOOL]))
        sampled = form.sampled(ids, visible, ())
        assert visible.calls or visible.content == "All is done."
        assert form.proven(SampledReply(tuple(ids), None, None, is_proven=False), visible, [TOOL]) == sampled
        assert form.proven(sampled, replace(visible, content=visible.content + "!"), [TOOL]) is None
        longer = replace(sampled, ids=(*sampled.ids, *encode_rendered(tokenizer, "x")))
        assert form.proven(longer, visible, [TOOL]) is None or visible.calls


def test_neither_a_long_reply_nor_an_export_holds_up_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes as long as a reply is long is done on worker threads."""
    on_loop: dict[str, bool] = {}

    def watched(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def watching(*arguments: Any) -> Any:
            on_loop[name] = asyncio._get_running_loop() is not None
            return original(*arguments)

        monkeypatch.setattr(owner, name, watching)

    watched(SampledReplies, "record_reply")
    watched(ReplyMemory, "export_session")
    watched(ReplyMemory, "import_session")
    case = CASES["qwen3"]
    with serving(lambda _prompt: case.answers, case.form) as forced, forced.served.http() as client:
        ask(forced, [TASK], extra_headers={"x-kvstrata-session": "mine"})
        file = client.get("/cache/sessions/mine/export").raise_for_status().content
        octets = {"content-type": "application/octet-stream"}
        client.post("/cache/import", content=file, headers=octets).raise_for_status()
    assert on_loop == {"record_reply": False, "export_session": False, "import_session": False}


def claude(forced: Forced) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=forced.served.url, api_key="none", max_retries=0)


def test_the_messages_api_replays_too_and_counts_the_same_prompt() -> None:
    case = CASES["qwen3"]
    tools: Any = [{"name": "f", "description": "d", "input_schema": TOOL["function"]["parameters"]}]
    with serving(script(case), case.form) as forced, claude(forced) as client:
        asked: dict[str, Any] = {"model": "claude-x", "max_tokens": 500, "tools": tools}
        first = client.messages.create(messages=[TASK], **asked)  # pyright: ignore
        call = next(block for block in first.content if block.type == "tool_use")
        chat: Any = [
            TASK,
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Well."}]},
        ]
        second = client.messages.create(messages=chat, **asked)
        assert (second.usage.cache_read_input_tokens or 0) >= len(shown_ids(forced, 0))
        counted = client.messages.count_tokens(model="claude-x", messages=chat, tools=tools)
        assert counted.input_tokens == len(forced.said[1].ids)


def test_explain_says_what_was_replayed() -> None:
    case = CASES["llama3"]
    with serving(script(case), case.form) as forced:
        called, _, _ = ask(forced, [TASK])
        chat = [TASK, called, result_of(called)]
        told = forced.served.ask("/cache/explain", messages=json.loads(json.dumps(chat)), tools=[TOOL]).json()
        assert told["replayed_turns"] == 1
        assert told["replayed_tokens"] == len(forced.said[0].reply_ids)
        assert told["cached_tokens"] >= len(shown_ids(forced, 0))
        with forced.served.http() as client:
            metrics = client.get("/metrics").text
        assert "kvstrata_replayed_turns_total 0.0" in metrics  # to explain is not to serve


def test_a_reply_that_was_cut_is_sent_back_as_it_is() -> None:
    case = CASES["qwen3"]
    with serving(lambda _prompt: ("One", " tw", "o th", "ree fo", "ur"), case.form) as forced:
        message, _, _ = ask(forced, [TASK], max_tokens=4)
        chat = [TASK, message, {"role": "user", "content": "Go on."}]
        _, cached, miss = ask(forced, chat)
        assert "replayed=1" in miss
        # The last token of a reply is not fed.
        assert cached >= len(forced.said[0].ids) + 3
        assert END in forced.served.server.state.loaded.tokenizer.decode(list(forced.said[1].ids))
