"""Tokenizers: from the vocabulary in a GGUF file to the files that transformers reads.

A GGUF file names how text is split before it is tokenized (`tokenizer.ggml.pre`) and leaves the rules to the reader. A
name that is not known here is refused: other splits would give other tokens, and worse answers without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvstrata.models.gguf.container import BadGguf, Gguf

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # llama.cpp's types of tokens
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's sign for one


def _words(digits: str) -> Any:
    """Words with the space before them, runs of `digits`, signs, line breaks; as GPT-4's tokenizer splits, and those
    made after it."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _single_digits() -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


SPLITS: Mapping[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": _single_digits,
    "qwen2": lambda: _words(r"\p{N}"),
    "llama-bpe": lambda: _words(r"\p{N}{1,3}"),
}
COMPOSES = {"qwen2"}  # text is normalised (NFC) first
WHOLE_WORDS_FIRST = {"llama-bpe"}  # a word that is a token is one, whatever the merges say


def build(gguf: Gguf) -> Tokenizer:
    metadata = gguf.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise BadGguf(
            f"{gguf.path} has a tokenizer of kind {kind!r}; kvstrata knows gpt2 (BPE) and llama (SentencePiece)."
        )
    try:
        tokenizer = _byte_level(gguf) if kind == "gpt2" else _sentence_pieces(gguf)
    except BadGguf:
        raise
    # tokenizers raises bare Exception for a vocabulary that does not fit its merges.
    except Exception as error:
        raise BadGguf(f"The tokenizer in {gguf.path} makes no sense: {error}. Get it again") from error
    _add_tokens(tokenizer, gguf)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") and bos is not None:
        first = tokens_of(gguf)[bos]
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=[first, "$A"], pair=[first, "$A", first, "$B"], special_tokens=[(first, bos)]
        )
    return tokenizer


def tokens_of(gguf: Gguf) -> list[str]:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise BadGguf(
            f"{gguf.path} has no tokenizer. Get one that has, or convert the model with its tokenizer's files."
        )
    return tokens


def _byte_level(gguf: Gguf) -> Tokenizer:
    name = gguf.metadata.get("tokenizer.ggml.pre", "gpt-2")
    if name not in SPLITS:
        known = ", ".join(SPLITS)
        raise BadGguf(f"{gguf.path} has a tokenizer that splits text as {name!r}; kvstrata knows {known}.")
    vocabulary = {token: index for index, token in enumerate(tokens_of(gguf))}
    merges = [_pair(merge) for merge in gguf.metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in WHOLE_WORDS_FIRST))
    if name in COMPOSES:
        tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = SPLITS[name]()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentence_pieces(gguf: Gguf) -> Tokenizer:
    """SentencePiece's BPE: of two neighbours that make a token, those whose token has the best score are merged."""
    metadata, tokens = gguf.metadata, tokens_of(gguf)
    scores = metadata.get("tokenizer.ggml.scores", [0.0] * len(tokens))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _merges(vocabulary, scores)
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefixes = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    steps = [normalizers.Prepend(SPACE), spaces] if prefixes else [spaces]
    tokenizer.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    strip = [decoders.Strip(" ", 1, 0)] if prefixes else []
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, the best first."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right, (token[:cut], token[cut:])))
    return [pair for *_, pair in sorted(found)]


def _add_tokens(tokenizer: Tokenizer, gguf: Gguf) -> None:
    tokens = tokens_of(gguf)
    types = gguf.metadata.get("tokenizer.ggml.token_type", [])
    for kind, is_special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, special=is_special, normalized=False)
            for token, each in zip(tokens, types, strict=False)
            if each == kind
        ]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)


def ids_of(gguf: Gguf) -> dict[str, Any]:
    """Return special ids for config.json: the first of a text, and all that end one."""
    metadata = gguf.metadata
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ids = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(each for each in ends if each is not None)),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: value for name, value in ids.items() if value not in (None, [])}


def tokenizer_config(gguf: Gguf, context_tokens: int) -> dict[str, Any]:
    tokens, metadata = tokens_of(gguf), gguf.metadata
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens,
        **{name: tokens[index] for name, index in ids.items() if index is not None},
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
