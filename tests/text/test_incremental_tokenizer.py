"""Prompts tokenized piece by piece: the same ids as in one piece, and nothing twice."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvstrata.models.load import LoadedModel
from kvstrata.text import incremental_tokenizer
from kvstrata.text.incremental_tokenizer import IncrementalTokenizer
from kvstrata.text.template import ChatTemplate
from kvstrata.text.tokenizer import encode_rendered

START, END = "<|start|>", "<|end|>"
LETTERS = [chr(code) for code in range(32, 127)] + ["\n", "\t", "é", "漢", "▁"]
SAMPLE = f"{START}user\nHi there{END}\n{START}assistant\n"


def tokenizer_of(kind: str, *added: AddedToken) -> TokenizerWrapper:
    """With letters, some pairs of them, and special tokens."""
    pairs = [("a", "b"), (" ", "a"), ("▁", "a"), ("\n", "\n"), ("1", "2"), ("e", "r")]
    vocab = {text: i for i, text in enumerate(dict.fromkeys([*LETTERS, "Ġ", "Ċ", *(a + b for a, b in pairs)]))}
    backend = Tokenizer(models.BPE(vocab, pairs, unk_token="▁"))
    if kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    elif kind == "first":  # as newer sentencepiece ones: a space before the first word of a text, and no other
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif kind == "always":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    else:  # as older ones: before each stretch between special tokens
        prepend: Any = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.normalizer = prepend
    hf = PreTrainedTokenizerFast(tokenizer_object=backend)
    marks: Any = list(added) or [AddedToken(START, special=True), AddedToken(END, special=True)]
    hf.add_tokens(marks, special_tokens=True)
    return TokenizerWrapper(hf)


ALL = {kind: tokenizer_of(kind) for kind in ("bytes", "first", "always", "prepend")}

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [START, END, "<|", "|>", START[:-1], " ", "\n\n", "<|end|", "<tool>", "[cut]", "ab", "12", " a", "er"]
        ),
        st.text("ab er12\n<|>▁漢", max_size=60),
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("kind", ["bytes", "first", "always", "prepend"])
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_pieces_have_the_ids_of_the_whole(kind: str, texts: list[str]) -> None:
    tokenizer = ALL[kind]
    encoder = IncrementalTokenizer(tokenizer, [SAMPLE])
    assert encoder.cuts
    for text in (*texts, *texts, "".join(texts)):
        assert encoder(text) == encode_rendered(tokenizer, text)


@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
@example([f"ab{START}er", f"a|>{END}b", f"a  <tool>b{START}"])
def test_tokens_that_overlap_or_take_spaces_are_no_places_to_cut(texts: list[str]) -> None:
    """A token that another one hides, one that takes the spaces before it, and one that is found after normalizing."""
    encoder = IncrementalTokenizer(ODD, [f"{SAMPLE}<tool>{START[:-1]}[cut]"])
    assert encoder._marks is not None
    assert encoder._marks.pattern == re.escape("[cut]")
    for text in (*texts, *texts, "[cut]".join(texts)):
        assert encoder(text) == encode_rendered(ODD, text)


ODD = tokenizer_of(
    "bytes",
    AddedToken("[cut]", special=True, rstrip=True),  # the only place
    AddedToken(START, special=True),
    AddedToken(END, special=True),
    AddedToken("|>" + END, special=True),  # hides END
    AddedToken("<tool>", special=True, lstrip=True),
    AddedToken("b<", special=False, normalized=False),  # ends as START begins
    AddedToken("|>", special=True),
    AddedToken("12", special=False, normalized=True),
)


def test_where_cutting_does_not_hold_texts_are_encoded_whole() -> None:
    words = tokenizer_of("bytes", AddedToken(START, special=True, single_word=True), AddedToken(END, special=True))
    assert not IncrementalTokenizer(words, [SAMPLE]).cuts
    assert not IncrementalTokenizer(ALL["bytes"], ["no special token"]).cuts
    assert not IncrementalTokenizer(ALL["bytes"], []).cuts

    class Counting(IncrementalTokenizer):
        def __call__(self, text: str, salt: str = "") -> tuple[int, ...]:
            return (*super().__call__(text, salt), 0) if self.cuts else super().__call__(text, salt)

    encoder = Counting(ALL["bytes"], [SAMPLE])  # its pieces are not the whole
    assert not encoder.cuts
    assert encoder(SAMPLE) == encode_rendered(ALL["bytes"], SAMPLE)


def test_what_was_seen_is_not_tokenized_again_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    made = incremental_tokenizer.encode_rendered_all

    def counted(tokenizer: TokenizerWrapper, texts: Sequence[str]) -> list[Sequence[int]]:
        asked.extend(texts)
        return made(tokenizer, texts)

    monkeypatch.setattr(incremental_tokenizer, "encode_rendered_all", counted)
    monkeypatch.setattr(incremental_tokenizer, "MOST_BYTES", 8000)
    encoder = IncrementalTokenizer(ALL["bytes"], [SAMPLE])
    turns = [f"{START}{i}{'ab er ' * 40}" for i in range(3)]
    encoder("".join(turns[:2]))
    asked.clear()
    encoder("".join(turns))
    assert asked == [turns[2]]
    for i in range(50):
        encoder(f"{START}{i} other {'a' * 90}")
        assert encoder._known.num_bytes <= 8000
    asked.clear()
    encoder(turns[0])
    assert asked == [turns[0]]
    encoder(turns[0], salt="another caller")
    assert asked == [turns[0]] * 2
    encoder(f"{START}{'b' * 5000}")  # more than all that may be remembered
    assert encoder._known.num_bytes <= 8000


@pytest.mark.perf
def test_a_long_chat_and_a_turn_more(default_model: LoadedModel) -> None:
    """The default model's own template and tokenizer: as before, and in a fraction of the time."""
    template = ChatTemplate(default_model.tokenizer)
    assert template._encoder.cuts
    turns = [
        {"role": role, "content": f"{i}. The answer is {i * 7919}, isn't it?\n\n" * 60}
        for i in range(60)
        for role in ("user", "assistant")
    ]
    short = [*turns, {"role": "user", "content": "So?"}]
    long = [*short, {"role": "assistant", "content": "Yes. " * 50}, {"role": "user", "content": "Sure?"}]
    assert len(template.render(short)) > 50_000
    text = template._text(long, None, None, reply=True)
    assert template.render(long) == encode_rendered(default_model.tokenizer, text)
    assert template.for_salt("a caller").render(long) == template.render(long)
    whole, pieces = partial(encode_rendered, default_model.tokenizer, text), partial(template._encode, text)
    assert _least_s(pieces) < 0.5 * _least_s(whole)


def _least_s(work: Callable[[], object]) -> float:
    took = []
    for _ in range(3):
        began_s = time.thread_time()
        work()
        took.append(time.thread_time() - began_s)
    return min(took)
