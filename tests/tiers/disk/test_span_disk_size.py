"""Size of spans on the disk against their size in memory, for shapes of the default model and every codec.

The size on the disk is `st_blocks * 512`, not the length of the files: the allocated bytes, whole pages included, which
the tier's limit counts.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.attention.segments import SealedSegment
from kvstrata.codecs.registry import parse_for
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.packing import block_ends
from kvstrata.kv.span import Span
from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import Block
from kvstrata.tiers.interface import Accepted
from tests.kv.drive import packed
from tests.tiers.disk.blocks import ROOT, block_files, open_tier

# SmolLM2-135M.
NUM_LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
NUM_TOKENS = 2000
CODECS = ("raw", "affine:8", "affine:4", "affine:2", "planes:8", "planes:4", "planes:2")
SLOW_CODECS = ("affine:6", "affine:5", "affine:3")
CASES = [
    *(pytest.param(name, mx.float32, id=name) for name in CODECS),
    *(pytest.param(name, mx.float32, id=name, marks=pytest.mark.slow) for name in SLOW_CODECS),
    pytest.param("raw", mx.bfloat16, id="raw-bfloat16"),
]


def random_span(name: str, dtype: mx.Dtype) -> Span:
    """Return a span with the same values in every layer, because sizes do not depend on values."""
    codec = parse_for(name, HEAD_DIM)
    values = [mx.random.normal((KV_HEADS, NUM_TOKENS, HEAD_DIM), key=mx.random.key(i)).astype(dtype) for i in (0, 1)]
    part = SealedSegment(*(codec.encode(each, 0) for each in values))
    mx.eval(part.arrays())
    spec = LayerSpec("full", kv_heads=KV_HEADS, k_dim=HEAD_DIM, v_dim=HEAD_DIM, dtype=dtype)
    return Span(Layout((spec,) * NUM_LAYERS), 0, NUM_TOKENS, dict.fromkeys(range(NUM_LAYERS), (part,)))


def chain_of(span: Span) -> list[Block]:
    ids = np.random.default_rng(0).integers(0, 49_152, span.num_tokens, dtype=np.int32)
    blocks: list[Block] = []
    start, parent = 0, ROOT
    for end in block_ends(span, 0, span.num_tokens):
        content = packed(span, start, end)
        key = chain(parent, ids[start:end])
        token_ids = ids[start:end].astype("<i4").tobytes()
        blocks.append(Block(key, parent, ROOT, start, token_ids, content.tensors, content.description))
        start, parent = end, key
    return blocks


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_span_on_disk_takes_at_most_2_percent_more_than_in_memory(name: str, dtype: mx.Dtype, tmp_path: Path) -> None:
    span = random_span(name, dtype)
    tier = open_tier(tmp_path / "cache", 1 << 30)
    blocks = chain_of(span)
    assert [block.num_tokens for block in blocks] == [256] * 7 + [208]
    assert all(tier.put(block) == Accepted() for block in blocks)
    assert tier.flush(60).is_empty
    tier.close()
    files = block_files(tmp_path / "cache")
    disk_bytes = sum(path.stat().st_blocks * 512 for path in files)
    assert len(files) == 8
    assert span.kv_bytes < disk_bytes <= 1.02 * span.kv_bytes, disk_bytes / span.kv_bytes
