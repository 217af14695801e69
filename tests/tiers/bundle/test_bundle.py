"""Bundles: the file layout, and the refusal of changed files."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine.bundle_transfer import ExportedConversation
from kvstrata.engine.prompt_cache_file import example_checkpoint
from kvstrata.errors import ConfigError, RequestError, UnusableFile
from kvstrata.kv.block_checks import check_description
from kvstrata.kv.checkpoints import Checkpoint
from kvstrata.kv.layout import Layout
from kvstrata.prefix_cache.jobs import run_to_end
from kvstrata.prefix_cache.keys import as_ids, chain
from kvstrata.prefix_cache.transfer import neutral_root
from kvstrata.tiers.block import BASE, CHECKPOINT, Block, BlockTensor
from kvstrata.tiers.bundle import (
    LENGTH,
    MAGIC,
    MAX_HEADER_VALUES,
    PREAMBLE,
    VERSION,
    Bundle,
    BundleHeader,
    BundleWriter,
    Lineage,
    ModelNamed,
    blocks_of,
    encode_header,
    open_bundle,
)
from tests.server.test_move import PROMPT, complete, stored
from tests.support.models import tiny_loaded
from tests.support.servers import Served, running

GOLDEN = Path(__file__).parent / "golden" / "bundle-1.kvstrata"
ROOT = bytes(range(32))
MODEL = ModelNamed("weights", "float32", ("full:1:4:4",), None)
HEADER = BundleHeader("conversation", MODEL, 3, {"id": "chat-1"}, {"replies": [{"call": "c1", "ids": [1, 2]}]})


def golden_block() -> Block:
    ids = np.array([5, 6, 7], "<i4")
    tensor = BlockTensor("F32", (1, 1, 3, 4), np.arange(12, dtype="<f4"))
    return Block(chain(ROOT, ids), ROOT, ROOT, 0, ids.tobytes(), {"0.k.values": tensor}, {"groups": []})


def encode_bundle(header: BundleHeader, given_blocks: Sequence[Block]) -> bytes:
    writer = BundleWriter(header)
    pieces = [*writer.begin(), *(p for block in given_blocks for p in writer.block(block)), *writer.end()]
    return b"".join(map(bytes, pieces))


def open_content(content: bytes) -> Bundle:
    return open_bundle(io.BytesIO(content), len(content))


def test_bundle_format_equals_the_golden_file() -> None:
    content = GOLDEN.read_bytes()
    assert encode_bundle(HEADER, [golden_block()]) == content
    bundle = open_content(content)
    assert bundle.header == HEADER
    (block,) = blocks_of(bundle, Lineage(ROOT, chain, 1 << 20))
    assert block.token_ids == golden_block().token_ids
    assert bytes(block.tensors["0.k.values"].view()) == np.arange(12, dtype="<f4").tobytes()


def test_bundle_of_another_version_is_refused_with_advice() -> None:
    content = PREAMBLE.pack(MAGIC, VERSION + 1, 0) + bytes(200)
    with pytest.raises(UnusableFile, match="update this one"):
        open_content(content)


@settings(max_examples=300)
@given(data=st.data())
def test_bundle_with_any_changed_byte_is_refused(data: st.DataObject) -> None:
    content = GOLDEN.read_bytes()
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        changed = content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    elif kind == "cut":
        changed = content[:at]
    elif kind == "insert":
        changed = content[:at] + data.draw(st.binary(min_size=1, max_size=16)) + content[at:]
    else:
        changed = content + content[at:]
    with pytest.raises(UnusableFile):
        list(blocks_of(open_content(changed), Lineage(ROOT, chain, 1 << 20)))


# Files with correct checksums and wrong content, sent to a server.


@pytest.fixture(scope="module", params=["llama", "qwen3_next"])
def exported(request: pytest.FixtureRequest) -> Iterator[tuple[Served, bytes]]:
    """A server with an empty cache, and a file that it exported."""
    with running(tiny_loaded(request.param)) as served:
        complete(served, PROMPT)
        session = served.server.state.sessions.find_session("chat-1", None)
        assert session is not None
        engine, key = served.server.state.engine, session.key
        longest = engine.ask_cache(lambda cache: cache.longest_conversation("", key)).result(60)
        assert longest is not None
        export = engine.transfer.begin_export(ExportedConversation(longest.ids, ""))
        content = b"".join(map(bytes, export.pieces()))
        export.close()
        served.ask("/cache/clear", tier="all")
        assert stored(served) == (0, 0)
        yield served, content


def import_file(served: Served, content: bytes) -> int:
    """Import a file, and return the number of new tokens."""
    return served.server.state.engine.transfer.import_file(
        io.BytesIO(content), len(content), "", lambda _: as_ids([1])
    ).num_new


def assert_refused(served: Served, content: bytes) -> None:
    with pytest.raises(RequestError) as error:
        import_file(served, content)
    assert error.value.status == 400


def split_bundle(served: Served, content: bytes) -> tuple[BundleHeader, list[Block], bytes]:
    identity = served.server.state.engine.ask(lambda core: core.prefix_cache.matcher.identity).result(60)
    root, bundle = neutral_root(identity), open_content(content)
    return bundle.header, list(blocks_of(bundle, Lineage(root, chain, 1 << 30))), root


def rechained(given_blocks: Sequence[Block], root: bytes) -> list[Block]:
    """Return the blocks with keys that match their tokens."""
    made: list[Block] = []
    parent, key = root, root
    for block in given_blocks:
        if block.part == BASE:
            parent, key = key, chain(key, np.frombuffer(block.token_ids, "<i4").astype(np.int32))
        made.append(replace(block, parent=parent, key=key, root=root))
    return made


def bundle_of(fields: Any, rest: bytes) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    beginning = PREAMBLE.pack(MAGIC, VERSION, len(text)) + text
    whole = beginning + blake3(beginning).digest() + rest
    return whole + blake3(whole).digest()


def test_import_refuses_hostile_headers(exported: tuple[Served, bytes]) -> None:
    served, content = exported
    bundle = open_content(content)
    start = len(encode_header(bundle.header))
    rest = content[start:-32]
    fields = json.loads(content[PREAMBLE.size : start - 32])
    hostile: list[Any] = [
        b"[" * 100_000,
        b'{"kind":' * 20_000,
        b"[" + b"0," * MAX_HEADER_VALUES + b"0]",
        b"\xff\xfe",
        b"null",
        {},
        {**fields, "kind": "other"},
        {**fields, "kind": ["conversation"]},
        {**fields, "num_tokens": fields["num_tokens"] - 1},
        {**fields, "num_tokens": 1 << 62},
        {**fields, "num_tokens": "407"},
        {**fields, "num_tokens": -1},
        {**fields, "session": {"id": "x" * 10_000}},
        {**fields, "session": {"id": {"id": 1}}},
        {**fields, "sections": {"replies": "text"}},
        {**fields, "sections": {"replies": [1, 2]}},
        {**fields, "sections": {str(i): [] for i in range(100)}},
        {**fields, "model": None},
        {**fields, "model": {**fields["model"], "layout": ["full"] * 100_000}},
        {**fields, "model": {**fields["model"], "dtype": "float16"}},
        {**fields, "model": {**fields["model"], "max_kv_size": 64}},
    ]
    for each in hostile:
        assert_refused(served, bundle_of(each, rest))
    # Records that are missing or too long.
    for records in (
        b"",
        LENGTH.pack(1 << 62),
        LENGTH.pack(600) + bytes(600) + LENGTH.pack(0),
        rest + rest,
        LENGTH.pack(0),
    ):
        assert_refused(served, bundle_of(fields, records))
    assert stored(served) == (0, 0)
    assert import_file(served, bundle_of(fields, rest)) == fields["num_tokens"]
    served.ask("/cache/clear", tier="all")


def changed_description(block: Block, change: Callable[[Any], None]) -> Block:
    description = json.loads(json.dumps(block.description))
    change(description)
    return replace(block, description=description)


def changed_tensor(block: Block, dtype: str, shape: tuple[int, ...]) -> Block:
    name, tensor = next(iter(block.tensors.items()))
    return replace(block, tensors={**block.tensors, name: BlockTensor(dtype, shape, tensor.data)})


def hostile_blocks(block: Block) -> list[Block]:
    name, tensor = next(iter(block.tensors.items()))
    half = BlockTensor("F16", tensor.shape, np.zeros(tensor.nbytes // 2, np.uint8))
    cut = BlockTensor("F32", (0, *tensor.shape[1:]), b"")
    changes: list[Callable[[Any], None]] = [
        lambda d: d["groups"][0]["layers"].append(99),
        lambda d: d["groups"][0]["layers"].extend([0] * 1000),
        lambda d: d["groups"][0].update(layers=[-1]),
        lambda d: d["groups"].extend([{**d["groups"][0], "layers": []}] * 1000),
        lambda d: d["groups"][0]["v"]["where"].update(segments=[0] * 1000),
        lambda d: d["groups"][0].update(layers="all"),
        lambda d: d["groups"][0]["k"]["where"].update(position=1 << 40),
        lambda d: d["groups"][0]["k"]["where"].update(num_tokens=1 << 40),
        lambda d: d["groups"][0]["k"]["where"].update(dim=-16),
        lambda d: d["groups"][0]["k"]["where"].update(segments=[1 << 40]),
        lambda d: d["groups"][0]["k"].update(spec={"codec": "pickle", "version": 1}),
        lambda d: d["groups"][0]["k"].update(spec={"codec": "planes", "version": 1, "bits": 8}),
        lambda d: d["groups"][0]["k"].update(spec=None),
        lambda d: d.update(groups=[]),
        lambda d: d.update(groups=None),
        lambda d: d.pop("groups"),
    ]
    return [
        *(changed_description(block, change) for change in changes),
        changed_tensor(block, "U32", tensor.shape),
        changed_tensor(block, tensor.dtype, (tensor.shape[-1], *tensor.shape[1:-1], tensor.shape[0])),
        changed_tensor(block, "U8", (*tensor.shape[:-1], tensor.shape[-1] * 4)),
        changed_tensor(block, "I64", (*tensor.shape[:-1], tensor.shape[-1] // 2)),
        replace(block, tensors={**block.tensors, name: half}),
        replace(block, tensors={**block.tensors, name: cut}),
        replace(block, tensors={key: each for key, each in block.tensors.items() if key != name}),
        replace(block, token_ids=np.full(block.num_tokens, 96 + 1, "<i4").tobytes()),
        replace(block, token_ids=np.full(block.num_tokens, -1, "<i4").tobytes()),
        replace(block, start=block.start + 1),
    ]


def test_import_refuses_hostile_blocks(exported: tuple[Served, bytes]) -> None:
    served, content = exported
    header, good, root = split_bundle(served, content)
    bases = [i for i, block in enumerate(good) if block.part == BASE]
    for hostile in hostile_blocks(good[bases[-1]]):
        changed = [*good[: bases[-1]], hostile, *good[bases[-1] + 1 :]]
        assert_refused(served, encode_bundle(header, rechained(changed, root)))
    # Blocks out of order, repeated, missing, and of another chain.
    for order in (good[::-1], [*good, good[-1]], good[1:], good[:-1], [good[0], *good]):
        assert_refused(served, encode_bundle(header, order))
    assert_refused(served, encode_bundle(header, rechained(good, bytes(32))))
    assert stored(served) == (0, 0)


# A recurrent state with more arrays than a loop could ever visit.
ENDLESS = {"recurrent": 1 << 62, "held": []}


def test_import_refuses_hostile_checkpoints(exported: tuple[Served, bytes]) -> None:
    served, content = exported
    header, good, _ = split_bundle(served, content)
    checkpoints = [i for i, block in enumerate(good) if block.part == CHECKPOINT]
    if not checkpoints:
        assert_refused(served, encode_bundle(header, [*good, replace(good[-1], part=CHECKPOINT)]))
        return
    at = checkpoints[-1]
    name, tensor = next(iter(good[at].tensors.items()))
    flat = BlockTensor(tensor.dtype, (1, tensor.nbytes // 4), tensor.data)
    none = {key: each for key, each in good[at].tensors.items() if key != name}
    hostile = [
        replace(good[at], tensors={**good[at].tensors, name: flat}),
        replace(good[at], tensors=none),
        changed_description(good[at], lambda d: d.update(position=1)),
        changed_description(good[at], lambda d: d["states"].pop()),
        changed_description(good[at], lambda d: d.update(states=[None] * len(d["states"]))),
        changed_description(good[at], lambda d: d.update(states=7)),
        *(
            changed_description(good[at], lambda d, place=place: d["states"].__setitem__(place, ENDLESS))
            for place in range(len(good[at].description["states"]))
        ),
    ]
    for each in hostile:
        assert_refused(served, encode_bundle(header, [*good[:at], each, *good[at + 1 :]]))
    # A model with states cannot resume where there is no checkpoint.
    assert_refused(served, encode_bundle(header, [*good[:at], *good[at + 1 :]]))
    assert stored(served) == (0, 0)


HOSTILE_TEXTS = tuple(
    json.dumps(value)
    for value in (
        None,
        True,
        -1,
        0,
        1 << 62,
        1e300,
        "",
        "x" * 99,
        [],
        [0] * 999,
        {},
        {"codec": "raw", "version": 1},
        ENDLESS,
    )
)


def containers_in(value: Any) -> list[tuple[Any, Any]]:
    """Return every container of a JSON value, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *containers_in(value[key]))]


