from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kvstrata.text.detokenizer import Detokenizer, special_tokens
from kvstrata.text.reply_events import ReplyEvent, ReplyText, ReplyThinking
from kvstrata.text.thinking import ThinkingTags, end_ids, opens_thinking, thinking_tags
from kvstrata.text.tokenizer import encode_rendered
from tests.text.chat_templates import GPT_OSS
from tests.text.conftest import Wrap
from tests.text.read import HERMES, TAGS, call, cut, read, reader
from tests.text.test_template import PLAIN

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def both(text: str, *, is_open: bool = False, cut_off: bool = False) -> list[ReplyEvent]:
    whole = read(reader(HERMES, is_open=is_open), [text], cut_off=cut_off)
    assert read(reader(HERMES, is_open=is_open), list(text), cut_off=cut_off) == whole
    without_tools = reader(tools=(), is_open=is_open)
    if "tool_call" not in text:
        assert read(without_tools, list(text), cut_off=cut_off) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "is_open", "events"),
    [
        ("<think>\nHm.\n\nSo.\n</think>\n\nHello", False, [ReplyThinking("Hm.\n\nSo."), ReplyText("Hello")]),
        ("\n <think>Hm.</think>Hello", False, [ReplyThinking("Hm."), ReplyText("Hello")]),
        ("Hm.\n</think>\nHello", True, [ReplyThinking("Hm."), ReplyText("Hello")]),
        ("\nHm.</think>Hello", True, [ReplyThinking("Hm."), ReplyText("Hello")]),
        ("<think>\nHm.</think>Hello", True, [ReplyThinking("Hm."), ReplyText("Hello")]),
        ("<think>\n\n</think>\n\nHello", False, [ReplyText("Hello")]),
        ("<think>\n\n</think>\n\n<think>Hm.</think>Hello", False, [ReplyThinking("Hm."), ReplyText("Hello")]),
        ("<think>Hm.</think><think>Hello", False, [ReplyThinking("Hm."), ReplyText("<think>Hello")]),
        ("<think>Hm.</think> Hello </think>", False, [ReplyThinking("Hm."), ReplyText(" Hello </think>")]),
        ("I use <think>this</think>.", False, [ReplyText("I use <think>this</think>.")]),
        ("<thinking>this</thinking>", False, [ReplyText("<thinking>this</thinking>")]),
        ("<think>about </thin", False, [ReplyThinking("about </thin")]),
        ("Hm.\n", True, [ReplyThinking("Hm.\n")]),
        ("</think>", True, []),
        (
            f"<think>\nmaybe {CALL}?\n{CALL}</think>\n{CALL}",
            False,
            [ReplyThinking(f"maybe {CALL}?\n{CALL}"), *call("f", '{"x": 1}')],
        ),
    ],
)
def test_thinking_is_split_from_the_answer(text: str, is_open: bool, events: list[ReplyEvent]) -> None:
    assert both(text, is_open=is_open) == events


def test_thinking_that_is_cut_off_stays_thinking() -> None:
    assert both("<think>\nHm. </thi", cut_off=True) == [ReplyThinking("Hm. </thi")]
    assert both("<thin", cut_off=True) == [ReplyText("<thin")]


def test_thinking_comes_as_it_is_written() -> None:
    one = reader()
    assert one.add("<think>\n") == []
    assert one.add("Hm") == [ReplyThinking("Hm")]
    assert one.add(".\n") == [ReplyThinking(".")]
    assert one.add("So\n</th") == [ReplyThinking("\nSo")]
    assert one.add("ink>\n\nHi") == [ReplyText("Hi")]


@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", "<", " "]) | st.text(max_size=2), max_size=10),
    cuts=st.sets(st.integers(0, 60)),
    is_open=st.booleans(),
)
def test_the_cut_does_not_matter(parts: list[str], cuts: set[int], is_open: bool) -> None:
    text = "".join(parts)
    whole = read(reader(is_open=is_open), [text])
    assert read(reader(is_open=is_open), cut(text, cuts)) == whole
    if not is_open and not text.lstrip(" \t\r\n").startswith("<think>"):
        assert whole == ([ReplyText(text)] if text else [])


