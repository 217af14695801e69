"""Encoding and decoding of blocks: decoding returns the encoded block or raises DamagedBlock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import CHECKPOINT, Block, BlockId
from kvstrata.tiers.block_file import (
    CHECKSUM_ENDS,
    Damage,
    DamagedBlock,
    decode_block,
)
from tests.tiers.disk.blocks import OTHER_ROOT, ROOT, are_equal, content_of, make_block, with_header


def decode(content: bytes, wanted: BlockId | None = None, *, root: bytes | None = ROOT, verify: bool = True) -> Block:
    return decode_block(memoryview(content), wanted, root=root, chain=chain, verify_tensors=verify)


@given(seed=st.integers(0, 2**32), num_values=st.integers(0, 300), verify=st.booleans())
def test_decode_returns_the_block_that_was_encoded(seed: int, num_values: int, verify: bool) -> None:
    block = make_block(seed, num_tokens=256, num_values=num_values)
    content = content_of(block)
    for wanted, root in ((block.id, ROOT), (None, ROOT), (block.id, None), (None, None)):
        back = decode(content, wanted, root=root, verify=verify)
        assert are_equal(back, block)


@pytest.mark.parametrize("verify", [True, False])
def test_decode_of_another_block_than_the_wanted_one_is_damage(verify: bool) -> None:
    block = make_block()
    content = content_of(block)
    for wanted, root, reason in (
        (BlockId(block.key, CHECKPOINT), ROOT, Damage.KEY),
        (BlockId(bytes(32)), ROOT, Damage.KEY),
        (block.id, OTHER_ROOT, Damage.ROOT),
        (None, OTHER_ROOT, Damage.ROOT),
    ):
        with pytest.raises(DamagedBlock) as damage:
            decode(content, wanted, root=root, verify=verify)
        assert damage.value.reason is reason


@given(data=st.data())
def test_decode_of_any_changed_byte_is_damage(data: st.DataObject) -> None:
    content = content_of(make_block())
    at = data.draw(st.integers(0, len(content) - 1))
    changed = content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    with pytest.raises(DamagedBlock):
        decode(changed)


@given(data=st.data(), verify=st.booleans())
def test_decode_of_cut_or_longer_content_is_damage(data: st.DataObject, verify: bool) -> None:
    content = content_of(make_block())
    length = data.draw(st.integers(0, len(content) - 1))
    for changed in (content[:length], content + content[:length] + b"x"):
        with pytest.raises(DamagedBlock):
            decode(changed, verify=verify)


def test_decode_skips_checksums_of_tensors_alone_when_a_seal_has_covered_them() -> None:
    content = bytearray(content_of(make_block()))
    content[-1] ^= 1
    with pytest.raises(DamagedBlock) as damage:
        decode(bytes(content))
    assert damage.value.reason is Damage.TENSOR
    assert decode(bytes(content), verify=False).id == make_block().id
    content[CHECKSUM_ENDS + 40] ^= 1
    with pytest.raises(DamagedBlock) as damage:
        decode(bytes(content), verify=False)
    assert damage.value.reason is Damage.HEADER


HOSTILE_CHANGES: list[Callable[[dict[str, Any]], None]] = [
    lambda fields: fields["v"].update(data_offsets=[-64, fields["v"]["data_offsets"][1] - 64]),
    lambda fields: fields["v"].update(data_offsets=["0", "1"]),
    lambda fields: fields["v"].update(data_offsets=[]),
    lambda fields: fields["v"].update(data_offsets=[0, 1 << 70]),
    lambda fields: fields["v"].update(shape=[float(size) for size in fields["v"]["shape"]]),
    lambda fields: fields["v"].update(shape=[-1, -1]),
    lambda fields: fields["v"].update(shape=None),
    lambda fields: fields["v"].update(dtype="F12"),
    lambda fields: fields["v"].update(dtype=["F16"]),
    lambda fields: fields.update(v=None),
    lambda fields: fields.update(w=fields.pop("v")),
    lambda fields: fields["__metadata__"].update(num_tokens="-1"),
    lambda fields: fields["__metadata__"].update(token_ids="", num_tokens="0"),
    lambda fields: fields["__metadata__"].update(token_ids="AAA="),
    lambda fields: fields["__metadata__"].update(start="-1"),
    lambda fields: fields["__metadata__"].update(start=[]),
    lambda fields: fields["__metadata__"].update(part="../x"),
    lambda fields: fields["__metadata__"].update(part=1),
    lambda fields: fields["__metadata__"].update(parent="00"),
    lambda fields: fields["__metadata__"].update(description="[" * 2000),
    lambda fields: fields["__metadata__"].pop("key"),
]


@pytest.mark.parametrize("verify", [True, False])
def test_decode_of_a_hostile_header_with_a_right_checksum_is_damage(verify: bool) -> None:
    block = make_block()
    content = content_of(block)
    assert are_equal(decode(with_header(content, lambda _: None)), block)
    for change in HOSTILE_CHANGES:
        with pytest.raises(DamagedBlock):
            decode(with_header(content, change), verify=verify)