@pytest.fixture(scope="module")
def described(exported: tuple[Served, bytes]) -> tuple[Served, list[Block], Layout, Checkpoint | None]:
    """The server, the blocks of its file, its layout and a checkpoint of its model."""
    served, content = exported
    _, good, _ = split_bundle(served, content)
    engine = served.server.state.engine
    layout, example = engine.ask(lambda core: (core.runner.layout, run_to_end(example_checkpoint(core)))).result(60)
    return served, good, layout, example


@settings(max_examples=100)
@given(data=st.data())
def test_changed_description_is_refused_or_within_the_counts_of_the_model(
    described: tuple[Served, list[Block], Layout, Checkpoint | None], data: st.DataObject
) -> None:
    served, good, layout, example = described
    block = data.draw(st.sampled_from(good))
    description = json.loads(json.dumps(block.description))
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(containers_in(description)))
        container[key] = json.loads(data.draw(st.sampled_from(HOSTILE_TEXTS)))
    changed = replace(block, description=description)
    try:
        check_description(layout, changed, example)
    except (ConfigError, ValueError, OverflowError):
        return
    assert len(description.get("groups") or description["states"]) <= len(layout.flat())
    with contextlib.suppress(ConfigError, ValueError, TypeError, LookupError, ArithmeticError):
        engine = served.server.state.engine
        engine.ask(lambda core: run_to_end(core.prefix_cache.imports.check_block(changed, example))).result(60)


@settings(max_examples=200)
@given(seed=st.integers(0, 1 << 30))
def test_import_refuses_damaged_files(exported: tuple[Served, bytes], seed: int) -> None:
    served, content = exported
    source = np.random.default_rng(seed)
    damaged = bytearray(content)
    for _ in range(int(source.integers(1, 4))):
        at = int(source.integers(0, len(damaged)))
        damaged[at] ^= int(source.integers(1, 256))
    cut = int(source.integers(0, len(content)))
    middle, length = len(content) // 2, len(content) // 4
    swapped = content[:length] + content[middle:] + content[length:middle]
    for each in (bytes(damaged), content[:cut], swapped):
        assert_refused(served, each)
    assert stored(served) == (0, 0)