REASONING = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and message.reasoning_content %}START
{{ message.reasoning_content }}
END

{% endif %}{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("<think>", "</think>"),
        ("<thinking>", "</thinking>"),
        ("<reasoning>", "</reasoning>"),
        ("[THINK]", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<my_own_words>", "</my_own_words>"),
    ],
)
def test_tags_are_those_that_the_template_writes(wrap_plain: Wrap, start: str, end: str) -> None:
    source = REASONING.replace("START", start).replace("END\n", f"{end}\n")
    if "|" in start:  # START and END are in the tags too
        source = REASONING.replace("START\n", f"{start}\n").replace("\nEND\n", f"\n{end}\n")
    tokenizer = wrap_plain(chat_template=source)
    assert thinking_tags(tokenizer) == ThinkingTags(start, end)


@pytest.fixture(scope="session")
def wrap_plain(sentencepiece_backend: Tokenizer) -> Wrap:
    """Its vocabulary has no tags."""

    def wrap(**options: object) -> TokenizerWrapper:
        backend = Tokenizer.from_str(sentencepiece_backend.to_str())
        hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        hf.chat_template = options.get("chat_template")
        return TokenizerWrapper(hf)

    return wrap


@pytest.mark.parametrize("tag", ["<think>", "<thinking>", "[THINK]", "<seed:think>"])
def test_tags_are_found_in_the_templates_source(wrap_plain: Wrap, wrap_byte_level: Wrap, tag: str) -> None:
    end = f"{tag[0]}/{tag[1:]}"
    source = PLAIN + "{% if message is defined %}{{ message.content.split('" + end + "')[-1] }}" + tag + "{% endif %}"
    for wrap in (wrap_plain, wrap_byte_level):
        assert thinking_tags(wrap(chat_template=source)) == ThinkingTags(tag, end)
    half = PLAIN + "{# " + tag + " #}"
    assert thinking_tags(wrap_plain(chat_template=half)) is None


def test_a_model_without_tags_has_none(wrap_plain: Wrap, wrap_byte_level: Wrap) -> None:
    assert thinking_tags(wrap_plain(chat_template=PLAIN)) is None
    assert thinking_tags(wrap_plain(chat_template=GPT_OSS)) is None
    assert thinking_tags(wrap_plain()) is None
    # mlx-lm knows them by the vocabulary.
    assert thinking_tags(wrap_byte_level(chat_template=PLAIN)) == TAGS


@pytest.mark.parametrize("wrap", ["wrap_byte_level", "wrap_sentencepiece", "wrap_plain"])
def test_whether_a_prompt_opens_thinking(request: pytest.FixtureRequest, wrap: str) -> None:
    tokenizer: TokenizerWrapper = request.getfixturevalue(wrap)()

    def opens(text: str) -> bool:
        return opens_thinking(tokenizer, TAGS, encode_rendered(tokenizer, text))

    assert opens("the cat<think>\n")
    assert opens("the cat<think>")
    assert not opens("the cat<think>\n\n</think>\n")
    assert not opens("the cat")
    # Somebody asked about it.
    assert not opens("what is <think>\n</s>assistant\n")


def test_tokens_that_end_thinking(wrap_byte_level: Wrap, wrap_plain: Wrap) -> None:
    tokenizer = wrap_byte_level()
    assert end_ids(tokenizer, TAGS) == (tokenizer.convert_tokens_to_ids("</think>"),)
    assert end_ids(wrap_plain(), TAGS) == ()


def test_special_tokens_that_are_tags_are_shown(wrap_byte_level) -> None:
    source = REASONING.replace("START", "[THINK]").replace("END\n", "[/THINK]\n")
    tokenizer: TokenizerWrapper = wrap_byte_level(chat_template=source)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    detokenizer = Detokenizer(tokenizer, special=special_tokens(tokenizer))
    ids = encode_rendered(tokenizer, "[THINK]the cat[/THINK]<|hidden|>sat")
    assert "".join(map(detokenizer.add, ids)) + detokenizer.finish() == "[THINK]the cat[/THINK]sat"
