"""A tiny model with a real byte-level tokenizer: what it writes can be any text. For tests of grammars."""

from __future__ import annotations

import dataclasses
import functools

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvstrata.grammar.compiler import GrammarCompiler
from kvstrata.models.load import LoadedModel
from tests.tiny import tiny_loaded, tiny_module

SPECIAL = ("<s>", "</s>", "<|im_end|>", "<think>", "</think>", "[TOOL_CALLS]")
# Added and not special, as in Qwen's and Mistral's vocabularies.
ADDED = ("<tool_call>", "</tool_call>", "[ARGS]", "  ")
MERGES = [
    ("{", '"'),
    ('"', ":"),
    ('"', ","),
    ("t", "r"),
    ("tr", "u"),
    ("tru", "e"),
    ("n", "u"),
    ("nu", "l"),
    ("nul", "l"),
]
MERGES += [("a", "b"), ("ab", "c"), ("1", "0"), ("[", "A"), ("<", "t")]
EOS = ("</s>", "<|im_end|>")
PADDED_LOGITS = 11  # that stand for no token


@functools.cache
def byte_tokenizer() -> TokenizerWrapper:
    vocab: dict[str, int] = {}
    for token in (*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)):
        vocab[token] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    return TokenizerWrapper(hf)


def ids_of(text: str) -> list[int]:
    return byte_tokenizer().encode(text, add_special_tokens=False)


def id_of(token: str) -> int:
    (id_,) = ids_of(token)
    return id_


@functools.cache
def byte_model(architecture: str = "llama") -> LoadedModel:
    """Random weights; it has more logits than tokens, and two tokens that end a reply."""
    vocab_size = len(byte_tokenizer().get_vocab()) + PADDED_LOGITS
    # Its config says nothing of that: so its layout is known to be that of the other tiny model.
    return dataclasses.replace(
        tiny_loaded(architecture),
        name="tiny-bytes",
        module=tiny_module(architecture, vocab_size=vocab_size),
        tokenizer=byte_tokenizer(),
        vocab_size=vocab_size,
        eos_ids=frozenset(map(id_of, EOS)),
        fingerprint=f"tiny-bytes-{architecture}",
    )


def new_grammars() -> GrammarCompiler:
    loaded = byte_model()
    return GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_ids)


@functools.cache
def byte_grammars() -> GrammarCompiler:
    return new_grammars()
