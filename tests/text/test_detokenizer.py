from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import NewlineTokenizer, TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kvstrata.text.detokenizer import Detokenizer, special_tokens
from kvstrata.text.tokenizer import encode_rendered


def pieces_of(detokenizer: Detokenizer, ids: tuple[int, ...] | list[int]) -> list[str]:
    return [*(detokenizer.add(id) for id in ids), detokenizer.finish()]


def ascii_of(text: str) -> str:
    return "".join(character for character in text if character.isascii())


@pytest.fixture(scope="session")
def slow(byte_level_backend: Tokenizer) -> TokenizerWrapper:
    """A tokenizer class with steps of its own around the Rust one."""
    backend = Tokenizer.from_str(byte_level_backend.to_str())
    backend.add_tokens(["<n>"])
    return TokenizerWrapper(NewlineTokenizer(tokenizer_object=backend))


@given(text=st.text())
@example("a\u200d👩\u200d👩\u200d👧 \ufffd")
@example(" leading and trailing  ")
@example("\ufffd" * 100)
def test_pieces_join_to_the_whole_and_show_no_broken_character(tokenizer: TokenizerWrapper, text: str) -> None:
    ids = encode_rendered(tokenizer, text)
    whole = tokenizer.decode(ids)
    pieces = pieces_of(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == whole
    assert "\ufffd" in whole or not any("\ufffd" in piece for piece in pieces)


@given(text=st.text())
@example("two\nlines and 🙂")
def test_a_tokenizer_with_its_own_decode_is_asked(slow: TokenizerWrapper, text: str) -> None:
    ids = slow.encode(text)
    assert "".join(pieces_of(Detokenizer(slow), ids)) == slow.decode(ids)


@given(ids=st.lists(st.integers(0, 520), max_size=200))
def test_any_ids_give_what_decoding_at_once_gives(byte_level: TokenizerWrapper, ids: list[int]) -> None:
    assert "".join(pieces_of(Detokenizer(byte_level), ids)) == byte_level.decode(
        [id for id in ids if id not in special_tokens(byte_level).hidden]
    )


@given(numbers=st.lists(st.integers(0, 10_000), max_size=200))
@example([0xE2 - 0x80, 400, 0xF0 - 0x80, 0xC3 - 0x80, 0xA9 - 0x80, 0xE2 - 0x80, 400])
def test_broken_bytes_never_raise_and_lose_no_text(sentencepiece: TokenizerWrapper, numbers: list[int]) -> None:
    # Only bytes from 0x80 on, so that ASCII is in words alone and must come through whatever the bytes are.
    first = sentencepiece.convert_tokens_to_ids("<0x80>")
    ids = [first + number % (len(sentencepiece) - first) for number in numbers]
    shown = [id for id in ids if id not in special_tokens(sentencepiece).hidden]
    assert ascii_of("".join(pieces_of(Detokenizer(sentencepiece), ids))) == ascii_of(sentencepiece.decode(shown))


def test_text_flows_without_delay(tokenizer: TokenizerWrapper) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert all(detokenizer.add(id) for id in encode_rendered(tokenizer, "the dog sat on the mat")[1:])


def test_a_cut_off_character_is_seen_at_the_end(byte_level: TokenizerWrapper) -> None:
    ids = encode_rendered(byte_level, "ok 🙂")
    detokenizer = Detokenizer(byte_level)
    assert "".join(detokenizer.add(id) for id in ids[:-1]) == "ok "
    assert detokenizer.finish() == "\ufffd"


def test_the_prompts_tail_keeps_the_first_words_space(sentencepiece: TokenizerWrapper) -> None:
    prompt, reply = encode_rendered(sentencepiece, "the cat"), encode_rendered(sentencepiece, "sat on")
    assert "".join(pieces_of(Detokenizer(sentencepiece), reply)) == "sat on"
    assert "".join(pieces_of(Detokenizer(sentencepiece, prompt), reply)) == " sat on"


def test_a_prompt_that_ends_inside_a_character_is_not_repeated(byte_level: TokenizerWrapper) -> None:
    prompt = encode_rendered(byte_level, "secret 🙂")[:-1]
    assert "secret" not in "".join(pieces_of(Detokenizer(byte_level, prompt), encode_rendered(byte_level, "fine")))


def test_special_tokens_are_hidden_and_thinking_is_not(byte_level: TokenizerWrapper) -> None:
    ids = encode_rendered(byte_level, "<think>the cat</think><|hidden|>the dog<|im_end|></s>")
    assert "".join(pieces_of(Detokenizer(byte_level), ids)) == "<think>the cat</think>the dog"


def test_inside_a_tool_call_special_tokens_are_text(wrap_byte_level) -> None:
    tokenizer = wrap_byte_level(tool_call_start="[TOOL_CALLS]", tool_call_end="", tool_parser=json.loads)
    ids = encode_rendered(tokenizer, "the[ARGS][TOOL_CALLS]cat[ARGS]{}</s>")
    assert "".join(pieces_of(Detokenizer(tokenizer), ids)) == "the[TOOL_CALLS]cat[ARGS]{}"


def test_hidden_again_after_the_call(wrap_byte_level) -> None:
    marks = {"tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>"}
    tokenizer = wrap_byte_level(tool_parser=json.loads, **marks)
    ids = encode_rendered(tokenizer, "<tool_call>[ARGS]</tool_call>[ARGS]")
    assert "".join(pieces_of(Detokenizer(tokenizer), ids)) == "<tool_call>[ARGS]</tool_call>"


def test_channels_of_a_harmony_reply_stay_apart(byte_level_backend: Tokenizer) -> None:
    backend = Tokenizer.from_str(byte_level_backend.to_str())
    backend.add_special_tokens(["<|channel|>", "<|message|>", "<|end|>", "<|return|>"])
    tokenizer = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|return|>"))
    ids = encode_rendered(tokenizer, "<|channel|>final<|message|>the cat<|hidden|><|return|>")
    assert "".join(pieces_of(Detokenizer(tokenizer), ids)) == "<|channel|>final<|message|>the cat"


def test_a_token_costs_microseconds(byte_level: TokenizerWrapper) -> None:
    ids = encode_rendered(byte_level, "The quick brown fox, naïve café 日本語 🙂. " * 200)
    special = special_tokens(byte_level)
    detokenizer = Detokenizer(byte_level, special=special)
    began = time.thread_time()
    for id in ids:
        detokenizer.add(id)
    # 30 us are the target; a busy machine may take longer, a quadratic detokenizer takes milliseconds.
    assert (time.thread_time() - began) / len(ids) < 150e-6


def test_a_long_run_of_broken_bytes_stays_cheap(byte_level: TokenizerWrapper) -> None:
    lead = next(id for id in range(len(byte_level)) if byte_level.convert_ids_to_tokens(id) == "ð")  # byte 0xF0
    detokenizer = Detokenizer(byte_level)
    shown = "".join(pieces_of(detokenizer, [lead] * 5_000))
    assert shown == "\ufffd" * 5_000
