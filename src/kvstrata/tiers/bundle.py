"""A conversation as one file: write it, verify it, read it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

import numpy as np
from blake3 import blake3

from kvstrata.errors import UnusableFile
from kvstrata.tiers.block import BASE, BLOCK_TOKENS, CHECKPOINT, Block, Chain
from kvstrata.tiers.block_file import (
    ALIGNMENT_BYTES,
    Checksum,
    DamagedBlock,
    decode_block,
    encode_block,
)

MAGIC = b"kvstrata bundle\n"

VERSION = 1

PREAMBLE = struct.Struct("<16sII")

LENGTH = struct.Struct("<Q")

DIGEST_BYTES = 32

MAX_HEADER_BYTES = 32 << 20

# Commas, lists and objects of a header: bounds its memory, and the time for which parsing holds up other threads.
MAX_HEADER_VALUES = 1 << 20

MAX_SESSION_FIELDS, MAX_SESSION_CHARS = 8, 512

MAX_LAYERS = 4096

MAX_TOKENS = 1 << 28

PIECE_BYTES = 1 << 20  # of a piece that the writer yields, at most

HASHED_BYTES = 4 << 20  # read and hashed at once

AGAIN = "Export it again, or copy it again."

CHANGED = "Nothing was changed."

Kind = Literal["conversation", "prompt_cache"]

Section = Sequence[Mapping[str, Any]]  # JSON objects, not interpreted here


@dataclass(frozen=True)
class ModelNamed:
    """The model that computed a conversation: the fields from which `prefix_cache/keys.py` makes roots."""

    fingerprint: str
    dtype: str
    layout: tuple[str, ...]
    max_kv_size: int | None = None


@dataclass(frozen=True)
class BundleHeader:
    """The header of a bundle. `session`: the name of the session, and how it was recognised. `sections`: data of
    other packages about the conversation, by name, such as `replies`. `prompt`: the source of a prompt cache."""

    kind: Kind
    model: ModelNamed | None = None  # that computed a conversation
    num_tokens: int = 0
    session: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, Section] = field(default_factory=dict)
    prompt: Mapping[str, Any] = field(default_factory=dict)


def encode_header(header: BundleHeader) -> bytes:
    """Return the beginning of a file: preamble, header and their digest."""
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


def _header_bytes_of(preamble: bytes) -> int:
    """Return the length of the JSON header; UnusableFile where the preamble is not one of ours."""
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


def _decode_header(text: bytes) -> BundleHeader:
    num_values = sum(map(text.count, (b",", b"[", b"{")))
    if num_values > MAX_HEADER_VALUES:
        raise UnusableFile(f"The file's header has {num_values} values; at most {MAX_HEADER_VALUES} are read. {AGAIN}")
    try:
        fields = json.loads(text)
        return _header(fields)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError) as error:
        raise UnusableFile(f"The file's header makes no sense: {type(error).__name__}. {AGAIN}") from error


def _header(fields: Any) -> BundleHeader:
    _require(isinstance(fields, dict))
    kind = fields["kind"]
    if kind == "prompt_cache":
        prompt = fields["prompt"]
        _require(isinstance(prompt, dict))
        return BundleHeader("prompt_cache", prompt=prompt)
    _require(kind == "conversation")
    num_tokens, session, sections = fields["num_tokens"], fields["session"], fields["sections"]
    _require(type(num_tokens) is int and 0 < num_tokens <= MAX_TOKENS)
    _require(isinstance(session, dict) and len(session) <= MAX_SESSION_FIELDS)
    _require(all(isinstance(text, str) and len(text) <= MAX_SESSION_CHARS for text in session.values()))
    _require(isinstance(sections, dict) and len(sections) <= 16)
    for section in sections.values():
        _require(isinstance(section, list) and all(isinstance(each, dict) for each in section))
    return BundleHeader("conversation", _model(fields["model"]), num_tokens, session, sections)


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
    """Raise UnusableFile if another model computed the file; the message says what differs."""
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


class BundleWriter:
    def __init__(self, header: BundleHeader) -> None:
        self._beginning = encode_header(header)
        self._digest = blake3()

    def begin(self) -> Iterator[memoryview]:
        yield from self._hashed([memoryview(self._beginning)])

    def block(self, block: Block) -> Iterator[memoryview]:
        encoded = encode_block(block, Checksum.BLAKE3)
        yield from self.record(encoded.pieces, encoded.nbytes)

    def record(self, pieces: Iterable[memoryview], nbytes: int) -> Iterator[memoryview]:
        yield from self._hashed([memoryview(LENGTH.pack(nbytes)), *pieces])

    def end(self) -> Iterator[memoryview]:
        yield from self._hashed([memoryview(LENGTH.pack(0))])
        yield memoryview(self._digest.digest())

    def _hashed(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            for start in range(0, piece.nbytes, PIECE_BYTES):
                stride = piece[start : start + PIECE_BYTES]
                self._digest.update(stride)
                yield stride


@dataclass(frozen=True)
class BundleRecord:
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Bundle:
    """A file whose checksum was verified."""

    file: BinaryIO
    header: BundleHeader
    records: tuple[BundleRecord, ...]


@dataclass(frozen=True)
class Lineage:
    """The root and the hash of chained keys. `max_bytes`: most bytes of one record."""

    root: bytes
    chain: Chain
    max_bytes: int


def open_bundle(file: BinaryIO, size_bytes: int, on_hashed: Callable[[], None] = lambda: None) -> Bundle:
    """Verify a whole file, or raise UnusableFile. `on_hashed` is called now and then; it may raise to end the read."""
    file.seek(0)
    preamble = file.read(PREAMBLE.size)
    header_end = PREAMBLE.size + _header_bytes_of(preamble)
    if size_bytes < header_end + 2 * DIGEST_BYTES + LENGTH.size:
        raise UnusableFile(f"The file ends early: it has {size_bytes} bytes. {AGAIN} {CHANGED}")
    _check_whole(file, size_bytes, on_hashed)
    file.seek(0)
    beginning = file.read(header_end)
    if file.read(DIGEST_BYTES) != blake3(beginning).digest():
        raise UnusableFile(f"The file's header is damaged. {AGAIN} {CHANGED}")
    header = _decode_header(beginning[PREAMBLE.size :])
    return Bundle(file, header, tuple(_records(file, header_end + DIGEST_BYTES, size_bytes - DIGEST_BYTES)))


def _check_whole(file: BinaryIO, size_bytes: int, on_hashed: Callable[[], None]) -> None:
    digest, left = blake3(), size_bytes - DIGEST_BYTES
    file.seek(0)
    while left:
        piece = file.read(min(HASHED_BYTES, left))
        if not piece:
            raise UnusableFile(f"The file ends early. {AGAIN} {CHANGED}")
        digest.update(piece)
        left -= len(piece)
        on_hashed()
    if file.read(DIGEST_BYTES + 1) != digest.digest():
        raise UnusableFile(f"The file is damaged or cut short: its checksum is another. {AGAIN} {CHANGED}")


def _records(file: BinaryIO, offset: int, end: int) -> Iterator[BundleRecord]:
    while True:
        file.seek(offset)
        stored = file.read(LENGTH.size) if offset + LENGTH.size <= end else b""
        if len(stored) < LENGTH.size:
            raise UnusableFile(f"The file has no end. {AGAIN} {CHANGED}")
        (nbytes,) = LENGTH.unpack(stored)
        offset += LENGTH.size
        if not nbytes:
            break
        if nbytes < ALIGNMENT_BYTES // 8 or offset + nbytes > end:
            raise UnusableFile(f"The file has a record of {nbytes} bytes where none can be. {AGAIN} {CHANGED}")
        yield BundleRecord(offset, nbytes)
        offset += nbytes
    if offset != end:
        raise UnusableFile(f"The file goes on after its end. {AGAIN} {CHANGED}")


def blocks_of(bundle: Bundle, lineage: Lineage) -> Iterator[Block]:
    """Yield all blocks in order, each verified: they follow each other from the first token to the last. A checkpoint
    comes after the block that ends at it."""
    parent, at, last = lineage.root, 0, None
    for record in bundle.records:
        block = _block(bundle.file, record, lineage)
        if block.part == CHECKPOINT and last is not None:
            if (block.key, block.start) != (last.key, last.start) or block.token_ids != last.token_ids:
                raise _out_of_order()
            last = None
        elif block.part == BASE and (block.parent, block.start) == (parent, at):
            if at // BLOCK_TOKENS != (at + block.num_tokens - 1) // BLOCK_TOKENS:
                raise UnusableFile(f"A block of the file goes across a multiple of {BLOCK_TOKENS}. {AGAIN} {CHANGED}")
            parent, at, last = block.key, at + block.num_tokens, block
        else:
            raise _out_of_order()
        yield block
    if at != bundle.header.num_tokens:
        raise UnusableFile(
            f"The file holds {at} tokens, and says that it has {bundle.header.num_tokens}. {AGAIN} {CHANGED}"
        )


def _out_of_order() -> UnusableFile:
    return UnusableFile(f"The blocks of the file do not follow each other. {AGAIN} {CHANGED}")


def _block(file: BinaryIO, record: BundleRecord, lineage: Lineage) -> Block:
    if record.nbytes > lineage.max_bytes:
        raise UnusableFile(
            f"A block of the file has {record.nbytes} bytes; of this model none has more than {lineage.max_bytes}. "
            f"{AGAIN} {CHANGED}"
        )
    try:
        return decode_block(_read(file, record), None, root=lineage.root, chain=lineage.chain)
    except DamagedBlock as error:
        raise UnusableFile(f"A block of the file is damaged: {error}. {AGAIN} {CHANGED}") from error


def _read(file: BinaryIO, record: BundleRecord) -> memoryview:
    # Uninitialised memory: clearing it first would cost as much as reading.
    buffer = np.empty(record.nbytes, np.uint8).data
    file.seek(record.offset)
    if file.readinto(buffer) != record.nbytes:  # pyright: ignore[reportAttributeAccessIssue]
        raise UnusableFile(f"The file ends early. {AGAIN} {CHANGED}")
    return buffer.toreadonly()
