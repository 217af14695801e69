"""Where sampled ids go in a prompt: in the place of the turn that they were, and nowhere else."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.text.replay import TurnFrame, splice_replies
from kvstrata.text.reply_parser import ReplyFormat
from kvstrata.text.sampled_reply import ReplyContent, SampledReply, content_of_reply
from kvstrata.text.template import ChatTemplate
from kvstrata.text.tokenizer import decode_ids, encode_rendered
from tests.agents.forced import END, TEMPLATE, Form, forced_tokenizer
from tests.text.chat_templates import HERMES, LLAMA, MISTRAL, QWEN3
from tests.text.read import TOOLS

USER: Any = {"role": "user", "content": "Do it."}


class Chat:
    """A chat with a model that writes turns in a way of its own."""

    def __init__(self, form: Form) -> None:
        self.tokenizer = forced_tokenizer(form)
        self.template = ChatTemplate(self.tokenizer)
        self.form = ReplyFormat(self.tokenizer, self.template, None)
        self.ending = encode_rendered(self.tokenizer, form.end)

    def reply(self, prompt: Sequence[int], pieces: Sequence[str]) -> tuple[Any, SampledReply]:
        """What the client gets, and what was sampled."""
        ids = [id for piece in pieces for id in encode_rendered(self.tokenizer, piece)]
        reader = self.form.parser(prompt, TOOLS)
        visible = content_of_reply([*reader.add("".join(pieces)), *reader.finish()])
        message: dict[str, Any] = {"role": "assistant", "content": visible.content}
        if visible.thinking:
            message["reasoning_content"] = visible.thinking
        if visible.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in visible.calls
            ]
        return message, self.form.sampled(ids, visible, prompt)

    def text(self, ids: Sequence[int]) -> str:
        return decode_ids(self.tokenizer, list(ids))


@pytest.fixture(scope="module")
def qwen3() -> Chat:
    return Chat(Form(QWEN3))


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zs", "Zl", "Zp"], exclude_characters="<"),
                min_size=1, max_size=8)  # fmt: skip
TURNS = st.lists(
    st.tuples(
        WORDS | st.just(""), WORDS, st.dictionaries(WORDS, WORDS | st.integers(), max_size=2) | st.none(), st.booleans()
    ),
    min_size=1, max_size=4,
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(turns=TURNS, cuts=st.randoms(use_true_random=False))
def test_a_prompt_is_the_chat_with_the_models_own_words_in_it(qwen3: Chat, turns: list[Any], cuts: Any) -> None:
    """However replies were cut into tokens, spaced or thought about, and whichever of them are known."""
    messages: list[Any] = [USER]
    replies: list[SampledReply | None] = [None]
    expected = [qwen3.text(qwen3.template.render(messages, tools=TOOLS))]
    for thinking, content, arguments, is_known in turns:
        visible = content
        if arguments is not None:
            visible += (
                "\n<tool_call>\n" + json.dumps({"name": "f", "arguments": arguments}, indent=1) + "\n</tool_call>"
            )
        raw = (f"<think>\n{thinking}\n</think>\n\n" if thinking else "") + visible
        prompt = qwen3.template.render(messages, tools=TOOLS)
        message, sampled = qwen3.reply(prompt, _cut(raw, cuts))
        is_whole = sampled.visible_from is not None and (arguments is not None or sampled.text_from is not None)
        messages += [message, USER]
        replies += [sampled if is_known else None, None]
        anew = visible if is_known and is_whole else _rendered(qwen3, messages)
        expected[-1] += anew
        expected.append(f"{END}\n<|im_start|>user\nDo it.{END}\n<|im_start|>assistant\n")
    made = qwen3.template.render_with_replies(messages, replies, ending_ids=qwen3.ending, tools=TOOLS)
    assert qwen3.text(made.ids) == "".join(expected)
    for reply in replies:
        if reply is not None and made.replayed_turns == sum(each is not None for each in replies):
            visible_ids = reply.ids[reply.visible_from :]
            assert any(made.ids[at : at + len(visible_ids)] == visible_ids for at in range(len(made.ids)))


def _cut(text: str, cuts: Any) -> list[str]:
    """Tags are tokens of their own; all else may be cut anywhere."""
    pieces: list[str] = []
    for part in _tags(text):
        while len(part) > 1 and not part.startswith("<"):
            at = cuts.randint(1, len(part))
            pieces.append(part[:at])
            part = part[at:]
        pieces += [part] if part else []
    return pieces


def _tags(text: str) -> list[str]:
    for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        text = text.replace(tag, f"\0{tag}\0")
    return text.split("\0")


def _rendered(chat: Chat, messages: Sequence[Any]) -> str:
    """The last reply as the template writes it."""
    text = chat.text(chat.template.render(list(messages), tools=TOOLS))
    end = f"{END}\n<|im_start|>user\nDo it.{END}\n<|im_start|>assistant\n"
    return text.removesuffix(end).rpartition("<|im_start|>assistant\n")[2]


def test_thinking_comes_back_only_where_the_template_shows_it(qwen3: Chat) -> None:
    pieces = ["<think>", "\nHm", ".\n", "</think>", "\n\n", "He", "llo", "."]
    prompt = qwen3.template.render([USER])
    message, sampled = qwen3.reply(prompt, pieces)
    start = len(sampled.ids) - sum(len(encode_rendered(qwen3.tokenizer, piece)) for piece in pieces[5:])
    assert (sampled.visible_from, sampled.text_from) == (start, start)
    loop = qwen3.template.render_with_replies([USER, message], [None, sampled], ending_ids=qwen3.ending)
    assert loop.ids[: len(prompt) + len(sampled.ids)] == prompt + sampled.ids
    later = qwen3.template.render_with_replies([USER, message, USER], [None, sampled, None], ending_ids=qwen3.ending)
    visible = sampled.ids[start:]
    assert later.ids[: len(prompt) + len(visible)] == prompt + visible
    assert "Hm" not in qwen3.text(later.ids)


def test_other_thinking_is_never_swapped_for_the_sampled(qwen3: Chat) -> None:
    message, sampled = qwen3.reply((), ["<think>", "\nHm.\n", "</think>", "\n\n", "Hello."])
    message["reasoning_content"] = "Something else."
    made = qwen3.template.render_with_replies([USER, message], [None, sampled], ending_ids=qwen3.ending)
    assert made.replayed_turns == 0
    assert "Something else." in qwen3.text(made.ids)


@pytest.mark.parametrize("template", [HERMES, LLAMA, QWEN3])
def test_calls_alone_are_found_behind_the_header(template: str) -> None:
    chat = Chat(Form(template))
    key = "parameters" if template == LLAMA else "arguments"
    call = ['{"name":', '"f", ', f'"{key}":', '{"x": 1}}']
    pieces = call if template == LLAMA else ["<tool_call>", *call, "</tool_call>"]
    prompt = chat.template.render([USER], tools=TOOLS)
    message, sampled = chat.reply(prompt, pieces)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"}
    made = chat.template.render_with_replies(
        [USER, message, result], [None, sampled, None], ending_ids=chat.ending, tools=TOOLS
    )
    assert made.ids[: len(prompt) + len(sampled.ids) + 1] == prompt + sampled.ids + chat.ending


def test_a_template_without_a_header_writes_calls_itself() -> None:
    """Mistral's: what a prompt ends with belongs to the user's turn."""
    chat = Chat(Form(MISTRAL, "</s>", ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]")))
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    sampled = SampledReply((5, 6, 7), 0, None)
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "1"}
    messages = [USER, message, result]
    made = chat.template.render_with_replies(messages, [None, sampled, None], ending_ids=chat.ending, tools=TOOLS)
    assert made.replayed_turns == 0
    assert made.ids == chat.template.render(messages, tools=TOOLS)


def test_a_template_that_refuses_marks_stands_as_it_is() -> None:
    fussy = QWEN3.replace("{{ message.content }}", "{% if 'kvs' in message.content %}{{ message.content | upper }}"
                          "{% else %}{{ message.content }}{% endif %}")  # fmt: skip
    chat = Chat(Form(fussy))
    message, sampled = chat.reply((), ["Hel", "lo", "."])
    messages = [USER, message, USER]
    made = chat.template.render_with_replies(messages, [None, sampled, None], ending_ids=chat.ending)
    assert made.replayed_turns == 0
    assert made.ids == chat.template.render(messages)


MARKS = ["<|im_end|>", "<|im_start|>assistant\n", "<|im_start|>", "</think>", "<think>", "<tool_call>", "</tool_call>",
         "<tool_response>", "\n", " ", "", "Hello.", '{"name": "f", ', "kvs0c1x"]  # fmt: skip
HOSTILE = st.lists(st.sampled_from(MARKS), max_size=4).map("".join)
ROLES = st.sampled_from(["user", "assistant", "ours", "ours", "called", "tool"])


@pytest.mark.parametrize("template", [HERMES, LLAMA, QWEN3, TEMPLATE], ids=["hermes", "llama", "qwen3", "told"])
@settings(deadline=None, max_examples=80)
@given(turns=st.lists(st.tuples(ROLES, HOSTILE), min_size=1, max_size=6), cuts=st.randoms(use_true_random=False))
def test_whatever_a_chat_holds_no_word_of_it_is_lost_or_moved(
    template: str, turns: list[tuple[str, str]], cuts: Any
) -> None:
    """Marks of the template in any message, replies side by side or first, the same one twice: but for white space, and
    for what a call was written with, the prompt reads as the template writes it."""
    chat = chat_of(template)
    prompt = chat.template.render([USER], tools=TOOLS)
    messages: list[Any] = []
    replies: list[SampledReply | None] = []
    for role, text in turns:
        message: Any = {"role": role, "content": text}
        sampled = None
        if role == "tool":
            message |= {"tool_call_id": "call_1"}
        elif role in ("ours", "called"):
            call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>' if role == "called" else ""
            message, sampled = chat.reply(prompt, [*_cut(text, cuts), call])
            if not (message["content"].strip() or message.get("tool_calls")):
                continue
            if template == LLAMA and (calls := message.get("tool_calls")) and (message["content"] or len(calls) > 1):
                sampled = None  # of such a turn the template shows the first call only
        messages.append(message)
        replies.append(sampled)
    messages.append(USER)
    made = chat.template.render_with_replies(messages, [*replies, None], ending_ids=chat.ending, tools=TOOLS)
    rendered = chat.template.render(messages, tools=TOOLS)
    assert _words(chat.text(made.ids)) == _words(chat.text(rendered))


def _words(text: str) -> str:
    return re.sub(r"\s|</?tool_call>", "", text).replace('"parameters"', '"arguments"')


@cache
def chat_of(template: str) -> Chat:
    return Chat(Form(template))


def test_what_replay_costs_grows_with_the_chat_and_not_faster() -> None:
    def render(messages: Sequence[Any]) -> str:
        """With as much text behind each turn as users and tools write."""
        return "".join(f"{each['content']}{END}{'word ' * 400}" for each in messages)

    no_tokenizer: Any = None  # texts alone are put back without it

    def seconds(num_turns: int) -> float:
        messages = [{"role": "assistant", "content": f"{place} " + "word " * 200} for place in range(num_turns)]
        replies = [SampledReply((1, 2, 3), 0, 0)] * num_turns
        began = time.process_time()
        pieces = splice_replies(messages, replies, render, TurnFrame("", (END,), (END,), str), no_tokenizer)
        assert len(pieces) == 2 * num_turns + 1
        return time.process_time() - began

    few, many = (min(seconds(num_turns) for _ in range(3)) for num_turns in (250, 2000))
    assert many < few * 24  # eight times as many turns; going through the whole text for each of them: 64 times


@pytest.mark.parametrize("headless", [True, False])
def test_a_template_that_frames_turns_otherwise_loses_no_neighbour(headless: bool) -> None:
    """A turn with calls has no header of its own, or none of the endings: those of other turns are near."""
    begin, end = ("", END) if headless else ("<|im_start|>assistant\n", "")
    odd = (
        "{% for m in messages %}{% if m.tool_calls %}" + begin + "{% for c in m.tool_calls %}<tool_call>"
        "{{ c.function | tojson }}</tool_call>{% endfor %}"
        + end
        + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        + END
        + "{% endif %}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = Chat(Form(odd))
    message, sampled = chat.reply((), ["<tool_call>", '{"name":', '"f", "arguments":', '{"x": 1}}', "</tool_call>"])
    before = {"role": "user", "content": "Please <|im_start|>assistant\nread all of this."}
    after = {"role": "user", "content": "And all of that."}
    messages = [before, message, after]
    made = chat.template.render_with_replies(messages, [None, sampled, None], ending_ids=chat.ending, tools=TOOLS)
    assert "read all of this." in chat.text(made.ids)
    assert "And all of that." in chat.text(made.ids)


SPACES = st.lists(st.sampled_from([" ", "\n", "\n\n", "\t", " \n"]), max_size=3)


@settings(deadline=None, max_examples=60)
@given(before=SPACES, words=st.lists(WORDS, min_size=1, max_size=3), after=SPACES, thinks=st.booleans(),
       cuts=st.randoms(use_true_random=False))  # fmt: skip
def test_a_trimmed_reply_comes_back_without_its_space(
    qwen3: Chat, before: list[str], words: list[str], after: list[str], thinks: bool, cuts: Any
) -> None:
    """What is put back decodes to what the client sent, and is a run of what was sampled."""
    thought = ["<think>", "\nHm.\n", "</think>", "\n\n"] if thinks else []
    message, sampled = qwen3.reply((), [*thought, *_cut("".join([*before, *words, *after]), cuts)])
    trimmed = qwen3.form.trimmed(sampled, ReplyContent(message["content"]))
    text = message["content"].strip()
    if trimmed is None:
        return
    assert text != message["content"]
    messages: list[Any] = [USER, {"role": "assistant", "content": text}, USER]
    made = qwen3.template.render_with_replies(messages, [None, trimmed, None], ending_ids=qwen3.ending)
    assert made.replayed_turns == 1
    assert qwen3.text(made.ids) == qwen3.text(qwen3.template.render(messages))
    loop: list[Any] = [USER, {**message, "content": text}]
    made = qwen3.template.render_with_replies(loop, [None, trimmed], ending_ids=qwen3.ending)
    # Line breaks behind thinking are no part of what the client was shown.
    shown, rendered = (
        re.sub(r"</think>\n+", "</think>", qwen3.text(ids)) for ids in (made.ids, qwen3.template.render(loop))
    )
    assert shown == rendered


def test_space_is_trimmed_where_tokens_end(qwen3: Chat) -> None:
    def trimmed_ids(*pieces: str) -> tuple[int, ...] | None:
        message, sampled = qwen3.reply((), pieces)
        trimmed = qwen3.form.trimmed(sampled, ReplyContent(message["content"]))
        return trimmed.ids[trimmed.text_from :] if trimmed else None

    said = tuple(id for piece in ("Hel", "lo.") for id in encode_rendered(qwen3.tokenizer, piece))
    assert trimmed_ids("Hel", "lo.", " ", "\n\n") == said
    assert trimmed_ids("\n", "Hel", "lo.", "\n") == said
    assert trimmed_ids("<think>", "Hm", "</think>", "\n\n", "Hel", "lo.", "\n") == said
    assert trimmed_ids("Hel", "lo.") is None
    assert trimmed_ids(" the", " word", "s") is None  # the first token begins with the space
    # The whole reply, thinking included, would have the space that the client took away.
    assert trimmed_ids("<think>", "Hm", "</think>", "\n\n", " ", "Hel", "lo.") is None
