"""The file format of blocks: the golden file, and files that the safetensors library can read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import ITEM_BYTES, Block, BlockId, BlockTensor
from kvstrata.tiers.block_file import ALIGNMENT_BYTES, Checksum, fastest
from kvstrata.tiers.disk.filesystem import Filesystem
from kvstrata.tiers.disk.reader import opened, read_block, read_header
from tests.tiers.disk.blocks import ROOT, are_equal, content_of, make_block, random_tensor

GOLDEN = Path(__file__).parent / "golden" / "block-1.safetensors"


def golden_block() -> Block:
    """Return a block with literal values, which no change of a random generator affects."""
    ids = np.array([1, 2, 70_000, 2**31 - 1], dtype=np.int32)
    return Block(
        key=chain(ROOT, ids),
        parent=ROOT,
        root=ROOT,
        start=256,
        token_ids=ids.astype("<i4").tobytes(),
        tensors={
            "v": BlockTensor("BF16", (2, 3), bytes(range(12))),
            "k.high": BlockTensor("U32", (2, 1), b"\x01\x02\x03\x04\xfc\xfd\xfe\xff"),
            'odd "name" é': BlockTensor("U8", (0, 4), b""),
        },
        description={"v": "planes:4", "k": {"codec": "planes", "bits": 8}, "layers": [0, 5]},
        part="low",
    )


def write(path: Path, block: Block, checksum: Checksum = Checksum.BLAKE3) -> Path:
    path.write_bytes(content_of(block, checksum))
    return path


def read(path: Path, block: Block) -> Block:
    return read_block(Filesystem(), path, block.id, chain=chain, root=block.root)


def test_encode_block_equals_the_golden_file() -> None:
    """If this fails, the format has changed: raise FORMAT_VERSION and add a golden file; never replace one."""
    assert content_of(golden_block(), Checksum.SHA256) == GOLDEN.read_bytes()


def test_read_golden_file_returns_its_block() -> None:
    assert are_equal(read(GOLDEN, golden_block()), golden_block())


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("checksum", Checksum)
def test_read_every_dtype_and_checksum_returns_the_same_bytes(tmp_path: Path, dtype: str, checksum: Checksum) -> None:
    tensors = {
        "all": random_tensor(np.random.default_rng(1), dtype, (3, 5)),
        "one": BlockTensor(dtype, (), bytes(8)[: ITEM_BYTES[dtype]]),
    }
    block = make_block()
    block = Block(block.key, ROOT, ROOT, 0, block.token_ids, tensors, {})
    assert are_equal(read(write(tmp_path / "block", block, checksum), block), block)


tensors = st.builds(
    lambda dtype, shape, seed: random_tensor(np.random.default_rng(seed), dtype, tuple(shape)),
    st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 2**32),
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
tensor_names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1).filter(
    lambda name: name != "__metadata__"
)


@given(
    named=st.dictionaries(tensor_names, tensors, max_size=5),
    ids=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=300),
    start=st.integers(0, 2**40),
    description=st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), json_values, max_size=4),
    checksum=st.sampled_from(Checksum),
)
def test_read_any_block_returns_it_aligned_and_valid_safetensors(
    tmp_path_factory: pytest.TempPathFactory, named, ids, start, description, checksum
) -> None:
    token_ids = np.array(ids, dtype="<i4")
    description = json.loads(json.dumps(description))
    block = Block(chain(ROOT, token_ids), ROOT, ROOT, start, token_ids.tobytes(), named, description)
    path = write(tmp_path_factory.getbasetemp() / "any", block, checksum)
    assert are_equal(read(path, block), block)
    with opened(Filesystem(), path) as fd:
        header = read_header(Filesystem(), fd)
    assert header.header_bytes % ALIGNMENT_BYTES == 0
    assert all(place.offset % ITEM_BYTES[place.dtype] == 0 for place in header.ranges.values())
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(named)


def test_safetensors_library_reads_the_same_values(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    wide, narrow = (
        generator.integers(0, 2**32, (3, 7), dtype=np.uint32),
        generator.standard_normal((2, 4)).astype(np.float16),
    )
    block = make_block()
    tensors = {
        "wide": BlockTensor("U32", wide.shape, wide.data),
        "narrow": BlockTensor("F16", narrow.shape, narrow.data),
    }
    block = Block(block.key, ROOT, ROOT, 0, block.token_ids, tensors, {"codec": "raw"})
    with safe_open(write(tmp_path / "block", block), "numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("wide"), wide)
        np.testing.assert_array_equal(file.get_tensor("narrow"), narrow)
        assert file.metadata()["description"] == '{"codec":"raw"}'
        assert file.metadata()["format"] == "kvstrata.block.1"


def test_read_header_of_several_pages_returns_the_block(tmp_path: Path) -> None:
    block = make_block()
    tensors = {f"state.{layer}": BlockTensor("F32", (1,), bytes([layer, 0, 0, 0])) for layer in range(200)}
    block = Block(block.key, ROOT, ROOT, 0, block.token_ids, tensors, {"padding": "x" * 9000})
    path = write(tmp_path / "block", block)
    assert path.stat().st_size > 8 * ALIGNMENT_BYTES
    assert are_equal(read(path, block), block)


def test_block_with_invalid_fields_is_refused() -> None:
    good = make_block()
    for bad in (
        lambda: BlockId(b"short"),
        lambda: BlockId(good.key, "../base"),
        lambda: BlockId(good.key, ""),
        lambda: BlockTensor("F32", (2,), bytes(7)),
        lambda: BlockTensor("float32", (2,), bytes(8)),
        lambda: BlockTensor("U8", (-1, -8), bytes(8)),
        lambda: Block(good.key, ROOT, ROOT, 0, b"", {}, {}),
        lambda: Block(good.key, ROOT, ROOT, 0, b"abc", {}, {}),
        lambda: Block(good.key, ROOT, ROOT, -1, good.token_ids, {}, {}),
        lambda: Block(good.key, b"", ROOT, 0, good.token_ids, {}, {}),
        lambda: Block(good.key, ROOT, ROOT, 0, good.token_ids, {"__metadata__": BlockTensor("U8", (0,), b"")}, {}),
    ):
        with pytest.raises(ValueError):
            bad()


def test_fastest_checksum_is_the_one_that_takes_least_time() -> None:
    assert fastest() in Checksum
