from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import processors

from kvstrata.errors import InvalidRequest
from kvstrata.text.tokenizer import encode_prompt, encode_rendered, token_bytes, token_text


@given(text=st.text())
def test_bytes_of_all_tokens_are_the_bytes_of_the_text(byte_level: TokenizerWrapper, text: str) -> None:
    ids = encode_rendered(byte_level, text)
    assert b"".join(token_bytes(byte_level, id) for id in ids) == text.encode()


@given(text=st.text().filter(lambda text: "▁" not in text))
def test_sentencepiece_bytes_are_exact_after_the_space_that_it_prepends(
    sentencepiece: TokenizerWrapper, text: str
) -> None:
    ids = encode_rendered(sentencepiece, text)
    prepended = " " + text if text else ""
    assert b"".join(token_bytes(sentencepiece, id) for id in ids) == prepended.encode()


def test_every_byte_has_its_own_token(byte_level: TokenizerWrapper, sentencepiece: TokenizerWrapper) -> None:
    for tokenizer in (byte_level, sentencepiece):
        single = {token_bytes(tokenizer, id) for id in range(len(tokenizer))}
        assert {bytes([byte]) for byte in range(256)} <= single


def test_token_text_keeps_its_space_and_names_special_tokens(byte_level: TokenizerWrapper) -> None:
    ids = encode_rendered(byte_level, "on the<|im_end|>")
    assert "".join(token_text(byte_level, id) for id in ids) == "on the<|im_end|>"
    assert any(token_text(byte_level, id).startswith(" t") for id in ids)


def test_ids_past_the_vocabulary_have_no_bytes(tokenizer: TokenizerWrapper) -> None:
    assert token_bytes(tokenizer, 10_000_000) == b""
    assert token_text(tokenizer, 10_000_000) == ""


def test_a_prompt_begins_with_bos_once(sentencepiece: TokenizerWrapper) -> None:
    bos = sentencepiece.bos_token_id
    assert encode_prompt(sentencepiece, "the cat")[0] == bos
    assert encode_prompt(sentencepiece, "<s>the cat").count(bos) == 1


def test_a_prompt_is_not_ended_by_the_tokenizer(wrap_sentencepiece) -> None:
    tokenizer = wrap_sentencepiece()
    ending = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.backend_tokenizer.post_processor = ending
    assert tokenizer.encode("the cat")[-1] == tokenizer.eos_token_id
    assert encode_prompt(tokenizer, "the cat") == tuple(tokenizer.encode("the cat")[:-1])


def test_encodes_as_the_tokenizer_itself_does(tokenizer: TokenizerWrapper) -> None:
    text = "The quick brown naïve 日本 fox\n  and 🙂"
    assert list(encode_prompt(tokenizer, text)) == tokenizer.encode(text)
    assert list(encode_rendered(tokenizer, text)) == tokenizer.encode(text, add_special_tokens=False)


def test_half_a_surrogate_pair_is_the_clients_mistake(tokenizer: TokenizerWrapper) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode") as refused:
        encode_prompt(tokenizer, "fine so far \ud83d")
    assert refused.value.param == "prompt"
