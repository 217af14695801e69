"""Real tokenizers, small: byte-level BPE and sentencepiece-like BPE with byte fallback, made when the tests run."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "the cat sat on the mat and the dog sat on the log; nobody spoke.",
    "def main(args):\n    return {key: value for key, value in args.items()}\n",
    "Größe, naïve café, señor, œuvre, Ελλάδα, привет мир, 日本語のテキスト, 한국어",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"]
SPECIAL += ["<|hidden|>"]

Wrap = Callable[..., TokenizerWrapper]


def _wrap(backend: Tokenizer, **options: object) -> TokenizerWrapper:
    chat_template = options.pop("chat_template", None)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend.to_str()),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[3:],
        clean_up_tokenization_spaces=False,
    )
    hf.chat_template = chat_template
    return TokenizerWrapper(hf, **options)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="session")
def byte_level_backend() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    return tokenizer


@pytest.fixture(scope="session")
def sentencepiece_backend() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL[:3] + byte_tokens, show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator(LINES, trainer)
    # The trainer calls all of them special; the byte tokens are not, in real models.
    spec = tokenizer.to_str()
    tokenizer = Tokenizer.from_str(_without_added_bytes(spec))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return tokenizer


def _without_added_bytes(spec: str) -> str:
    parsed = json.loads(spec)
    parsed["added_tokens"] = [token for token in parsed["added_tokens"] if not token["content"].startswith("<0x")]
    return json.dumps(parsed)


@pytest.fixture(scope="session")
def wrap_byte_level(byte_level_backend: Tokenizer) -> Wrap:
    return lambda **options: _wrap(byte_level_backend, **options)


@pytest.fixture(scope="session")
def wrap_sentencepiece(sentencepiece_backend: Tokenizer) -> Wrap:
    return lambda **options: _wrap(sentencepiece_backend, **options)


@pytest.fixture(scope="session")
def byte_level(wrap_byte_level: Wrap) -> TokenizerWrapper:
    return wrap_byte_level()


@pytest.fixture(scope="session")
def sentencepiece(wrap_sentencepiece: Wrap) -> TokenizerWrapper:
    return wrap_sentencepiece()


@pytest.fixture(params=["byte_level", "sentencepiece"], scope="session")
def tokenizer(request: pytest.FixtureRequest) -> TokenizerWrapper:
    return request.getfixturevalue(request.param)
