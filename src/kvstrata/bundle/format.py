"""How a bundle is laid out, and its header. docs/format.md describes it.

preamble    magic, version, length of the header
header      JSON
digest      blake3 of all before
records     8 bytes of length each, then a block as the disk tier writes it (or a prompt cache of mlx-lm)
end         8 bytes of zero
digest      blake3 of all before
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from blake3 import blake3

from kvstrata.errors import UnusableFile

MAGIC = b"kvstrata bundle\n"
VERSION = 1
PREAMBLE = struct.Struct("<16sII")
LENGTH = struct.Struct("<Q")
DIGEST_BYTES = 32
MAX_HEADER_BYTES = 32 << 20
# Commas, lists and objects of a header: what it becomes in memory, and how long its parsing holds up others.
MAX_HEADER_VALUES = 1 << 20
MAX_SESSION_FIELDS, MAX_SESSION_CHARS = 8, 512
MAX_LAYERS = 4096
MAX_TOKENS = 1 << 28
AGAIN = "Export it again, or copy it again."

Kind = Literal["conversation", "prompt_cache"]
Section = Sequence[Mapping[str, Any]]  # JSON objects that mean nothing here


@dataclass(frozen=True)
class ModelNamed:
    """The model that a conversation was computed by: what `prefix_cache/keys.py` makes roots of."""

    fingerprint: str
    dtype: str
    layout: tuple[str, ...]
    max_kv_size: int | None = None


@dataclass(frozen=True)
class Header:
    """`session`: what it is called, and by what it is recognised. `sections`: what others keep with a conversation, by
    name; `replies` is one. `prompt`: of a prompt cache, what it was made of."""

    kind: Kind
    model: ModelNamed | None = None  # of a conversation
    num_tokens: int = 0
    session: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, Section] = field(default_factory=dict)
    prompt: Mapping[str, Any] = field(default_factory=dict)


def encode_header(header: Header) -> bytes:
    """The beginning of a file, with its digest."""
    fields: dict[str, Any] = {"kind": header.kind}
    if header.model is not None:
        model = header.model
        fields["model"] = {
            "fingerprint": model.fingerprint,
            "dtype": model.dtype,
            "layout": list(model.layout),
            "max_kv_size": model.max_kv_size,
        }
        fields |= {
            "num_tokens": header.num_tokens,
            "session": dict(header.session),
            "sections": {name: list(section) for name, section in header.sections.items()},
        }
    else:
        fields["prompt"] = dict(header.prompt)
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise UnusableFile(f"The header would have {len(text)} bytes; at most {MAX_HEADER_BYTES} can be read back.")
    beginning = PREAMBLE.pack(MAGIC, VERSION, len(text)) + text
    return beginning + blake3(beginning).digest()


def header_bytes_of(preamble: bytes) -> int:
    """Of the JSON, verified as far as the preamble tells."""
    if len(preamble) < PREAMBLE.size or not preamble.startswith(MAGIC):
        raise UnusableFile("This is no file that kvstrata exported.")
    _, version, length = PREAMBLE.unpack(preamble)
    if version != VERSION:
        raise UnusableFile(
            f"This file has format version {version}; this kvstrata reads version {VERSION}. Export it with the same "
            "version of kvstrata, or update this one."
        )
    if length > MAX_HEADER_BYTES:
        raise UnusableFile(f"The file's header has {length} bytes; at most {MAX_HEADER_BYTES} are read. {AGAIN}")
    return length


def decode_header(text: bytes) -> Header:
    num_values = sum(map(text.count, (b",", b"[", b"{")))
    if num_values > MAX_HEADER_VALUES:
        raise UnusableFile(f"The file's header has {num_values} values; at most {MAX_HEADER_VALUES} are read. {AGAIN}")
    try:
        fields = json.loads(text)
        return _header(fields)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError) as error:
        raise UnusableFile(f"The file's header makes no sense: {type(error).__name__}. {AGAIN}") from error


def _header(fields: Any) -> Header:
    _require(isinstance(fields, dict))
    kind = fields["kind"]
    if kind == "prompt_cache":
        prompt = fields["prompt"]
        _require(isinstance(prompt, dict))
        return Header("prompt_cache", prompt=prompt)
    _require(kind == "conversation")
    num_tokens, session, sections = fields["num_tokens"], fields["session"], fields["sections"]
    _require(type(num_tokens) is int and 0 < num_tokens <= MAX_TOKENS)
    _require(isinstance(session, dict) and len(session) <= MAX_SESSION_FIELDS)
    _require(all(isinstance(text, str) and len(text) <= MAX_SESSION_CHARS for text in session.values()))
    _require(isinstance(sections, dict) and len(sections) <= 16)
    for section in sections.values():
        _require(isinstance(section, list) and all(isinstance(each, dict) for each in section))
    return Header("conversation", _model(fields["model"]), num_tokens, session, sections)


def _model(fields: Any) -> ModelNamed:
    fingerprint, dtype, layout, bound = (fields[name] for name in ("fingerprint", "dtype", "layout", "max_kv_size"))
    _require(isinstance(fingerprint, str) and isinstance(dtype, str))
    _require(isinstance(layout, list) and len(layout) <= MAX_LAYERS and all(isinstance(each, str) for each in layout))
    _require(bound is None or (type(bound) is int and bound > 0))
    return ModelNamed(fingerprint, dtype, tuple(layout), bound)


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("a field is not what it should be")


def require_same_model(theirs: ModelNamed, ours: ModelNamed) -> None:
    """Refuse what was computed by another, and say what differs."""
    differ = [
        f"{name}: {_short(getattr(theirs, field_name))} in the file, {_short(getattr(ours, field_name))} here"
        for name, field_name in (
            ("weights, tokenizer or template", "fingerprint"),
            ("dtype", "dtype"),
            ("layers", "layout"),
            ("--max-kv-size", "max_kv_size"),
        )
        if getattr(theirs, field_name) != getattr(ours, field_name)
    ]
    if differ:
        raise UnusableFile(
            f"This file was exported from another model ({'; '.join(differ)}). Serve the model that it is from, as it "
            "was served there. Nothing was changed.",
            code="other_model",
        )


def _short(value: object) -> str:
    text = str(value) if not isinstance(value, tuple) else f"{len(value)} layers, {', '.join(dict.fromkeys(value))}"
    return text if len(text) <= 60 else f"{text[:57]}..."
