"""Text to token ids, and the exact bytes of one token. Safe to call from any thread.

Knows the tokenizer classes of transformers, so that no other module does. Does not know chats, replies or sampling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvstrata.errors import InvalidRequest

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"  # sentencepiece writes a space like this


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
    """Decode by the HF class, without its 'clean up' of spaces, which changes text that was already shown."""
    return str(hf_tokenizer(tokenizer).decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def encode_prompt(tokenizer: TokenizerWrapper, text: str) -> tuple[int, ...]:
    """Tokenize the prompt of a plain completion: with the tokenizer's beginning (BOS), without its end."""
    require_unicode(text, param="prompt")
    hf = hf_tokenizer(tokenizer)
    begun = bool(hf.bos_token) and text.startswith(str(hf.bos_token))
    ids = _encode(tokenizer, text, with_special=not begun)
    ended = bool(ids) and ids[-1] == hf.eos_token_id and not text.endswith(str(hf.eos_token))
    return ids[:-1] if ended else ids


def encode_rendered(tokenizer: TokenizerWrapper, text: str) -> tuple[int, ...]:
    """Tokenize text that contains its special tokens already, as chat templates write it."""
    return _encode(tokenizer, text, with_special=False)


def encode_rendered_all(tokenizer: TokenizerWrapper, texts: Sequence[str]) -> list[Sequence[int]]:
    """Tokenize several such texts, each by itself."""
    return _encode_all(tokenizer, texts, with_special=False)


def require_unicode(text: str, *, param: str) -> None:
    """Replace unpaired surrogates, which JSON can carry and no tokenizer can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as fault:
        near = text[max(0, fault.start - 20) : fault.start]
        message = f"{param} is not valid Unicode: an unpaired surrogate after {near!r}. Send the whole character."
        raise InvalidRequest(message, param=param) from fault


def longest_token_chars(tokenizer: TokenizerWrapper) -> int:
    """Return the most characters that a token stands for: a bound on the number of tokens of a text."""
    return max(map(len, hf_tokenizer(tokenizer).get_vocab()), default=1)


def token_text(tokenizer: TokenizerWrapper, id: int) -> str:
    """Return the text of a token, its space kept. A part of a character shows as U+FFFD; `token_bytes` is exact."""
    return token_bytes(tokenizer, id).decode("utf-8", "replace")


def token_bytes(tokenizer: TokenizerWrapper, id: int) -> bytes:
    """Return the bytes that a token adds to a text. Ids past the vocabulary (padded logits) add none."""
    return tokens_bytes(tokenizer, (id,))[0]


def tokens_bytes(tokenizer: TokenizerWrapper, ids: Iterable[int]) -> list[bytes]:
    """Return the bytes of each of many tokens: ten times as fast as one at a time, because a tokenizer determines its
    kind slowly."""
    fast = fast_tokenizer(tokenizer)
    if fast is None:
        return [decode_slowly(tokenizer, [id]).encode("utf-8") for id in ids]
    bytes_of = _byte_level_bytes if _is_byte_level(fast.decoder) else _sentencepiece_bytes
    return [b"" if token is None else bytes_of(token) for token in map(fast.id_to_token, ids)]


def ids_text(tokenizer: TokenizerWrapper, ids: Iterable[int]) -> str:
    """Decode a run of tokens exactly as it appears in a longer text: no decoder changes its ends."""
    return b"".join(tokens_bytes(tokenizer, ids)).decode("utf-8", "replace")


def decode_ids(tokenizer: TokenizerWrapper, ids: list[int]) -> str:
    """Return the text of ids, with special tokens."""
    fast = fast_tokenizer(tokenizer)
    return decode_slowly(tokenizer, ids) if fast is None else fast.decode(ids, skip_special_tokens=False)


def _encode(tokenizer: TokenizerWrapper, text: str, *, with_special: bool) -> tuple[int, ...]:
    (ids,) = _encode_all(tokenizer, [text], with_special=with_special)
    return tuple(ids)


def _encode_all(tokenizer: TokenizerWrapper, texts: Sequence[str], *, with_special: bool) -> list[Sequence[int]]:
    fast = fast_tokenizer(tokenizer)
    if fast is None or fast.truncation is not None or fast.padding is not None:
        return [hf_tokenizer(tokenizer).encode(text, add_special_tokens=with_special) for text in texts]
    # The batch call lets other threads run and leaves offsets out: half the time of `encode`, which holds the GIL.
    return [made.ids for made in fast.encode_batch_fast(list(texts), add_special_tokens=with_special)]


def _is_byte_level(decoder: Any) -> bool:
    return decoder is not None and _names_byte_level(json.loads(decoder.__getstate__()))


def _names_byte_level(spec: dict[str, Any]) -> bool:
    return spec["type"] == "ByteLevel" or any(_names_byte_level(part) for part in spec.get("decoders", ()))


def _byte_level_bytes(token: str) -> bytes:
    alphabet = _byte_alphabet()
    # Added tokens are plain text, not letters of the byte alphabet; the decoder distinguishes them in the same way.
    if all(letter in alphabet for letter in token):
        return bytes(alphabet[letter] for letter in token)
    return token.encode("utf-8")


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_WORD_START, " ").encode("utf-8")


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the others follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}
