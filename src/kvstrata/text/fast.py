"""What lies under mlx-lm's TokenizerWrapper: the HF tokenizer, and the Rust one where it can be used alone.

Knows the class hierarchy of transformers, so that nothing else here does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def hf_tokenizer(tokenizer: TokenizerWrapper | PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    # A fast HF tokenizer has a `_tokenizer` too: the Rust one.
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    return tokenizer._tokenizer


def fast_tokenizer(tokenizer: TokenizerWrapper | PreTrainedTokenizerBase) -> Tokenizer | None:
    """The Rust tokenizer, or None where the HF class adds steps of its own around it or has none."""
    hf = hf_tokenizer(tokenizer)
    if not isinstance(hf, PreTrainedTokenizerFast):
        return None
    for method in ("encode", "_encode_plus", "decode", "_decode"):
        if getattr(type(hf), method) is not getattr(PreTrainedTokenizerFast, method):
            return None
    return hf.backend_tokenizer


def decode_slowly(tokenizer: TokenizerWrapper | PreTrainedTokenizerBase, ids: list[int]) -> str:
    """By the HF class. Never 'cleans up' spaces: that changes text which was already shown."""
    return str(hf_tokenizer(tokenizer).decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
