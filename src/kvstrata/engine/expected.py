"""What forward passes will take beside KV, told from a model's shapes: before it is loaded nothing can be measured.

`scratch.py` measures it when a server starts. The figures here were fitted to what it measured, and err on the side of
taking more.
"""

from __future__ import annotations

from kvstrata.engine.memory import Line, Scratch
from kvstrata.engine.scratch import LEEWAY, LOGIT_BYTES, LOGITS_COPIES, MAX_CHUNK_CPU, MAX_CHUNK_GPU
from kvstrata.layers.kinds import LayerSpec
from kvstrata.models.outline import Outline

FLOAT_BYTES = 4
# Of a chunk's scores with its context, on a CPU: they and their softmax are alive in part at once.
SCORES_COPIES = 1.45
# With sinks, and in models whose layers run one sequence at a time, MLX's own attention is used, which copies more.
PLAIN_SCORES_COPIES = 2.9
# Values as wide as the widest layer that are alive at once: a gate, what it opens, and their product.
WIDE_COPIES = 3
# Of one layer's keys and values as float32: decoded; on a GPU also joined with those of the chunk.
LAYER_COPIES_CPU = 1
LAYER_COPIES_GPU = 3


def expected_scratch(outline: Outline, *, rows: int) -> Scratch:
    """`rows`: most requests in one batch."""
    layout, is_cpu = outline.layout, outline.backend == "cpu"
    chunk = MAX_CHUNK_CPU if is_cpu else MAX_CHUNK_GPU
    item_bytes = max((spec.dtype.size for spec in layout.flat() if spec.kv_heads), default=FLOAT_BYTES)
    wide = WIDE_COPIES * outline.widest * item_bytes
    scores = _score_bytes(outline) * chunk if is_cpu else 0.0  # for each token of the context
    copies = LAYER_COPIES_CPU if is_cpu else LAYER_COPIES_GPU
    layer = copies * max((_float_bytes(spec) for spec in layout.flat()), default=0)
    lines = [
        Line(LOGITS_COPIES * LOGIT_BYTES * rows * outline.vocab_size),
        Line(int(LEEWAY * chunk * max(wide, scores))),
        Line(int(LEEWAY * chunk * wide), LEEWAY * (scores + layer)),
    ]
    if layout.path == "rows" and any(spec.kind == "full" for spec in layout.flat()):
        # Every layer's keys and values are joined at each step, and all of them are alive when it ends.
        lines.append(Line(0, LEEWAY * layout.token_bytes, of_all_rows=True))
    return Scratch(tuple(lines))


def _score_bytes(outline: Outline) -> float:
    """Of one query with one key, in all heads."""
    kinds = {spec.kind for spec in outline.layout.flat()}
    is_plain = outline.layout.path == "rows" or bool(kinds & {"recurrent"})
    return (PLAIN_SCORES_COPIES if is_plain else SCORES_COPIES) * FLOAT_BYTES * max(1, outline.num_heads)


def _float_bytes(spec: LayerSpec) -> int:
    return spec.kv_heads * (spec.k_dim + spec.v_dim) * FLOAT_BYTES
